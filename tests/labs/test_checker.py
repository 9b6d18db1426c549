"""The checker is not fooled, not hung and not left behind: cheats, crashes, broken environments, each by its name."""

import contextlib
import os
import pathlib
import shutil
import signal

import pytest
from tests.cli.benchmark_scripts import load
from tests.files import edit
from tests.labs.conftest import LAB, shorten

from failurelab_course import eras
from failurelab_course.labs import verify as labs
from failurelab_course.labs.checker import client as check_client
from failurelab_course.labs.checker import measure
from failurelab_course.labs.checker import server as check_server

pytestmark = pytest.mark.slow

MODEL = eras.root() / "models" / "tiny-qwen2"
CONFIG, RETURN, IMPORT = "    config = GRPOConfig(", "    return trainer\n", "import pathlib\n"


def before(anchor, lines):
    """Return the edit that puts lines before a text of the script."""
    return anchor, f"{lines}\n{anchor}"


REPAIR = before(CONFIG, "    model.enable_input_require_grads()")
HIDDEN = """class Trainer(GRPOTrainer):
    def compute_loss(self, model, *args, **kwargs):
        model.gradient_checkpointing_disable()
        loss = super().compute_loss(model, *args, **kwargs)
        model.gradient_checkpointing_enable()
        return loss
"""
SHOWN = """class Trainer(GRPOTrainer):
    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        loss.register_hook(lambda _: model(input_ids=torch.ones(1, 2, dtype=torch.long)) and None)
        return loss
"""
BY_HEART = """class Trainer(GRPOTrainer):
    def compute_loss(self, model, *args, **kwargs):
        loss = super().compute_loss(model, *args, **kwargs)
        ids = self.processing_class(["3+4=7"], return_tensors="pt")["input_ids"]
        return 0 * loss + model(input_ids=ids, labels=ids).loss
"""
FEWER = "processing_class=tokenizer, optimizers=(torch.optim.AdamW(model.model.norm.parameters()), None))"
EMBEDDINGS = "get_input_embeddings().requires_grad_(False)"
# name: what the checker must say, and edits of train.py
CHEATS = {
    "prints_the_right_words": (
        "24 of 25 tensors still have no gradient",
        before(RETURN, "    print('PASS: all 25 trainable tensors have a gradient')"),
    ),
    "skips_the_training": ("0 of 70 steps were", REPAIR, before(RETURN, "    trainer.train = lambda *_, **__: None")),
    "trains_at_rate_zero": ("the learning rate is 0", REPAIR, ("learning_rate=5e-4", "learning_rate=0.0")),
    "freezes_everything": (
        "training raised RuntimeError: element 0",
        before(CONFIG, "    model.requires_grad_(False)"),
    ),
    "freezes_what_fails": ("25 tensors are frozen", before(CONFIG, "    model.model.layers.requires_grad_(False)")),
    "freezes_another": ("the embeddings were changed", (EMBEDDINGS, "model.norm.requires_grad_(False)")),
    "switches_checkpointing_off_for_the_pass": (
        "layers keep their activations for the backward pass",
        before("def build_trainer(", HIDDEN + "\n"),
        ("trainer = GRPOTrainer(", "trainer = Trainer("),
    ),
    "computes_layers_again_for_show": (
        "layers keep their activations for the backward pass",
        before("def build_trainer(", SHOWN + "\n"),
        ("trainer = GRPOTrainer(", "trainer = Trainer("),
        ("gradient_checkpointing=True", "gradient_checkpointing=False"),
    ),
    "learns_an_answer_by_heart": (
        "rows were trained on that the model did not draw",
        REPAIR,
        before("def build_trainer(", BY_HEART + "\n"),
        ("trainer = GRPOTrainer(", "trainer = Trainer("),
    ),
    "leaves_tensors_out_of_the_optimizer": ("tensors are frozen", REPAIR, ("processing_class=tokenizer)", FEWER)),
    "brings_other_weights": (
        "not the one in model_path",
        REPAIR,
        before(CONFIG, "    model.lm_head.weight.data.mul_(1.5)"),
    ),
    "trains_beforehand": ("6 steps before it was handed over", REPAIR, before(RETURN, "    trainer.train()")),
    "returns_nothing": ("returned a NoneType", (RETURN, "")),
    "leaves_early": ("SystemExit", before(IMPORT, "import sys\n\nsys.exit(0)")),
    "misspells": ("build_trainer raised AttributeError", ("model.get_input_embeddings", "model.get_imput_embeddings")),
    "rewards_everything": ("too little was", REPAIR, ("[float(completion.strip() == right) for", "[1.0 for")),
}


@pytest.fixture(scope="session")
def short_lab(tmp_path_factory):
    return labs.load(shorten(shutil.copytree(eras.root() / "labs" / LAB, tmp_path_factory.mktemp("labs") / LAB)))


@pytest.fixture(scope="session")
def cheats(short_lab, tmp_path_factory):
    """All cheats, checked in one go."""
    folder = tmp_path_factory.mktemp("cheats")
    paths = []
    for name, (_, *edits) in CHEATS.items():
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(edit(short_lab.broken.text(), *edits))
    return {pathlib.Path(row.script).stem: row for row in labs.check_all(short_lab, paths)}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(cheats, name):
    row = cheats[name]
    assert row.result == "FAIL", row.reason
    assert CHEATS[name][0] in row.reason


# Of a stranger's shortcuts, one for each look that refuses some: what the checker must say.
SHORTCUTS = {
    "24_c": "completions are drawn with top_k=2",
    "26_b": "does not follow its own ratio",
    "27_d": "the engine is to draw",
    "38_d": "128 completions are in one forward pass",
    "41_a": "options of the algorithm are",
    "46_c": "of the tokens that were drawn are left out",
    "46_d": "rendered otherwise",
}


@pytest.fixture(scope="session")
def shortcuts(tmp_path_factory):
    """All of them, each as an answer to its lab, in one go."""
    folder = load("archives").unpack(load("lab_shortcuts").ARCHIVE, tmp_path_factory.mktemp("shortcuts"))
    answers = [(labs.find([name.partition("_")[0]])[0], folder / f"{name}.py") for name in SHORTCUTS]
    return dict(zip(SHORTCUTS, labs.check_each(answers), strict=True))


@pytest.mark.parametrize("name", SHORTCUTS)
def test_a_shortcut_is_refused(shortcuts, name):
    assert shortcuts[name].result == "FAIL" and SHORTCUTS[name] in shortcuts[name].reason


HANG = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({pids!r}).write_text(f"{{__import__('os').getpid()}} {{child.pid}}")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server():
    """A check server of the course's own era, on a machine with GPUs; the last test kills it."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("CUDA_VISIBLE_DEVICES", "3,7")
        with check_client.start("today", ["transformers.Trainer"], jobs=2) as started:
            yield started


ON_THE_CPU = """
import os, pathlib
import transformers

seen = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("DS_ACCELERATOR", "")
pathlib.Path({seen!r}).write_text("/".join(seen))


def build_trainer(model_path, output_dir):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    args = transformers.TrainingArguments(output_dir, use_cpu=True, report_to=[])
    return transformers.Trainer(model, args)
"""


@pytest.mark.parametrize(("device", "shown"), [("cpu", ""), ("cuda:1", "7")])
def test_gpus_are_hidden_unless_asked_for_and_the_cpu_is_no_gpu(server, tmp_path, device, shown):
    """A script sees no GPU by default. One that stays on the CPU where a GPU is checked gets a line, and no figures."""
    seen, script = tmp_path / "seen", tmp_path / "train.py"
    script.write_text(ON_THE_CPU.format(seen=str(seen)))
    on_gpu = check_client.start("today", ["transformers.Trainer"], 1, device=device)
    with on_gpu if device != "cpu" else contextlib.nullcontext(server) as asked:
        assert asked.broken == {}
        asked.check(0, script, MODEL, "Trainer", 120)
        answer = asked.answer(400)
    assert seen.is_file(), answer
    assert seen.read_text().split("/") == [shown, "cpu"]
    refused, metrics = answer["measured"]["refused"], answer["measured"]["metrics"]
    if device == "cpu":
        assert refused == "" and "ValueError" in metrics["error"]  # the Trainer has no dataset: it got as far
    else:
        assert refused.startswith("the trainer's model is on cpu, and this check is on cuda: ")
        assert "Next: use_cpu=not torch.cuda.is_available()" in refused


EATS = """
held = []
while True:
    held.append(bytearray(b"x" * 2**24))
"""
FORKS = """
import os, time
for _ in range(60):
    if not os.fork():
        time.sleep(600)
time.sleep(600)
"""
# It leaves its group, its session and its parent.
DAEMON = """
import os, pathlib, time
begun, begin = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        pathlib.Path({pids!r}).write_text(str(os.getpid()))
        os.write(begin, b"1")
        time.sleep(600)
    os._exit(0)
os.read(begun, 1)
"""


def test_a_script_that_hangs_or_dies_or_eats_the_machine_is_ended_and_named(server, tmp_path, gone):
    """Time, memory, processes, one in the background: what it started is ended with it, and the server goes on."""
    pids, daemon = tmp_path / "pids", tmp_path / "daemon"
    codes = {
        # It must have begun before it is ended, also where a start takes long; the others run beside it.
        "hangs": HANG.format(pids=str(pids)),
        "leaves": "import os; os._exit(7)",
        "aborts": "import os; os.abort()",
        "is killed": "import os; os.kill(os.getpid(), 9)",
        "eats": EATS,
        "forks": FORKS,
        "daemon": DAEMON.format(pids=str(daemon)),
    }
    for name, code in codes.items():
        script = tmp_path / f"{name}.py"
        script.write_text(code)
        server.check(name, script, MODEL, "Trainer", time_limit=15 if name == "hangs" else 400, memory_limit=1500)
    answers = {answer["id"]: answer for answer in (server.answer(600) for _ in codes)}
    assert answers["hangs"]["ended"] == "over its time limit of 15 s"
    assert answers["leaves"]["ended"] == "left by itself with status 7 before it was measured"
    assert answers["aborts"]["ended"] == f"ended by signal {int(signal.SIGABRT)} before it was measured"
    assert "memory runs out" in answers["is killed"]["environment"]
    assert answers["eats"]["ended"].startswith("over its memory limit of 1500 MiB: it held ")
    assert answers["forks"]["ended"].startswith("over its limit of 32 processes")
    assert "no function build_trainer" in answers["daemon"]["measured"]["refused"]
    assert gone([int(daemon.read_text())]) == []
    assert gone([int(pid) for pid in pids.read_text().split()]) == []
    assert list(server.folder.glob("check-*")) == []
    assert sorted(path.stem for path in tmp_path.glob("*.py")) == sorted(codes)
    assert [one.pid for one in check_server.descendants(server.process.pid)] == [server.process.pid]


def test_a_broken_environment_is_no_wrong_fix(short_lab, tmp_path):
    for era, trainer, said in (
        ("trl-0.1", "trl.GRPOTrainer", "unknown era 'trl-0.1'"),
        ("today", "trl.NoTrainer", "era today does not import trl.NoTrainer"),
    ):
        folder = shutil.copytree(short_lab.folder, tmp_path / era / short_lab.name)
        text = (folder / "lab.toml").read_text()
        text = text.replace('era = "trl-0.14"', f'era = "{era}"').replace('"trl.GRPOTrainer"', f'"{trainer}"')
        (folder / "lab.toml").write_text(text)
        matrix = labs.verify(folder=folder.parent)
        assert {row.result for row in matrix} == {"ENVIRONMENT"} and said in matrix[0].reason


@pytest.mark.parametrize(
    ("code", "model", "told"),
    [
        ("", ".", "config.json is missing"),
        # The library behind a right import is broken; a name that the script misspells is the script's own fault.
        ("import broken_stack", MODEL, "does not import: cannot import name 'no_such_name'"),
        ("from torch import no_such_name", MODEL, ""),
        ("import errno\nraise OSError(errno.ENOSPC, 'No space left on device')", MODEL, "no room"),
    ],
)
def test_what_breaks_outside_the_script_is_the_environment(tmp_path, monkeypatch, code, model, told):
    (tmp_path / "broken_stack.py").write_text("from torch import no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(code)
    made = measure.run(script, tmp_path / model, tmp_path / "out", "GRPOTrainer")
    assert told in made.environment and bool(told) == bool(made.environment)
    assert told or made.metrics["error"].startswith("ImportError")


def test_nothing_outlives_a_server_that_is_killed(server, tmp_path, gone, pipe):
    hangs = pipe(tmp_path / "pids")
    script = tmp_path / "hang.py"
    script.write_text(HANG.format(pids=str(tmp_path / "pids")))
    server.check(0, script, MODEL, "Trainer", time_limit=500)
    check, started_by_it = map(int, hangs().split())
    try:
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(check_client.EnvironmentBroken, match="ended with status -9"):
            server.answer(60)
        assert gone([check]) == []
    finally:
        os.kill(started_by_it, signal.SIGKILL)
