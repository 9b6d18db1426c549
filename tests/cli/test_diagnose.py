"""`failurelab diagnose` on runs that are made by hand: each cause, healthy runs that look odd, and broken files."""

import json
import math
import random
import struct
import subprocess
import sys

import pytest

from failurelab.diagnose import checkpoints, command, rules
from failurelab.failures import predicates

TODAY = "trl==1.16.0\ntransformers==5.23.0\ntorch==2.13.0\npeft==0.21.2\n"
OLD = "trl==0.14.0\ntransformers==4.48.3\ntorch==2.5.1\npeft==0.14.0\n"
SCRIPT = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

def exact(completions, answer, **kwargs):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]

rows = Dataset.from_dict({"prompt": [f"{a}+1=" for a in range(9)], "answer": [str(a + 1) for a in range(9)]})
tokenizer = AutoTokenizer.from_pretrained("my/model")
model = AutoModelForCausalLM.from_pretrained("out/model", dtype="float32")
args = GRPOConfig(output_dir="out", learning_rate=2e-4, temperature=1.0, max_completion_length=64, beta=0.0,
                  gradient_checkpointing=False)
trainer = GRPOTrainer(model=model, reward_funcs=exact, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
"""


def logged(rewards=None, *, steps=60, every=2, old=False, **figures):
    """Entries of a healthy run; what is given replaces its figures: a value, or a function of the step."""
    noise = random.Random(0)
    entries = []
    for step in range(every, steps + 1, every):
        reward = (rewards or (lambda at: 0.3 + 0.4 * at / steps))(step) + noise.gauss(0, 0.02)
        length = {"completion_length": 20.0} if old else {
            "completions/mean_length": 20.0 + noise.gauss(0, 1), "completions/clipped_ratio": 0.02,
            "clip_ratio/region_mean": 0.0, "entropy": 0.5 - 0.2 * step / steps, "frac_reward_zero_std": 0.2,
        }  # fmt: skip
        entry = {"loss": noise.gauss(0, 0.01), "grad_norm": 1.5 + noise.random(), "learning_rate": 2e-4,
                 "reward": reward, "reward_std": 0.4, "step": step, **length}  # fmt: skip
        for name, value in figures.items():
            entry[name.replace("__", "/")] = value(step) if callable(value) else value
        entries.append({name: value for name, value in entry.items() if value is not None})
    return entries


def flat(_):
    return 0.4


ZERO = {"grad_norm": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "loss": 0.0}
CUT = {"completions__clipped_ratio": 0.99, "completions__mean_length": 64.0}


def ask(tmp_path, entries=None, **files):
    """Write a run's files and return the answer."""
    if entries is not None:
        files["trainer_state.json"] = json.dumps({"log_history": entries, "global_step": 60})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return command.ask("run", [tmp_path])


def script(*edits):
    text = SCRIPT
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return {"train.py": text}


FAULTY = {
    "F1": ({"versions": OLD, "entries": logged(flat, old=True)}, [
        ("gradient_checkpointing=False", "gradient_checkpointing=True"),
        ("args =", "model.get_input_embeddings().requires_grad_(False)\nargs ="),
        ("trainer.train()", "trainer.generation_config.use_cache = False\ntrainer.train()")]),
    "F2": ({"log": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn\n"}, []),
    "F3b": ({"versions": OLD.replace("4.48.3", "4.52.4"), "entries": logged(flat, old=True)}, []),
    "F4": ({"log": "AttributeError: 'Qwen2ForCausalLM' object has no attribute 'optimizer'\n"}, []),
    "F5": ({"log": "ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on a "
                "different device than the one you're training on.\n"}, []),
    "F6": ({"log": "Input tensors need to be on the same GPU, but found the following tensor and device "
                "combinations\n"}, []),
    "F7": ({"versions": OLD, "entries": logged(flat, old=True)},
           [("gradient_checkpointing=False", "gradient_checkpointing=True")]),
    "F8": ({"versions": OLD, "entries": logged(old=True)}, [
        ("args =", "model = PeftModel.from_pretrained(model, 'sft', is_trainable=True)\nargs ="),
        ("processing_class=tokenizer)", "processing_class=tokenizer, peft_config=LoraConfig())")]),
    "F9": ({"entries": logged(flat, learning_rate=1e-6)}, [('"float32"', '"bfloat16"')]),
    "F10": ({"entries": logged(lambda _: 0.5, reward=0.5, **ZERO)},
            [("float(completion.strip() == right)", "0.5")]),
    "F11": ({"entries": logged(lambda _: 0.0, reward=0.0, **ZERO, **CUT)}, []),
    "F12": ({"entries": logged(lambda _: 0.0, reward=0.0, **ZERO, **CUT)}, [("out/model", "Qwen2-0.5B-Instruct")]),
    "F13": ({"versions": TODAY.replace("1.16.0", "0.22.2").replace("5.23.0", "4.56.2"),
                 "entries": logged(**CUT)}, [('("my/model")', '("my/model", eos_token="<|endoftext|>")')]),
    "F14": ({"entries": logged(lambda _: 0.0, reward=0.0, **ZERO)}, [
        ("completions, answer, **kwargs", "completions, solution=None, **kwargs"),
        ("zip(completions, answer)", "zip(completions, solution or [])")]),
    "F15": ({"versions": OLD, "entries": logged(old=True)}, [("temperature=1.0", "temperature=0.7")]),
    "F16": ({"entries": logged(flat)}, [
        ("trainer = GRPO", "engine = copy.deepcopy(model)\n\ndef draw(prompts, trainer):\n"
         "    return engine.generate(prompts)\n\ntrainer = GRPO"),
        ("args=args", "args=args, rollout_func=draw")]),
    "F17": ({"entries": logged(completions__mean_length=900.0, **{
        "sampling__importance_sampling_ratio__mean": 0.4, "sampling__importance_sampling_ratio__min": 0.0,
        "sampling__sampling_logp_difference__mean": 0.01})}, []),
    "F18": ({"entries": logged(**{"sampling__sampling_logp_difference__mean": 0.02,
                                   "sampling__sampling_logp_difference__max": 11.0})}, []),
    "F19": ({"entries": logged(every=1, kl=lambda step: 0.4 + step / 100)}, []),
    "F20": ({"versions": TODAY.replace("1.16.0", "1.5.0"), "entries": logged()}, [
        ("beta=0.0", "beta=0.0, steps_per_generation=4, gradient_accumulation_steps=1")]),
    "learning_rate": ({"entries": logged(flat, learning_rate=0.0)}, []),
    "beta": ({"entries": logged(flat, kl=0.02, loss=0.1)}, []),
}  # fmt: skip
NEEDS_NO_SCRIPT = {"F17", "F18", "F19", "F2", "F4", "F5", "F6", "beta"}


@pytest.mark.parametrize("cause", FAULTY)
def test_each_cause_is_named_first(cause, tmp_path):
    """With what its rule asks for, each cause is named, with figures, a probe, and no other before it."""
    given, edits = FAULTY[cause]
    files = {} if cause in NEEDS_NO_SCRIPT else script(*edits)
    files |= {"log.txt": given["log"]} if "log" in given else {}
    if cause not in NEEDS_NO_SCRIPT:
        files["versions.txt"] = given.get("versions", TODAY)
    told = ask(tmp_path, given.get("entries"), **files)
    assert told.exit_status == 1, told
    assert told.causes[0].failure == cause, [(each.failure, each.weight, each.pro) for each in told.causes]
    assert told.causes[0].pro and told.causes[0].probe


@pytest.mark.parametrize("name", ["answers", "answer"])
def test_a_list_of_its_own_beside_the_column(name, tmp_path):
    """zip(completions, answers) compares by place with a list of the script; the column of a batch does not."""
    edits = [("rows = Dataset", "answers = [str(a + 1) for a in range(9)]\nrows = Dataset")]
    edits += [("zip(completions, answer)", f"zip(completions, {name})")] if name == "answers" else []
    told = ask(tmp_path, logged(flat), **script(*edits), **{"versions.txt": TODAY})
    named = [each.failure for each in told.causes if each.weight >= rules.CONVICTS]
    assert named == (["F14"] if name == "answers" else [])


ODD = {
    "learns": logged(),
    "loss 0 in the first steps, and below 0": logged(loss=lambda step: 0.0 if step < 10 else -0.01),
    "no kl, clip_ratio 0": logged(clip_ratio__region_mean=0.0),
    "kl NaN at beta 0": logged(kl=math.nan),
    "half of the groups without variance": logged(frac_reward_zero_std=0.5),
    "at its ceiling after learning": logged(
        lambda step: min(1.0, 0.4 + step / 30), frac_reward_zero_std=lambda step: min(1.0, step / 30),
        grad_norm=lambda step: 0.0 if step > 40 else 1.5),
    "slow": logged(lambda step: 0.40 + 0.12 * step / 60),
    "short": logged(flat, steps=12, every=1),
    "two entries": logged(steps=1000, every=500),
    "a kl that grows": logged(every=1, kl=lambda step: (step - 1) * 0.004),
    "grad_norm 0 where no group differs": logged(grad_norm=lambda step: 0.0 if step % 6 else 2.0),
}  # fmt: skip


@pytest.mark.parametrize("look", ODD)
@pytest.mark.parametrize("handed", ["scalars", "script and versions"])
def test_a_healthy_run_is_called_healthy(look, handed, tmp_path):
    """False alarms are the worst error: what looks odd and is not broken gets no cause."""
    files = script() | {"versions.txt": TODAY} if handed != "scalars" else {}
    told = ask(tmp_path, ODD[look], **files)
    assert told.healthy and told.exit_status == 0, [(each.failure, each.pro) for each in told.causes]


def test_a_warning_in_a_run_with_gradients_is_no_cause(tmp_path):
    """F1's warning comes from passes without gradients too: trl 0.14 prints it in runs that learn."""
    warning = "UserWarning: None of the inputs have requires_grad=True. Gradients will be None\n"
    edits = [("gradient_checkpointing=False", "gradient_checkpointing=True"),
             ("trainer.train()", "trainer.generation_config.use_cache = False\ntrainer.train()")]  # fmt: skip
    told = ask(tmp_path, logged(old=True), **script(*edits), **{"log.txt": warning, "versions.txt": OLD})
    assert told.healthy, told.causes


def test_what_scalars_cannot_separate_is_not_named(tmp_path):
    """The same flat reward: rounding and a stale engine are possible, and the files are named that tell."""
    told = ask(tmp_path, logged(flat, entropy=0.5, learning_rate=2e-5))
    assert told.abstained and told.exit_status == 3
    assert told.causes[0].failure == "F9" and "script" in told.probe and "checkpoints" in told.probe
    (tmp_path / "probes.json").write_text(
        json.dumps({"tensors": 26, "tensors_changed": 26, "elements_changed": 0.004, "dtypes": ["bfloat16"]})
    )
    told = command.ask("run", [tmp_path])
    assert not told.abstained and told.causes[0].failure == "F9"


SEEN = {"findings": [], "held": [{"failure": "F9", "evidence": "loaded in float32"}], "not_checked": []}


def test_a_flat_reward_is_asked_of_preflight(tmp_path):
    """No file tells whether a reward function can tell right from wrong; what preflight saw of the script does."""
    files = script() | {"versions.txt": TODAY}
    told = ask(tmp_path, logged(flat), **files)
    assert told.abstained and told.causes[0].failure == "F14" and "--preflight" in told.probe
    (tmp_path / "preflight.json").write_text(json.dumps(SEEN))
    told = command.ask("run", [tmp_path])
    assert told.healthy and any("does not rise" in note for note in told.notes)
    found = SEEN | {"findings": [{"failure": "F14", "evidence": "asks for solution, which never arrives"}]}
    (tmp_path / "preflight.json").write_text(json.dumps(found))
    told = command.ask("run", [tmp_path])
    assert told.exit_status == 1 and told.causes[0].failure == "F14" and told.causes[0].from_step == 2
    assert "never arrives" in told.causes[0].pro[0]


def test_what_costs_memory_alone_explains_no_curve(tmp_path):
    """F3a is found in many healthy runs of old releases."""
    found = SEEN | {"findings": [{"failure": "F3a", "evidence": "all rows of logits are made"}]}
    told = ask(tmp_path, logged(old=True), **{"versions.txt": OLD, "preflight.json": json.dumps(found)})
    assert told.healthy


@pytest.mark.parametrize(
    "text", ['{"findings": [], "held": [{"fail', '{"findings": [], "held": [], "not_checked": []}']
)
def test_an_answer_of_preflight_that_says_nothing(text, tmp_path):
    """Half-written, or of a script that could not be judged: said in one line, and the rest is used."""
    told = ask(tmp_path, logged(), **{"preflight.json": text})
    assert told.healthy and any("preflight" in line for line in told.evidence.not_read)


def test_preflight_is_run_where_it_is_asked_for(tmp_path, capsys):
    """A run without its script is one line; a script that trains nothing is said, and the rest is used."""
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": logged()}))
    assert command.main(["--preflight", str(tmp_path)]) == 3
    error = capsys.readouterr().err
    assert "needs the run's script" in error and error.count("\n") == 1
    (tmp_path / "train.py").write_text("print('no training here')\n")
    assert command.main(["--preflight", str(tmp_path)]) == 0
    assert "not read: preflight.json: preflight could not judge the script" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "trainer_state.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\x00\x01\x02" * 99, "is binary"),
        (b'{"log_history": [], "global_step": 0}', "holds no entry of training"),
        (b'{"log_history": [{"loss": 0.1, "rew', "no entry is whole"),
    ],
)
def test_what_cannot_be_read_is_one_line(content, says, tmp_path):
    """Status 3, and a line with the next step."""
    (tmp_path / "trainer_state.json").write_bytes(content)
    run = subprocess.run(
        [sys.executable, "-m", "failurelab.diagnose", str(tmp_path / "trainer_state.json")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 3 and run.stdout == ""
    assert says in run.stderr and "Next:" in run.stderr and run.stderr.count("\n") == 1


def test_nothing_there_is_one_line(tmp_path, capsys):
    """No such file, and a folder with nothing in it."""
    for path, says in ((tmp_path / "none", "is not there"), (tmp_path, "holds nothing")):
        assert command.main([str(path)]) == 3
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def test_half_written_and_strange_json_is_used(tmp_path):
    """What is whole counts; NaN and Infinity are figures; a bare list, JSON lines and printed dicts are logs."""
    text = json.dumps({"log_history": logged(kl=math.nan, loss=math.inf)})
    told = ask(tmp_path, **{"trainer_state.json": text[: int(len(text) * 0.9)]})
    assert told.evidence.history.entries > 20
    assert any("ends in the middle" in line for line in told.evidence.not_read)
    for number, text in enumerate((
        json.dumps(logged()),
        "\n".join(map(json.dumps, logged())),
        "\n".join(map(str, logged())),
        "\n".join(f"50%|##| { {name: str(value) for name, value in entry.items()} }" for entry in logged()),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.log").write_text(text)
        told = command.ask("run", [folder])
        assert told.healthy and told.evidence.history.entries == 30, number


def test_resumed_and_mixed_runs(tmp_path):
    """A resumed run is one; of two runs in a log the last counts; steps out of order are sorted; each is said."""
    first, shuffled = logged(), logged()
    random.Random(1).shuffle(shuffled)
    for entries, says, count in (
        (first[:20] + first[12:], "resumed", 30),
        (logged(flat) + first, "2 runs", 30),
        (shuffled, "out of order", 30),
    ):
        told = ask(tmp_path, entries)
        assert told.evidence.history.entries == count and told.healthy
        assert any(says in line for line in told.evidence.not_read)


@pytest.mark.parametrize(
    ("figures", "kind"),
    [
        ({"rewards/chosen": 0.1, "rewards/margins": 0.2}, "DPO"),
        ({"mean_token_accuracy": 0.7}, "SFT"),
        ({"objective/kl": 1.0, "policy/approxkl_avg": 0.1}, "PPO"),
    ],
)
def test_other_trainers_are_told_from_grpo(figures, kind, tmp_path):
    """No rule about GRPO is applied to them."""
    entries = [{"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "step": step, **figures} for step in range(1, 60)]
    told = ask(tmp_path, entries)
    assert told.abstained and not told.causes and kind in told.notes[0]


def test_json_holds_the_contract(tmp_path, capsys):
    """Causes, likeliest first, and two truth values; of two runs a list."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for name, entries in (("one", logged()), ("two", logged(lambda _: 0.5, reward=0.5, **ZERO))):
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    assert command.main(["--json", str(tmp_path / "one")]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["healthy"] is True and read["abstained"] is False and read["causes"] == []
    page = tmp_path / "page.html"
    assert command.main(["--json", "--html", str(page), str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    _, broken = json.loads(capsys.readouterr().out)
    assert broken["causes"][0].keys() >= {"failure", "weight", "for", "against", "probe"}
    assert broken["causes"][0]["failure"] == "F10" and broken["causes"][0]["from_step"] == 2
    assert page.read_text().count("<svg") > 8 and "<script" not in page.read_text()


def tensors(path, weights, dtype="BF16"):
    """Write a safetensors file by hand."""
    header, data = {}, b""
    for name, values in weights.items():
        raw = b"".join(struct.pack("<H", value) for value in values)
        header[name] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_two_checkpoints_are_compared(tmp_path):
    """By their bytes, without a library: the share of elements that differ, and weights that are no numbers."""
    before, after = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensors(before, {"embed": [0x3F80] * 100, "norm": [0x3F80] * 10})
    tensors(after, {"embed": [0x3F80] * 99 + [0x3F81], "norm": [0x3F80] * 10})
    found = checkpoints.compare(before, after)
    assert found["tensors"] == 2 and found["tensors_changed"] == 1 and found["finite"]
    assert found["elements_changed"] == pytest.approx(1 / 110) and found["dtypes"] == ["bfloat16"]
    tensors(after, {"embed": [0x7FC0] * 100, "norm": [0x3F80] * 10})
    assert not checkpoints.compare(before, after)["finite"]
    after.write_bytes(after.read_bytes()[:-40])
    with pytest.raises(checkpoints.CheckpointError, match="middle"):
        checkpoints.compare(before, after)


def test_every_rule_can_be_read_and_its_texts_filled():
    """Each names a figure in its texts that it also asks for, or that its source gives; `--explain` prints all."""
    read, signs = rules.load()
    assert {rule.cause for rule in read} >= {f"F{number}" for number in range(4, 21)} | {"F1", "F2", "F3a", "F3b"}
    text = rules.explain()
    for rule in read:
        assert rule.probe in text
        for part in (*rule.pro, *rule.contra):
            assert part.when and part.weight > 0
            assert all(predicates.fields(part.says) or [True])
    assert signs
