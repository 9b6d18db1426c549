"""The runs of one script, in the Python that trains. This is where processes are started, and where they are ended.

One process has the libraries (`forkserver`), and each run of the script is forked from it: one process, or, where the
launch has several, `PROCESSES` real ones with a rank each, which talk by gloo on the CPU. Rank 0's answers are the
run's; what another rank alone can tell, its devices, its rewards and its error, is told with its number.

All of them are groups of their own, in a temporary folder for all that they save; at the end, however that comes, they
are ended and the folder is removed. One deadline holds for all runs.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from failurelab._meeting import free_port
from failurelab_preflight.answer import KNOWN, Answer, Effect
from failurelab_preflight.finding import Change, Finding, Verdict
from failurelab_preflight.script_text import location, read_source

FORKSERVER = pathlib.Path(__file__).with_name("forkserver.py")
PROCESSES = 2  # of a launch that has more: two show what a group of processes does
_BY_RANK = ("F5",)  # failures that each rank judges for itself: its last one tells
_BY_ALL = ("F10", "F14", "F19", "F22")  # that each rank judges: what is held on one may be there on another
_PAUSE = 0.1  # seconds between two looks at the script's processes
_GRACE = 5.0  # seconds that other ranks have to end, once one of them ended in an error
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
_PATIENCE = 0.2  # of the time limit: how long a rank waits for the others in one call
# What gloo says to a rank whose peer has gone, or does not come.
_LOST = re.compile(r"gloo|Timed? ?out|Connection (closed|reset|refused)|Broken pipe|wait timeout", re.IGNORECASE)


class TimeIsOver(Exception):
    """The time limit of all runs was reached; the message is the line that tells so, `known` what was found by then."""

    def __init__(self, message: str, known: Answer):
        super().__init__(message)
        self.known = known


class Session:
    """Runs of one script.

    Args:
        folder: a temporary one, for all that the runs save.
        python: the interpreter.
        variables: of the environment, set by the launch.
        spec: what the script's processes are told: the script, its arguments, the launch.
        limit: seconds for all runs.
        say: called with each stage.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        python: str,
        variables: dict[str, str],
        spec: dict[str, Any],
        limit: float,
        say: Callable[[str], None],
    ):
        self.folder, self.python, self.variables, self.say, self.limit = folder, python, variables, say, limit
        self.spec = spec | {"session": str(folder), "patience": _PATIENCE * limit}
        self.count = min(spec["world_size"], PROCESSES)
        self.line = shlex.join(spec["arguments"])  # the script's command line
        self.runs = 0
        self.gpus = 0  # that the script is told of
        self.whole = False  # whether its numbers stay as it gave them, see `stage.cuts`
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
        ranks = [Process(folder, number, self.count, self.spec) for number in range(self.count)]
        shared = {name: str(folder / name) for name in ("output", "tmp", "together")}
        for path in shared.values():
            pathlib.Path(path).mkdir()
        also = shared | {"files": change.files, "gpus": self.gpus, "whole": self.whole}
        if self._process is not None and self._process.poll() is not None:
            self._end()
        process = self._process = self._process or self._start()
        assert process.stdin is not None  # a pipe
        with free_port() as port:
            orders = [rank.order | also | {"variables": self._variables(rank.rank, port)} for rank in ranks]
            try:
                process.stdin.write(json.dumps(orders).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                process.wait()
            try:
                self._wait(process, ranks)
                results = [rank.result(self.folder, process.returncode) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.end()
                _kill_below(folder)
        return together(results, self._cut())

    def _cut(self) -> list[str]:
        """Return what the launch asks for beside what is run, a text each."""
        launched = self.spec["world_size"]
        how = f"{launched} processes -> {self.count}" if launched > self.count else f"{launched} real processes"
        return [*[f"{how}, by gloo on the CPU"] * (launched > 1), *self.spec["left_out"]]

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        """Return what a launcher sets for one of several processes, and that no GPU is used."""
        if self.count < 2:
            return {}
        own, all_ = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        numbers = dict.fromkeys(own, rank) | dict.fromkeys(all_, self.count) | {"MASTER_PORT": port}
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        where = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": loopback, "CUDA_VISIBLE_DEVICES": ""}
        return where | {name: str(number) for name, number in numbers.items()}

    def _start(self) -> subprocess.Popen:
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCH}
        environment |= {**_SILENT, "TMPDIR": str(self.folder / "tmp")}
        environment |= {name: value for name, value in self.variables.items() if name not in _OF_A_LAUNCH}
        with (self.folder / "log").open("wb") as stream:
            return subprocess.Popen(
                [self.python, str(FORKSERVER), str(self.folder / "spec.json")],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen, ranks: Sequence["Process"]) -> None:
        """Wait until all ranks have ended; after an error of one, those that judge nothing have little time left."""
        grace: float | None = None
        while (left := [rank for rank in ranks if not rank.look()]) and process.poll() is None:
            self._say(ranks)
            if len(left) < len(ranks) and any(rank.failed for rank in ranks):
                idle = not any(rank.judges() for rank in left)
                grace = (grace or time.monotonic() + _GRACE) if idle else None
            if time.monotonic() > self._deadline:
                where = " and ".join(rank.where() for rank in ranks)
                raise TimeIsOver(
                    f"{self.spec['script']} was ended after {self.limit:g} seconds, while {where}. Next: a longer "
                    "--time-limit, or look whether the script waits for something or prepares much data",
                    together([RankResult(rank.known(), 0, "") for rank in ranks], self._cut()),
                )
            if grace is not None and time.monotonic() > grace:
                for rank in left:
                    rank.hangs = rank.where()
                return
            time.sleep(_PAUSE)
        self._say(ranks)

    def _say(self, ranks: Sequence["Process"]) -> None:
        first, *_ = [rank.new_stages() for rank in ranks]
        for stage in first:
            self.say(stage)

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


class Process:
    """One process of a run; its rank is 0 where it is the only one.

    Attributes:
        order: what `forkserver` is told of it.
        failed: whether it has ended in an error, or died.
        hangs: where it still was as it was ended after another one's error; else empty.
    """

    def __init__(self, folder: pathlib.Path, rank: int, count: int, spec: dict[str, Any]):
        self.rank, self.count, self.script = rank, count, spec["script"]
        self._folder = folder / f"rank-{rank}"
        self._folder.mkdir(parents=True)
        names = ("report", "progress", "log", "status", "pid", "effects", "stack")
        self._paths = {name: self._folder / name for name in names}
        for name in ("progress", "log", "effects", "stack"):
            self._paths[name].touch()
        self.order: dict[str, Any] = {name: str(path) for name, path in self._paths.items()}
        arguments = [word.replace("{LOCAL_RANK}", str(rank)) for word in spec["arguments"]]
        self.order |= {"rank": rank, "ranks": count, "world_size": spec["world_size"], "arguments": arguments}
        self.stage, self.failed, self.hangs, self._stages_read = "starting Python", False, "", 0

    def new_stages(self) -> list[str]:
        """Return the stages that it has come to since this was last asked for."""
        lines = self._paths["progress"].read_text().splitlines()
        new, self._stages_read = lines[self._stages_read :], len(lines)
        self.stage = (lines or [self.stage])[-1]
        return new

    def judges(self) -> bool:
        """Return whether it is judging, which takes its time and waits for nobody."""
        return self.stage.startswith("judging")

    def look(self) -> bool:
        """Return whether it has ended."""
        report, status = self._paths["report"], self._paths["status"]
        if report.exists():
            self.failed = self.failed or bool(json.loads(report.read_text())["error"])
        elif status.exists():
            self.failed = not report.exists()
        return report.exists() or status.exists()

    def known(self) -> Answer:
        """Return what its judges had said when it last told what it was doing."""
        path = self._paths["report"].with_suffix(KNOWN)
        return Answer.from_json(json.loads(path.read_text())) if path.exists() else Answer()

    def where(self) -> str:
        """Return what it is doing, and in which line of the script; of several processes with its number."""
        self.new_stages()
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(self._paths["pid"].read_text()), signal.SIGUSR1)  # on which it writes where it is
            time.sleep(_PAUSE)
        rank, line = f"rank {self.rank} was " if self.count > 1 else "", self._line()
        return f"{rank}{self.stage}{f' ({line})' if line else ''}"

    def _line(self) -> str:
        """Return the line of the script in which it last wrote where it is; empty if it is not in the script."""
        name = re.escape(pathlib.Path(self.script).name)
        match = re.search(rf'File ".*{name}", line (\d+)', self._paths["stack"].read_text())
        if match is None:
            return ""
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            return location(self.script, int(match[1]), read_source(self.script)).within
        return f"line {match[1]}"

    def result(self, session: pathlib.Path, status: int | None) -> "RankResult":
        """Return what it has reported, or how it died; of one that is still there, nothing."""
        report = self._paths["report"]
        ended = report.stat().st_mtime_ns if report.exists() else 0
        answer = Answer.from_json(json.loads(report.read_text())) if report.exists() else Answer()
        if not report.exists() and (self._paths["status"].exists() or status is not None):
            code = int(self._paths["status"].read_text()) if self._paths["status"].exists() else status or 0
            answer.error = self._died(code, session)
            if code == -signal.SIGABRT and _LOST.search(answer.error):  # as gloo ends one whose call does not match
                ended = self._paths["status"].stat().st_mtime_ns
                answer.error = f"{pathlib.Path(self.script).name}, {self._line()}, ended in {answer.error}"
        answer.effects = [Effect(**json.loads(line)) for line in self._paths["effects"].read_text().splitlines()]
        return RankResult(answer, ended, self.hangs)

    def _died(self, status: int, session: pathlib.Path) -> str:
        log = self._paths["log"]
        text = log.read_text(errors="replace") if log.is_file() else "it deleted the folder that its messages went to"
        if not text.strip() and (session / "log").is_file():
            text = (session / "log").read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines and shutil.disk_usage(session).free < 2**16:
            lines = [f"no space is left on the disk of {session}"]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        more = " (often too little memory)" if status == -signal.SIGKILL else ""
        last = (lines or ["none"])[-1][:200]
        return f"{self.script}: its process ended with {how}{more} while {self.stage}; its last line: {last}"

    def end(self) -> None:
        """End it and all that it started."""
        pid = self._paths["pid"]
        if pid.exists() and (number := pid.read_text()):  # empty, where the disk was full as it was written
            _kill(os.killpg, int(number))


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What came of one process.

    Attributes:
        answer: what it has reported, or how it died.
        ended: when, in nanoseconds; 0 where it did not report.
        hangs: see `Process`.
    """

    answer: Answer
    ended: int = 0
    hangs: str = ""


def together(results: Sequence[RankResult], left_out: Sequence[str] = ()) -> Answer:
    """Return what the ranks of a run say together: rank 0's answers, and of the last one what each judges for itself.

    Args:
        results: of the ranks, in their order.
        left_out: of the launch, which stands under what was cut.
    """
    first, last = results[0].answer, results[-1].answer
    cut = [text for result in results for text in result.answer.cut]
    effects = [effect for result in results for effect in result.answer.effects]
    own = [finding for finding in first.findings if finding.failure not in _BY_RANK]
    own += [finding for finding in last.findings if finding.failure in _BY_RANK]
    for rank, result in enumerate(results[1:], 1):
        own += _otherwise(own, result.answer, rank)
    return dataclasses.replace(
        first,
        findings=own,
        cut=list(dict.fromkeys([*left_out, *cut])),
        error=_error(results),
        refuses_cut=next((result.answer.refuses_cut for result in results if result.answer.refuses_cut), []),
        effects=[effect for place, effect in enumerate(effects) if effect not in effects[:place]],
    )


def _otherwise(told: Sequence[Finding], answer: Answer, rank: int) -> Iterator[Finding]:
    """Yield what another rank says against those before it: it accuses, or does not hold what they hold."""
    for failure in _BY_ALL:
        before, own = ([each for each in some if each.failure == failure] for some in (told, answer.findings))
        accused = [each for each in own if each.accuses]
        for each in accused:
            if each.key not in {other.key for other in before if other.accuses}:
                yield dataclasses.replace(each, evidence=f"on rank {rank}: {each.evidence}")
        holds = any(each.verdict is Verdict.HELD for each in own)
        if not accused and not holds and any(each.verdict is Verdict.HELD for each in before):
            why = next((each.why for each in own if each.verdict is Verdict.NOT_CHECKED), "it could not be told there")
            yield Finding.not_checked(failure, f"on rank {rank}: {why}")


def _error(results: Sequence[RankResult]) -> str:
    """Return the error that ended a run, with the rank that had it first: the others lose their connection by it."""
    errors = {rank: result.answer.error for rank, result in enumerate(results) if result.answer.error}
    texts = list(errors.values())
    if len(set(texts)) < 2 and len(errors) in (0, len(results)):
        return (texts or [""])[0]
    own = [rank for rank, text in errors.items() if not results[rank].ended or not _LOST.search(text)]
    if own:
        rank = min(own, key=lambda number: results[number].ended)
        return f"rank {rank} of {len(results)}: {errors[rank]}"
    waits = {rank: text.partition(" ended in ")[0].rstrip(",") for rank, text in errors.items()}
    places = [f"rank {rank} waited for the others in {place}" for rank, place in waits.items()]
    places += [result.hangs for result in results if result.hangs]
    return f"the ranks do not come to the same calls, and would wait for ever: {'; '.join(places)}"


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
    processes, mark = [], f"TMPDIR={folder}{os.sep}".encode()
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if any(variable.startswith(mark) for variable in path.read_bytes().split(b"\0")):
                processes.append(int(path.parent.name))
    return processes
