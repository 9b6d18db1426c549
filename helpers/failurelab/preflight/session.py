"""The runs of one script, in the Python that trains: a process that has the libraries, and a run for each order.

The process and its runs are groups of their own, in a temporary folder for all that they save; at the end, however that
comes, all of them are ended and the folder removed. One deadline holds for all runs.
"""

import contextlib
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from failurelab.preflight.answer import Answer, Change, Effect

CHILD = pathlib.Path(__file__).with_name("child.py")
_PAUSE = 0.1  # seconds between two looks at the script's process
_SILENT = {  # services that a script may report to; nothing of a preflight goes there
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",  # two runs of one script go through its sets in one order
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",  # for so small a model more threads cost time, above all on a machine that has other work
    "MKL_NUM_THREADS": "1",
    # Logits of a whole vocabulary are large: glibc maps each anew and returns it, and the kernel clears it each time.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}
_OF_A_LAUNCH = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
)  # fmt: skip


class TimeIsOver(Exception):
    """The time limit of all runs was reached; the message is the line that tells so."""


class Session:
    """Runs of one script.

    Args:
        folder: a temporary one, for all that the runs save.
        python: the interpreter.
        variables: of the environment, set by the launch.
        spec: what the script's process is told: the script, its arguments, what is cut.
        limit: seconds for all runs.
        say: called with each stage.
        fork: whether runs are forked from a process that has the libraries; each has a process of its own otherwise.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        python: str,
        variables: dict[str, str],
        spec: dict[str, Any],
        limit: float,
        say: Callable[[str], None],
        fork: bool,
    ):
        self.folder, self.python, self.variables, self.say, self.limit = folder, python, variables, say, limit
        self.spec = spec | {"session": str(folder), "fork": fork}
        self.line = shlex.join(spec["arguments"])  # the script's command line
        self.runs = 0
        self._deadline = time.monotonic() + limit
        self._process: subprocess.Popen | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator["Session"]:
        """Inside, the script can be run; at the end, also by Ctrl-C or SIGTERM, nothing of it is left."""

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        (self.folder / "spec.json").write_text(json.dumps(self.spec))
        try:
            before = signal.signal(signal.SIGTERM, interrupt)
        except ValueError:  # not in the main thread, where no signal comes
            before = None
        try:
            yield self
        finally:
            self._end()
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def run(self, change: Change) -> Answer:
        """Run the script once, with this change, and return what was reported, or the error that ended it.

        Raises:
            TimeIsOver: the runs take longer than the limit.
        """
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        names = ("report", "progress", "log", "status", "pid", "effects", "output", "tmp")
        paths = {name: folder / name for name in names}
        for name in ("output", "tmp"):
            paths[name].mkdir(parents=True)
        for name in ("progress", "log", "effects"):
            paths[name].touch()
        order = {name: str(path) for name, path in paths.items()} | {"files": change.files}
        if self._process is not None and self._process.poll() is not None:
            self._end()
        process = self._process = self._process or self._start()
        assert process.stdin is not None  # a pipe
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            process.wait()
        try:
            answer = self._wait(process, paths)
        finally:
            self._end_run(paths["pid"], folder)
            if not self.spec["fork"]:
                self._end()
        answer.effects = [Effect(**json.loads(line)) for line in paths["effects"].read_text().splitlines()]
        return answer

    def _start(self) -> subprocess.Popen:
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCH}
        environment |= {**_SILENT, "TMPDIR": str(self.folder / "tmp")}
        environment |= {name: value for name, value in self.variables.items() if name not in _OF_A_LAUNCH}
        with (self.folder / "log").open("wb") as stream:
            return subprocess.Popen(
                [self.python, str(CHILD), str(self.folder / "spec.json")],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen, paths: dict[str, pathlib.Path]) -> Answer:
        stage = "starting Python"
        with paths["progress"].open() as stages:
            while process.poll() is None and not (paths["report"].exists() or paths["status"].exists()):
                for line in stages:
                    stage = line.strip()
                    self.say(stage)
                if time.monotonic() > self._deadline:
                    raise TimeIsOver(
                        f"{self.spec['script']} was ended after {self.limit:g} seconds, while {stage}. Next: a longer "
                        "--time-limit, or look whether the script waits for something or prepares much data"
                    )
                time.sleep(_PAUSE)
        if paths["report"].exists():
            return Answer.from_json(json.loads(paths["report"].read_text()))
        status = int(paths["status"].read_text()) if paths["status"].exists() else process.returncode
        return Answer(error=self._died(status, stage, paths["log"]))

    def _died(self, status: int, stage: str, log: pathlib.Path) -> str:
        text = log.read_text(errors="replace") if log.is_file() else "it deleted the folder that its messages went to"
        if not text.strip() and (self.folder / "log").is_file():
            text = (self.folder / "log").read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines and shutil.disk_usage(self.folder).free < 2**16:
            lines = [f"no space is left on the disk of {self.folder}"]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        more = " (often too little memory)" if status == -signal.SIGKILL else ""
        last = (lines or ["none"])[-1][:200]
        return f"{self.spec['script']}: its process ended with {how}{more} while {stage}; its last line: {last}"

    def _end_run(self, pid: pathlib.Path, folder: pathlib.Path) -> None:
        """End a run and all that it started."""
        if pid.exists() and (number := pid.read_text()):  # empty, where the disk was full as it was written
            _kill(os.killpg, int(number))
        _kill_below(folder)

    def _end(self) -> None:
        """End the process that has the libraries, and all that was started."""
        if self._process is not None:
            _kill(os.killpg, self._process.pid)
            with contextlib.suppress(BrokenPipeError):
                if self._process.stdin is not None:
                    self._process.stdin.close()
            self._process.wait()
            self._process = None
        _kill_below(self.folder)


def _kill(end: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        end(pid, signal.SIGKILL)


def _kill_below(folder: pathlib.Path) -> None:
    """End what has left its group, for a session of its own."""
    while others := _with_folder(folder):
        for other in others:
            _kill(os.kill, other)


def _with_folder(folder: pathlib.Path) -> list[int]:
    """Return the processes whose temporary files are below this folder; none where there is no /proc."""
    found, mark = [], f"TMPDIR={folder}{os.sep}".encode()
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if any(variable.startswith(mark) for variable in path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found
