"""Files that are broken or old: each is named in one line, kept as it is, and nothing of the learner's is dropped."""

import json
import shutil
import socket
import sys

import pytest
from tests.faults.conftest import ROOT

fault = pytest.mark.fault
HALF = "cut in the middle"


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("name", "words", "line", "status"),
    [
        pytest.param(
            "model.safetensors",
            ("lab", "check", "01"),
            "^ENVIRONMENT lab 01: the model in .* cannot be loaded",
            3,
            marks=fault("a corrupt model", f"model.safetensors is {HALF}"),
            id="model",
        ),
        pytest.param(
            "tokenizer.json",
            ("lab", "check", "01"),
            "^ENVIRONMENT lab 01: the model in .* cannot be loaded",
            3,
            marks=fault("a corrupt tokenizer", f"tokenizer.json is {HALF}"),
            id="tokenizer",
        ),
    ],
)
def test_a_model(case, room, name, words, line, status):
    path = room.folder / "models" / "tiny-qwen2" / name
    whole = path.read_bytes()
    cut(path)
    case.shows(case.run(*words), line, status)
    path.write_bytes(whole)
    case.clean_check()


@fault("a corrupt lab.toml", f"it is {HALF}")
def test_a_lab(case, room):
    path = room.lab / "lab.toml"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 + 3] + b"\x00")
    case.shows(case.run("lab", "check", "01"), "^ERROR 01_trivial/lab.toml", 1)
    path.write_bytes(whole)
    case.clean_check()


@fault("a corrupt registry", "a failure's file in a copy of the package is cut in the middle")
def test_the_registry(case, room, tmp_path):
    copy = tmp_path / "package"
    shutil.copytree(ROOT / "helpers" / "failurelab", copy / "failurelab", ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "failurelab" / "failures" / "F4.toml"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 + 3] + b"\x00")
    options = {"env": {"PYTHONPATH": str(copy)}}
    log = tmp_path / "log.txt"
    log.write_text("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn\n")
    case.shows(case.run("symptoms", log, **options), "^ERROR .*F4.toml", 1)
    path.write_bytes(whole)
    case.clean(case.run("symptoms", log, **options), "F2")


@fault("a corrupt ledger", f"it is {HALF}")
def test_the_ledger(case, room):
    path = room.folder / "results" / "cpu.json"
    path.parent.mkdir()
    records = json.loads((ROOT / "evidence" / "cpu.json").read_text())["records"][:3]
    whole = json.dumps({"schema": 1, "records": records})
    path.write_text(whole[: len(whole) // 2])
    case.shows(case.run("evidence", "show", path), "^ERROR .*cpu.json is not a ledger", 1)
    path.write_text(whole)
    case.clean(case.run("evidence", "compare", path, path), "3 measurements in both")


@fault("a corrupt stored notebook", f"it is {HALF}")
def test_a_notebook(case, room):
    whole = room.notebook.read_bytes()
    cut(room.notebook)
    case.kept = room.kept()
    case.shows(case.run("run", "01", "--out", "results"), "^ERROR notebook .*Next: git checkout 01_mine.ipynb", 1)
    assert room.notebook.read_bytes() == whole[: len(whole) // 2]
    room.notebook.write_bytes(whole)
    case.kept = room.kept()
    case.clean(case.run("run", "01", "--out", "results"), "1 of 1 PASS")


PREDICT = (
    "from failurelab_course.notebook import predict\n"
    "predict.ask('01-changed', 'how many?', ['all', 'none'])\n"
    "predict.say('01-changed', 'none')"
)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("{", marks=fault("a corrupt file of predictions", "it is cut in the middle"), id="corrupt"),
        pytest.param(
            '{"schema": 0, "predictions": {}}',
            marks=fault("a file of predictions of another version", "its schema is 0"),
            id="older",
        ),
    ],
)
def test_predictions(case, room, content):
    """It is told, and never written over; what is said is kept in the kernel."""
    whole = room.predictions.read_text()
    room.predictions.write_text(content)
    case.shows(case.run(sys.executable, "-c", PREDICT), "Your predictions are kept until this kernel ends. Next: ", 0)
    assert room.predictions.read_text() == content
    room.predictions.write_text(whole)
    case.may_change.add("predictions.json")
    case.clean(case.run(sys.executable, "-c", PREDICT), "You said “none”")
    assert json.loads(room.predictions.read_text())["predictions"]["01-changed"]["said"] == "none"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("{", marks=fault("a corrupt state file", "labs.json is cut in the middle"), id="corrupt"),
        pytest.param(
            '{"schema": 0, "labs": {}}', marks=fault("a state file of another version", "its schema is 0"), id="older"
        ),
    ],
)
def test_the_state_file(case, room, content):
    """It is told and left as it is, and the learner moves it: what it says is not known to be worthless."""
    whole = room.state.read_text()
    room.state.write_text(content)
    case.may_change.add("labs.json")
    case.shows(case.run("lab", "hint", "01"), "^ERROR .*labs.json: .*Next: move it away, and it is begun anew", 1)
    assert room.state.read_text() == content
    room.state.rename(room.state.with_name("labs.old.json"))
    case.clean(case.run("lab", "hint", "01"), "Hint 1 of 3")
    assert json.loads(room.state.read_text())["labs"]["01_trivial"]["hints"] == 1
    assert room.state.with_name("labs.old.json").read_text() == content and whole


# Ends the process at the n-th line that the writing code runs.
COUNTED = """
import os, signal, sys
from failurelab_course.labs import exercise, verify, progress
from failurelab_course import state_file
at, count = {at}, 0
def trace(frame, event, argument):
    global count
    if frame.f_code.co_filename.endswith(("state_file.py", "progress.py", "exercise.py", "definition.py")):
        if event == "line":
            count += 1
            if count == at: os.kill(os.getpid(), signal.SIGKILL)
        return trace
lab = verify.find(["01"])[0]
sys.settrace(trace)
{code}
sys.settrace(None)
print("lines", count)
"""


@pytest.mark.parametrize(
    ("code", "what"),
    [
        pytest.param(
            "exercise.hint(lab)",
            "state",
            marks=fault("killed while the state file is written", "SIGKILL at every line that writes it"),
            id="state",
        ),
        pytest.param(
            "exercise.reset(lab)",
            "reset",
            marks=fault("killed while `train.py` is reset", "SIGKILL at every line that does it"),
            id="reset",
        ),
    ],
)
def test_killed_while_a_file_is_written(case, room, code, what):
    """At whatever line it ends: the file is the old one or the new one, and the learner's script is somewhere whole."""
    mine, state = room.script.read_text(), room.state.read_text()

    def run(at):
        return case.run(sys.executable, "-c", COUNTED.format(at=at, code=code))

    def back():
        for path in room.lab.glob("train.backup*"):
            path.unlink()
        room.script.write_text(mine)
        room.state.write_text(state)

    lines = int(run(0).line("^lines ").split()[1])
    assert lines > 5
    step = max(1, lines // 25)
    for at in range(1, lines, step):
        back()
        assert run(at).status == -9
        assert json.loads(room.state.read_text())["labs"]["02_done"] == room.progress
        scripts = [path.read_text() for path in room.lab.glob("train*.py")]
        assert mine in scripts, f"line {at}"
        assert set(scripts) <= {mine, (room.lab / "start.py").read_text()}, f"line {at}"
    back()
    case.line, case.status = "nothing: the command itself is gone", -9
    done = case.run("lab", what if what == "reset" else "hint", "01")
    case.clean(done, "Yours is kept in|Hint 1 of 3")
    back()
    for path in [*room.lab.glob(".train*partial"), *room.state.parent.glob("*.partial")]:
        path.unlink()  # of the killed: hidden, and the next run does not read them


@fault("the port of a launch is taken", "a socket listens where MASTER_PORT says")
def test_a_port_that_is_taken(case, room):
    code = (
        "from failurelab_course.experiments import deepspeed\n"
        "try:\n    with deepspeed._alone(None): print('it', 'runs')\n"
        "except deepspeed.EngineError as error: raise SystemExit(f'ERROR {error}')"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {"MASTER_PORT": str(taken.getsockname()[1]), "MASTER_ADDR": None}
        case.shows(case.run(sys.executable, "-c", code, env=env), "^ERROR .*is taken by another process", 1)
    case.clean(case.run(sys.executable, "-c", code, env={"MASTER_PORT": None, "MASTER_ADDR": None}), "^it runs$")
