"""Commands that are ended in the middle: nothing is left running, nothing is lost, nothing is shown to others."""

import os
import shutil
import signal

import psutil
import pytest
from tests.faults.conftest import LAB, notebook

CHILD = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
CHECK, RUN = ("lab", "check", LAB), ("run", "01", "--out", "results")
INTERRUPT, KILL = signal.SIGINT, signal.SIGKILL


def begun(path):
    """Return code that starts a child in another session, says so, and hangs."""
    return f"{CHILD}open({str(path)!r}, 'w').write('begun')\nwhile True: pass"


@pytest.mark.parametrize(
    ("words", "number", "line"),
    [
        (CHECK, INTERRUPT, "^interrupted: "),
        (RUN, INTERRUPT, "^01_mine: interrupted"),
        (CHECK, KILL, ""),
        (RUN, KILL, ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_command_that_is_ended(case, room, tmp_path, pipe, words, number, line):
    read = pipe(tmp_path / "pipe")
    code = begun(tmp_path / "pipe")
    room.notebook.write_text(notebook(code))
    room.script.write_text(code)
    case.kept = room.kept()
    running = case.start(*words)
    assert read() == "begun"
    os.killpg(running.pid, number) if number == INTERRUPT else running.kill()
    case.end(running).shows(line, 130 if number == INTERRUPT else -9)
    assert case.left() == []
    if number == KILL:  # nobody is there to remove its folder
        for folder in [*case.temporary.glob("failurelab-check-*"), *case.temporary.glob("failurelab-run-*")]:
            shutil.rmtree(folder)


SECRETS = {"HF_TOKEN": "hf_" + "Zq7" * 11, "WANDB_API_KEY": "4f" * 20, "JUPYTERHUB_API_TOKEN": "hub-token-of-this-seat"}


def test_secrets_stay_out(case, room):
    """Evidence, logs, executed copies, HTML, JSON and what is printed hold none of them; a failed cell neither."""
    cell = "from failurelab_course.experiments import observe\nobserve.record('ground', 'measured', {'n': 1})\n1 / 0"
    room.notebook.write_text(notebook("first = 1", cell))
    case.kept = room.kept()
    (room.folder / "train.py").write_text("raise SystemExit('stopped')\n")
    out = room.folder / "results"
    done = [
        case.run(*words, env=SECRETS)
        for words in (
            ("run", "01", "--out", out),
            CHECK,
            ("doctor", "--json"),
            ("preflight", "--json", out / "p.json", "train.py"),
        )
    ]
    done[0].shows("ZeroDivisionError", 1)
    assert (out / "01_mine.html").is_file() and list(out.rglob("*.jsonl")) and (out / "p.json").is_file()
    folders = (out, room.folder / ".course", room.folder / "labs", case.temporary)
    files = [path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()]
    for secret in SECRETS.values():
        assert not [one.text for one in done if secret in one.text]
        assert not [content for content in files if secret.encode() in content]


def test_nothing_listens_for_other_machines(case, room, tmp_path, pipe):
    read = pipe(tmp_path / "pipe")
    cell = "from failurelab_course.notebook import kernel\nera = kernel.EraKernel('today')\nera.run('1')\n"
    room.notebook.write_text(notebook(cell + begun(tmp_path / "pipe").removeprefix(CHILD)))
    case.kept = room.kept()
    running = case.start("run", "01", "--out", "results", "--time-limit", "100")
    assert read() == "begun"
    listening = [
        one.laddr.ip
        for process in [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    running.terminate()
    case.end(running).shows("01_mine: interrupted", 130)
    assert listening and set(listening) <= {"127.0.0.1", "::1"}
