"""`failurelab preflight`: starts the script in the Python that trains, watches its time, and tells what was found.

The script's process is a group of its own, in a temporary folder for all that it saves; at the end, however that
comes, the whole group is ended and the folder removed.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from failurelab.errors import FailureLabError
from failurelab.failures import versions
from failurelab.preflight import launcher_line
from failurelab.preflight.report import answer

CHILD = pathlib.Path(__file__).with_name("child.py")
_PAUSE = 0.2  # seconds between two looks at the script's process
_SILENT = {  # services that a script may report to; nothing of a preflight goes there
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_OF_A_LAUNCH = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
)  # fmt: skip


class PreflightError(FailureLabError):
    """A script cannot be judged; the message says why and the next step."""

    exit_status = 3


def parser(prog: str = "failurelab preflight") -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog,
        description="Judge a training script, as it is, before the GPU hours are spent. It runs the script, with a "
        "small model, up to the end of a cut training.",
        epilog="exit status: 0 nothing found, 1 found, 3 the script could not be asked. "
        "A launcher's line works too: failurelab preflight -- accelerate launch train.py",
    )
    parser.add_argument("--python", help="the Python that you train with; else this one")
    parser.add_argument("--steps", type=_positive, default=3, help="training steps (3)")
    parser.add_argument("--real-model", action="store_true", help="load the real weights")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of one device: hold the peak at full size to it")
    parser.add_argument("--world-size", type=_positive, metavar="N", help="processes of the run; else as launched")
    parser.add_argument("--time-limit", type=_positive, default=600, metavar="S", help="seconds in all (600)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the answer as JSON too")
    parser.add_argument("--junit", type=pathlib.Path, metavar="FILE", help="write it as JUnit XML too")
    parser.add_argument("line", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    line = options.line[1:] if options.line[:1] == ["--"] else options.line
    if not line:
        print("ERROR preflight needs a script. Next: failurelab preflight train.py", file=sys.stderr)
        return 3
    try:
        started = (
            launcher_line.read_line(line)
            if not line[0].endswith(".py")
            else launcher_line.Launch(line[0], tuple(line[1:]))
        )
        told = ask(
            started,
            python=options.python,
            steps=options.steps,
            real_model=options.real_model,
            memory=options.memory,
            world_size=options.world_size,
            time_limit=options.time_limit,
            say=_progress,
        )
    except FailureLabError as error:
        told = answer.Told(line[0], {}, error=str(error))
    except KeyboardInterrupt:
        print("\npreflight was interrupted: the script's processes are ended, nothing is left", file=sys.stderr)
        return 130
    print(answer.text(told))
    for path, content in ((options.json, _json), (options.junit, answer.junit)):
        if path:
            path.write_text(content(told), encoding="utf-8")
    return told.exit_status


def _json(told: answer.Told) -> str:
    return json.dumps(answer.to_json(told), indent=1) + "\n"


def _progress(stage: str) -> None:
    print(f"preflight: {stage} …", file=sys.stderr, flush=True)


def ask(
    started: launcher_line.Launch,
    *,
    python: str | None = None,
    steps: int = 3,
    real_model: bool = False,
    memory: float | None = None,
    world_size: int | None = None,
    time_limit: float = 600,
    say: Any = lambda stage: None,
) -> answer.Told:
    """Run a script in its Python and return what was found.

    Args:
        started: the script, its arguments and its launch.
        python: the Python to run it in; by default the line's own, or this one.
        steps: of training.
        real_model: whether to load the real weights.
        memory: GiB of one device, to hold the peak at full size to.
        world_size: processes of the run; by default as launched.
        time_limit: seconds.
        say: called with each stage.

    Raises:
        PreflightError: no such script, or no such Python.
        VersionsError: the Python does not tell its libraries.
    """
    script = pathlib.Path(started.script)
    if not script.is_file():
        raise PreflightError(f"{script} is not there (from {pathlib.Path.cwd()}). Next: the path of a Python script")
    python = shutil.which(python or started.python or sys.executable)
    if python is None:
        raise PreflightError(f"{started.python} is no command here. Next: --python with the path of your Python")
    say(f"asking {python} for its libraries")
    libraries = versions.ask_versions(python)
    for needed in ("torch", "transformers"):
        if needed not in libraries:
            raise PreflightError(
                f"{needed} is not installed for {python}, so no Trainer can run there. "
                "Next: --python with the Python that you train with"
            )
    told = answer.Told(str(script), libraries, script_sha256=hashlib.sha256(script.read_bytes()).hexdigest())
    with tempfile.TemporaryDirectory(prefix="failurelab-preflight-", ignore_cleanup_errors=True) as folder:
        result = _run(
            pathlib.Path(folder),
            [python],
            dict(started.environment),
            {
                "script": str(script),
                "folder": str(script.resolve().parent),
                "arguments": list(started.arguments),
                "steps": steps,
                "real_model": real_model,
                "memory": memory and memory * 2**30,
                "world_size": world_size or started.world_size,
                "zero_stage": started.zero_stage,
            },
            time_limit,
            say,
        )
    for name in ("findings", "suspected", "held", "not_applicable", "not_checked", "error", "cut", "notes"):
        setattr(told, name, result.get(name, getattr(told, name)))
    answer.sort(told)
    return told


def _run(
    folder: pathlib.Path,
    command: list[str],
    variables: dict[str, str],
    spec: dict[str, Any],
    limit: float,
    say: Any,
) -> dict[str, Any]:
    """Run the child; return what it reported, or why it did not."""
    report, progress, log = folder / "report.json", folder / "progress", folder / "stderr"
    (folder / "output").mkdir()
    (folder / "tmp").mkdir()
    progress.touch()
    spec |= {"report": str(report), "progress": str(progress), "output": str(folder / "output"), "stderr": str(log)}
    (folder / "spec.json").write_text(json.dumps(spec))
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCH}
    environment |= {
        **_SILENT,
        "TMPDIR": str(folder / "tmp"),
        "MLFLOW_TRACKING_URI": f"file:{folder / 'tmp'}",
        **variables,
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, str(CHILD), str(folder / "spec.json")],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            start_new_session=True,
        )
    with _ended_whole(process, folder), progress.open() as stages:
        deadline = time.monotonic() + limit
        stage = "starting Python"
        while process.poll() is None and not report.exists():
            for line in stages:
                stage = line.strip()
                say(stage)
            if time.monotonic() > deadline:
                return {"error": _too_long(spec["script"], limit, stage)}
            time.sleep(_PAUSE)
        if not report.exists():
            process.wait()
        if report.exists():
            return json.loads(report.read_text())
    return {"error": _died(spec["script"], process.returncode, stage, log)}


def _too_long(script: str, limit: float, stage: str) -> str:
    return (
        f"{script} was ended after {limit:g} seconds, while {stage}. Next: a longer --time-limit, or look whether the "
        "script waits for something or prepares much data"
    )


def _died(script: str, status: int, stage: str, log: pathlib.Path) -> str:
    text = log.read_text(errors="replace") if log.is_file() else "it deleted the folder that its messages went to"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines and shutil.disk_usage(log.parent).free < 2**16:
        lines = [f"no space is left on the disk of {log.parent}"]
    how = f"signal {signal.Signals(-status).name}" if status and status < 0 else f"status {status}"
    more = " (often too little memory)" if status == -signal.SIGKILL else ""
    return f"{script}: its process ended with {how}{more} while {stage}; its last line: {(lines or ['none'])[-1][:200]}"


def _with_folder(folder: pathlib.Path) -> list[int]:
    """Return the processes that inherited this folder for their temporary files; none where there is no /proc."""
    found, mark = [], f"TMPDIR={folder / 'tmp'}".encode()
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def _ended_whole(process: subprocess.Popen, folder: pathlib.Path) -> Iterator[None]:
    """At the end of the block, also by Ctrl-C or SIGTERM, end the process and all that it started."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, where no signal comes
        before = None
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while others := _with_folder(folder):  # what has left the group, for a session of its own
            for other in others:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(other, signal.SIGKILL)
        if before is not None:
            signal.signal(signal.SIGTERM, before)
