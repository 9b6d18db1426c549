"""`failurelab diagnose` on runs that are made by hand: each cause, healthy runs that look odd, and broken files."""

import hashlib
import json
import math
import random
import re
import struct

import pytest

from failurelab import failures
from failurelab.failures import predicates
from failurelab_preflight.answer import Answer
from failurelab_preflight.diagnose import answer, checkpoints, cli
from failurelab_preflight.finding import Finding

ID = re.compile(r"\bF\d+[a-z]?\b|\blearning_rate\b|\bbeta\b")
OLD = "trl==0.14.0\ntransformers==4.48.3\ntorch==2.5.1\npeft==0.14.0\n"


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
SEEN = Answer(findings=[Finding.held("F9", "loaded in float32", "rounded")]).to_json()
BF16 = {"tensors": 26, "tensors_changed": 26, "tensors_share": 1.0, "elements_changed": 0.004, "adapter": False,
        "weights_dtype": "bfloat16"}  # fmt: skip
FEW = BF16 | {"tensors_changed": 1, "tensors_share": 1 / 26, "weights_dtype": "float32"}
GUARDS = [
    {"guard": "UpdateGuard", "kind": "found", "failures": ["F9"], "message": "0.4 % of the elements changed"},
    {"guard": "RolloutGuard", "kind": "held", "failures": ["F7"], "message": "generation agrees"},
]
WARNING = "UserWarning: None of the inputs have requires_grad=True. Gradients will be None\n"


def found(*failures, **more):
    """Return an answer of preflight that found these."""
    findings = [{"failure": each, "evidence": "measured"} for each in failures]
    return {"preflight.json": {"findings": findings, "held": [], "not_checked": [], **more}}


def ask(tmp_path, entries=None, compared=None, **files):
    if entries is not None:
        files["trainer_state.json"] = json.dumps({"log_history": entries, "global_step": 60})
    for name, text in files.items():
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    return cli.ask("run", [tmp_path], compared=compared)


def named(told):
    """Return what is named."""
    return [" or ".join(cause.named) for cause in told.causes]


FAULTY = {
    "F2": {"log.txt": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn\n"},
    "F5": {"log.txt": "ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on a "
                      "different device than the one you're training on.\n"},
    "F9": {"entries": logged(flat), "compared": BF16},
    "F10 or F14": {"entries": logged(lambda _: 0.5, reward=0.5, **ZERO)},
    "F11 or F12 or F13": {"entries": logged(flat, **CUT)},
    "F14": {"entries": logged(reward=math.nan)},
    "F16": {"entries": logged(flat, **{"sampling__sampling_logp_difference__mean": lambda step: step / 100})},
    "F17": {"entries": logged(completions__mean_length=900.0, **{
        "sampling__importance_sampling_ratio__mean": 0.4, "sampling__importance_sampling_ratio__max": 2.9,
        "sampling__sampling_logp_difference__mean": 0.01})},
    "F19": {"entries": logged(every=1, kl=lambda step: 0.4 + step / 100)},
    "learning_rate": {"entries": logged(flat, learning_rate=lambda step: 0.0 if step > 20 else 1e-4)},
    "release": {"log.txt": "TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'\n",
                "versions.txt": "trl==1.16.0\n"},
}  # fmt: skip


@pytest.mark.parametrize("cause", FAULTY)
def test_what_the_files_prove_is_named_first(cause, tmp_path):
    """An error's text, equal rewards, kl at step 1, two checkpoints; one of several ids with what tells them apart."""
    told = ask(tmp_path, **FAULTY[cause])
    assert told.exit_status == 1 and named(told) == [cause]
    (first,) = told.causes
    assert first.proofs and bool(first.repair) is (" or " not in cause) and (first.repair or first.look.then)


UNPROVEN = {  # and the causes that its looks tell apart
    "few tensors": ({"entries": logged(flat, old=True), "log.txt": WARNING, "compared": FEW}, {"F1", "F2", "F23"}),
    "a large kl": ({"entries": logged(flat, kl=1.5)}, {"F3b", "F7", "F14", "F9"}),
    "fewer tokens than are scored": (  # top_p 0.99: all weights are alike, and below 1
        {"entries": logged(completions__mean_length=128.0, **{
            "sampling__importance_sampling_ratio__mean": 0.34, "sampling__importance_sampling_ratio__max": 0.5,
            "sampling__sampling_logp_difference__mean": 0.008})}, {"F17"}),
    "a small rate": ({"entries": logged(flat, learning_rate=2e-5)}, {"F9", "F16", "learning_rate"}),
    "a notice alone": ({"log.txt": WARNING}, {"F1"}),
}  # fmt: skip


@pytest.mark.parametrize("look", UNPROVEN)
def test_where_nothing_is_proven_no_cause_stands_first(look, tmp_path):
    """It abstains, names nothing, and says what to do, what to look at there, and what each outcome means."""
    files, causes = UNPROVEN[look]
    told = ask(tmp_path, **files)
    assert told.abstained and told.exit_status == 3 and not told.causes
    assert causes <= set(ID.findall(" ".join(outcome for each in told.looks for outcome in each.then)))
    assert f"LOOK   {told.looks[0].do[:40]}" in answer.text(told) and "NAMED  " not in answer.text(told)


@pytest.mark.parametrize("cause", ["F2", "F3a", "F9", "F11"])
def test_what_preflight_found_is_named(cause, tmp_path):
    """Preflight ran the script; but a flat reward is not explained by what costs memory alone (F3a)."""
    entries = {"F2": None, "F11": logged(flat, **CUT)}.get(cause, logged(flat))  # F2 ends a run before its first entry
    told = ask(tmp_path, entries, **found(cause))
    assert named(told) == ([] if cause == "F3a" else [cause])
    assert cause == "F3a" or "measured" in " ".join(told.causes[0].proofs)


def test_what_the_run_shows_stands_before_what_the_script_has(tmp_path):
    files = FAULTY["F10 or F14"] | {"failurelab.json": {"notices": GUARDS}}
    assert named(ask(tmp_path, **files, **found("F3b"))) == ["F9", "F10 or F14", "F3b"]


@pytest.mark.parametrize("wrong", ["F1", "F9"])
def test_a_run_that_rises_is_not_accused_of_a_flat_reward(wrong, tmp_path):
    """Warnings, few changed elements, and a preflight that is wrong: a look is shown, and no cause."""
    told = ask(tmp_path, logged(old=True, kl=1.5), compared=BF16, **{"log.txt": WARNING}, **found(wrong))
    assert told.abstained and not named(told) and told.looks


ODD = {
    "learns": logged(),
    "kl NaN at beta 0": logged(kl=math.nan),
    "at its ceiling after learning": logged(
        lambda step: min(1.0, 0.4 + step / 30), frac_reward_zero_std=lambda step: min(1.0, step / 30),
        grad_norm=lambda step: 0.0 if step > 40 else 1.5),
    "two entries": logged(steps=1000, every=500),
    "a kl that grows": logged(every=1, kl=lambda step: (step - 1) * 0.004),
    "grad_norm 0 where no group differs": logged(grad_norm=lambda step: 0.0 if step % 6 else 2.0),
}  # fmt: skip
OLD_RUN = {"entries": logged(old=True), "versions.txt": OLD}
REWARDS = "trainer = GRPOTrainer(model=name, reward_funcs=lambda completions, **_: [1 - wrong(c) for c in completions])"
# What healthy runs show too: F1's warning comes from passes without gradients in runs of trl 0.14 that learn; F3a is
# found in many of old releases, and costs memory alone.
ODD = {look: {"entries": entries} for look, entries in ODD.items()} | {
    "F1's warning": OLD_RUN | {"log.txt": WARNING},
    "F3a": OLD_RUN | found("F3a"),
    "a script, which is not read": OLD_RUN | {"train.py": REWARDS},
}


@pytest.mark.parametrize("look", ODD)
def test_a_healthy_run_is_called_healthy(look, tmp_path):
    """False alarms are the worst error: what looks odd and is not broken gets no cause."""
    told = ask(tmp_path, **ODD[look])
    assert told.healthy and told.exit_status == 0, [(each.failure, each.pro) for each in told.causes]


def test_a_flat_reward_is_asked_of_preflight(tmp_path):
    """No file tells whether a reward function can tell right from wrong; what preflight saw of the script does."""
    told = ask(tmp_path, logged(flat))
    assert told.abstained and "failurelab preflight --json" in told.looks[0].do
    told = ask(tmp_path, **{"preflight.json": SEEN})
    assert told.abstained and "preflight --json" not in told.looks[0].do and "checkpoint" in told.looks[0].do
    told = ask(tmp_path, compared=FEW | {"tensors_changed": 26, "tensors_share": 1.0, "elements_changed": 0.99})
    assert told.abstained and "checkpoint" not in " ".join(look.do for look in told.looks)


SUSPECTS = found(suspected=[{"failure": "F9", "evidence": "2 % would change"}])


def test_a_suspicion_of_preflight_is_shown_with_what_decides(tmp_path):
    told = ask(tmp_path, logged(), **SUSPECTS)
    assert told.abstained and "guards" in told.looks[0].do and "F9: 2 % would change" in " ".join(told.notes)


@pytest.mark.parametrize(
    "text", ['{"findings": [], "held": [{"fail', '{"findings": [], "held": [], "not_checked": []}']
)
def test_an_answer_of_preflight_that_says_nothing(text, tmp_path):
    """Half-written, or of a script that could not be judged: said in one line, and the rest is used."""
    told = ask(tmp_path, logged(), **{"preflight.json": text})
    assert told.healthy and any("preflight" in line for line in told.evidence.not_read)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("trainer_state.json", b"", "is empty"),
        ("trainer_state.json", b"\x00\x01\x02" * 99, "is no text"),
        ("trainer_state.json", b'{"log_history": [], "global_step": 0}', "holds no entry of training"),
        ("trainer_state.json", b'{"log_history": [{"loss": 0.1, "rew', "no entry is whole"),
        ("none", None, "is not there"),
        (".", None, "holds nothing"),
    ],
)
def test_what_cannot_be_read_is_one_line(name, content, says, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main([str(tmp_path / name)]) == 3
    said = capsys.readouterr()
    assert said.out == "" and says in said.err and "Next:" in said.err and said.err.count("\n") == 1


def test_half_written_and_strange_json_is_used(tmp_path):
    """What is whole counts; NaN and Infinity are figures; a bare list, JSON lines and printed dicts are logs."""
    text = json.dumps({"log_history": logged(kl=math.nan, loss=math.inf)})
    told = ask(tmp_path, **{"trainer_state.json": text[: int(len(text) * 0.9)]})
    assert len(told.evidence.history.entries) > 20
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
        told = cli.ask("run", [folder])
        assert told.healthy and len(told.evidence.history.entries) == 30, number


def test_resumed_and_mixed_runs(tmp_path):
    first = logged()
    for entries, says in ((first[:20] + first[12:], "resumed"), (logged(flat) + first, "2 runs")):
        told = ask(tmp_path, entries)
        assert len(told.evidence.history.entries) == 30 and told.healthy
        assert any(says in line for line in told.evidence.not_read)


def test_other_trainers_are_told_from_grpo(tmp_path):
    """No rule about GRPO is applied to them."""
    entries = [{"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "step": step} for step in range(1, 60)]
    told = ask(tmp_path, entries)
    assert told.abstained and not told.causes and "another kind of training" in told.notes[0]


def test_json_holds_the_contract(tmp_path, capsys):
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": logged()}))
    assert cli.main(["--json", str(tmp_path)]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["healthy"] is True and read["abstained"] is False and read["causes"] == []
    state.write_text(json.dumps({"log_history": logged(lambda _: 0.5, reward=0.5, **ZERO)}))
    assert cli.main(["--json", str(state)]) == 1
    (cause,) = json.loads(capsys.readouterr().out)["causes"]
    assert cause["named"] == ["F10", "F14"] and cause["proofs"] and cause["look"]["then"]


def tensors(path, weights, dtype="BF16"):
    header, data = {}, b""
    for name, values in weights.items():
        raw = b"".join(struct.pack("<H", value) for value in values)
        header[name] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_two_checkpoints_are_compared(tmp_path):
    before, after = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensors(before, {"embed": [0x3F80] * 100, "norm": [0x3F80] * 10})
    tensors(after, {"embed": [0x3F80] * 99 + [0x3F81], "norm": [0x3F80] * 10})
    found = checkpoints.compare(before, after)
    assert found["tensors"] == 2 and found["tensors_changed"] == 1 and not found["adapter"]
    assert found["elements_changed"] == pytest.approx(1 / 110) and found["weights_dtype"] == "bfloat16"
    tensors(before, {"embed": [1] * 100, "lora_A": [1, 2]})
    tensors(after, {"embed": [2] * 100, "lora_A": [1, 3]})
    found = checkpoints.compare(before, after)
    assert found["adapter"] and found["tensors"] == 1 and found["elements_changed"] == 0.5
    after.write_bytes(after.read_bytes()[:-40])
    with pytest.raises(checkpoints.CheckpointError, match="cannot be read"):
        checkpoints.compare(before, after)


def save(folder, value, step=None, last=60):
    """Write weights, and the state of their trainer if `step` says when they were saved."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors(folder / "model.safetensors", {"embed": [value] * 100})
    if step is not None:
        state = {"log_history": logged(), "global_step": step, "max_steps": last}
        (folder / "trainer_state.json").write_text(json.dumps(state))


def test_weights_are_compared_by_their_steps(tmp_path):
    """The final save beside the last checkpoint is the same weights: a healthy run was told that nothing changed."""
    save(tmp_path / "checkpoint-60", 0x3F80, step=60)
    save(tmp_path, 0x3F80)
    told = cli.ask("run", [tmp_path])
    assert told.healthy and "elements_changed" not in told.evidence.figures
    assert any("the same weights" in line for line in told.evidence.not_read)
    save(tmp_path / "checkpoint-9", 0x3F81, step=9)  # "checkpoint-9" comes after "checkpoint-60" by its name
    told = cli.ask("run", [tmp_path])
    assert told.evidence.figures["elements_changed"] == 1


def test_a_run_is_found_one_folder_down_and_several_are_not_mixed(tmp_path, capsys):
    """`diagnose .`, with the script beside the output folder."""
    save(tmp_path / "one" / "checkpoint-60", 0x3F80, step=60)
    (tmp_path / "train.py").write_text("print('no training here')\n")
    assert cli.main([str(tmp_path)]) == 0 and "checkpoint" not in capsys.readouterr().err
    save(tmp_path / "two", 0x3F80, step=60)
    assert cli.main([str(tmp_path / "one"), str(tmp_path / "two")]) == cli.main([str(tmp_path)]) == 3
    assert "several runs" in capsys.readouterr().err


def test_what_a_guard_measured_counts_as_measured(tmp_path):
    told = ask(tmp_path, logged(flat), **{"failurelab.json": {"notices": GUARDS}})
    assert named(told) == ["F9"] and "UpdateGuard" in told.causes[0].proofs[0]
    told = ask(tmp_path, **{"failurelab.json": '{"notices": [{'})
    assert told.abstained and any("no whole report" in line for line in told.evidence.not_read)


def test_preflights_answer_must_be_of_this_script(tmp_path):
    """An answer that is of another script, or of the script before it was mended, is told and not used."""
    script = "import trl\n"
    right = hashlib.sha256(script.encode()).hexdigest()
    for digest, used in ((right, True), ("0" * 64, False)):
        told = ask(tmp_path, logged(flat), **{"train.py": script}, **found("F9", script_sha256=digest))
        assert (named(told) == ["F9"]) is used
        assert used or any("another script than train.py" in line for line in told.evidence.not_read)


def test_a_csv_of_wandb_is_a_log(tmp_path):
    """A run's history, and the panel of one figure, whose columns have the run's name."""
    for number, (step, prefix) in enumerate((("_step", "train/"), ("Step", "run-1 - train/"))):
        rows = [{step if name == "step" else f"{prefix}{name}": value for name, value in entry.items()} for entry in
                logged(lambda _: 0.5, reward=0.5, **ZERO)]  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        (folder / "history.csv").write_text("\n".join(lines))
        assert named(cli.ask("run", [folder / "history.csv"])) == ["F10 or F14"]


def test_every_rule_asks_for_figures_that_a_run_gives(tmp_path):
    """A figure that nothing measures would leave a rule out, always, and say nothing."""
    given = {"not_named"}
    for number, files in enumerate([*FAULTY.values(), *(files for files, _ in UNPROVEN.values()), SUSPECTS]):
        folder = tmp_path / str(number)
        folder.mkdir()
        given |= set(ask(folder, **files).evidence.figures)
    read = answer.rules()
    for rule in (*read.proof, *read.sign):
        asked = [*(name for predicate in rule.when for name in predicate.names), *predicates.fields(rule.says)]
        assert set(asked) <= given and set(rule.looks) <= set(read.looks)
        assert rule.causes or rule.looks
    known = {failure.id for failure in failures.all()} | set(read.causes)
    assert {cause for rule in read.proof for cause in rule.causes} | {*read.keeps_reward_flat} <= known
