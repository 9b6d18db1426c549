"""Make an era's environment, from a package index or from a folder of wheels; remove it.

uv does the work: torch first, then the lock (`uv pip install -r`, never `sync`: torch is in no lock), then the
course's two packages from the repository. With a folder of wheels (see `offline`) the same commands get `--no-index
--find-links`, and no network is asked. An installer's pages of output become one line: what was found, and the next
step. Only the standard library is needed.
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable

from failurelab_course.eras import MARKER, TODAY, Era, EraError, by_need, find, fingerprint, inherited, known, root, run

# Free bytes asked for before an environment is made: as measured with a CPU build of torch, and a third more.
ROOM = {TODAY: 3_000_000_000, "era": 2_000_000_000}


def create(name: str, say=print, *, wheels: pathlib.Path | None = None) -> Era:
    """Make the era's environment if it is not there, whole; then its kernelspec. Does nothing where all is there.

    It is made in a temporary folder and renamed when whole, under a file lock, so that an interruption leaves nothing
    half-made in its place, and two set-ups at once wait for each other.

    Args:
        name: the era's.
        say: is told what is done.
        wheels: a folder of wheels that everything comes from; without one, from a package index.

    Raises:
        EraError: as `create_all`.
    """
    return create_all([name], say, wheels=wheels)[0]


def create_all(
    names: Iterable[str], say=print, *, wheels: pathlib.Path | None = None, operation: bool = True
) -> list[Era]:
    """Make several eras, one after the other; who waits for one sees that it will be made.

    Where one cannot be made, neither are those after it, and the reason is kept for whoever asks for one of them.
    Without `operation` DeepSpeed's is left to a later call: to build it takes as long as all the rest.

    Raises:
        EraError: Python is too old, no disk space, no network, a lock that does not resolve, or a wheel is missing.
    """
    eras = [find(name, ready=False) for name in names]
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise EraError(
            f"Python {sys.version.split()[0]} runs this, and the locks are for 3.11 to 3.13. "
            "Next: install one of these and run: make PYTHON=python3.11"
        )
    if wheels is not None:
        wheels = wheels.resolve()
        # never the environment that runs this, be it one of another copy of the course
        eras = [dataclasses.replace(era, folder=root() / ".venv") if era.name == TODAY else era for era in eras]
    (root() / ".eras").mkdir(exist_ok=True)
    with contextlib.ExitStack() as locks:
        waiting = {era: _Lock(era, say) for era in eras}
        for lock in waiting.values():
            locks.enter_context(lock)
        try:
            for era, lock in list(waiting.items()):
                _create(era, lock.say, wheels, operation)
                waiting.pop(era).release()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            for lock in waiting.values():
                lock.write("it was interrupted" if interrupted else str(error))
            raise
    return eras


def _create(era: Era, say, wheels: pathlib.Path | None, operation: bool) -> None:
    if era.status != "ready":
        _check_room(era.name)
        setup = _Setup(era, say, wheels)
        if era.status != "missing":
            say(f"era {era.name}: {era.status}, made again")
        setup.make_today() if era.name == TODAY else setup.make()
    if operation and not era.is_finished:
        finish(era, say)
    else:
        say(f"era {era.name}: ready")
    if era.name != TODAY:
        register_kernel(era)


def remove(name: str, say=print) -> None:
    """Delete the era's environment and kernelspec.

    Raises:
        EraError: the era is unknown, or it is `today`, which this very command may be running in.
    """
    era = find(name, ready=False)
    if name == TODAY:
        raise EraError("today is the environment that the course itself runs in. Next: rm -r .venv, then make")
    with _Lock(era, say):
        shutil.rmtree(era.folder, ignore_errors=True)
        shutil.rmtree(_kernelspec(era), ignore_errors=True)
    say(f"era {name}: removed")


class _Lock:
    """The lock of an era's set-up, held until `release`; whoever waits for the era reads there what was said last."""

    def __init__(self, era: Era, say):
        self._era, self._say = era, say

    def __enter__(self):
        self._file = open(self._era.setup_file, "a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._say(f"era {self._era.name}: another set-up is making it, waiting for that")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self.write(f"era {self._era.name}: waits for its turn")
        return self

    def __exit__(self, *_):
        self.release()

    def write(self, line: str) -> None:
        """Keep one line for who waits; on a full disk there is none."""
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(line)
            self._file.flush()

    def say(self, line: str) -> None:
        """Say a line, and keep it for who waits."""
        self.write(line)
        self._say(line)

    def release(self) -> None:
        """Give up the lock."""
        with contextlib.suppress(OSError):
            self._file.close()


def begin(command: list[str], say=print, *, finish: bool = False) -> int:
    """Make the first notebook's eras, then run a command while the others are made; return its exit status.

    The others are made by a process of its own, in the order in which notebooks need them. It ends with the command, or
    with `finish`, when all are there. DeepSpeed's operation is built there for the first eras too.

    Raises:
        EraError: as `create_all`, for the first eras.
    """
    first, later = by_need()
    create_all([era.name for era in first], say, operation=False)
    later = [era for era in [*later, *first] if not era.is_finished]
    behind = _create_behind(later, say) if later else None
    try:
        process = subprocess.Popen(command, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
        # Handlers, for the command would inherit signals that are ignored.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        status = process.wait()
        if finish and behind is not None:
            behind.wait()
        return status
    finally:
        if behind is not None and behind.poll() is None:
            os.killpg(behind.pid, signal.SIGTERM)
            behind.wait()


def _create_behind(eras: list[Era], say) -> subprocess.Popen:
    """Start the set-up of these eras in a process of its own; return it when whoever asks for one would wait."""
    names = [era.name for era in eras]
    say(f"in the background: era {', '.join(names)}; a cell that asks for an era that is not there yet waits for it")
    behind = subprocess.Popen(
        [sys.executable, "-m", "failurelab_course.eras", "create", *names],
        env=os.environ | {"PYTHONPATH": str(root() / "helpers")},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is meant for the command
    )
    while behind.poll() is None and not all(era.is_being_made for era in eras if era.status != "ready"):
        time.sleep(0.05)
    return behind


def _check_room(name: str) -> None:
    need, free = ROOM.get(name, ROOM["era"]), shutil.disk_usage(root()).free
    if free < need:
        raise EraError(
            f"{free / 1e9:.1f} GB of disk are free at {root()} and era {name} needs about "
            f"{need / 1e9:.1f} GB. Next: free some, and run the same command again."
        )


class _Setup:
    """One set-up of an era; `wheels` as in `create`."""

    def __init__(self, era: Era, say, wheels: pathlib.Path | None):
        self.era, self.say, self.wheels = era, say, wheels
        self.source = ["--no-index", "--find-links", str(wheels)] if wheels else []
        unresolved = f"git checkout eras/{era.name}.txt, or after a change to eras/{era.name}.in: make lock"
        if wheels:
            _check_wheels(wheels)
            python = f"--python {sys.version_info[0]}.{sys.version_info[1]}"
            unresolved = f"failurelab pack {python} where there is a network, and carry the folder here again"
        self.step = functools.partial(step, subject=f"era {era.name}", unresolved=unresolved)

    def make_today(self) -> None:
        """Make `.venv` in place: its scripts name their interpreter, so it cannot be renamed. The marker comes last."""
        folder, python = self.era.folder, str(self.era.python)
        # With wheels pip is one of them, for ensurepip is missing on some machines.
        wheel = sorted(self.wheels.glob("pip-*.whl"))[-1:] if self.wheels else []
        pip = [python, f"{wheel[0]}/pip", "--isolated"] if wheel else [python, "-m", "pip"]
        (folder / MARKER).unlink(missing_ok=True)
        program = folder / "bin" / "uv"
        if not _works(python, "-c", "") or not (program.exists() or _works(*pip, "--version")):
            # The interpreter that runs this may be the broken one that is deleted here.
            base = getattr(sys, "_base_executable", None) or sys.executable
            self.say(f"era {TODAY}: a virtual environment, and uv in it")
            options = ["--clear", *(["--without-pip"] if wheel else [])]
            self.step([base, "-m", "venv", *options, str(folder)], "an environment")
        if not program.exists():
            self.step([*pip, "install", "--quiet", *self.source, "uv"], "uv")
        self.fill(folder)
        mark(self.era, folder)

    def make(self) -> None:
        """Make an era's environment in a temporary folder, and rename it when it is whole."""
        partial = root() / ".eras" / f".{self.era.name}.partial"
        try:
            empty = ["venv", "--quiet", "--relocatable", "--clear", "--python", sys.executable]
            self.step([uv(), *empty, str(partial)], "an environment")
            self.fill(partial)
            mark(self.era, partial)
            shutil.rmtree(self.era.folder, ignore_errors=True)
            partial.rename(self.era.folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def fill(self, folder: pathlib.Path) -> None:
        """Install torch, then the lock, then the course's two packages, into the environment at `folder`."""
        name, lock = self.era.name, self.era.lock
        install = [uv(), "pip", "install", "--python", str(folder / "bin" / "python"), "--compile-bytecode", "--quiet"]
        install += self.source + (["--offline", "--no-config"] if self.wheels else [])
        lines = (lock.parent / "torch.txt").read_text().splitlines()
        torch = next(line for line in lines if line.startswith("torch="))
        # A CPU build at hand is taken where find-links names one; elsewhere uv chooses the build by the machine's GPU.
        backend = [] if self.wheels or find_links() else ["--torch-backend=auto"]
        self.say(f"era {name}: {torch}")
        self.step([*install, *backend, torch], torch)
        self.say(f"era {name}: {sum('==' in line for line in lock.read_text().splitlines())} packages")
        self.step([*install, "-r", str(lock)], lock.name)
        editable = ["--editable", str(root() / "helpers"), "--editable", str(root())]
        self.step([*install, "--no-deps", *editable], "the packages of the course")


def _check_wheels(folder: pathlib.Path) -> None:
    """Hold that a folder holds wheels, and whole ones.

    Raises:
        EraError: there is no such folder, no wheel in it, or a wheel that was cut short.
    """
    if not folder.is_dir():
        raise EraError(f"{folder} is no folder. Next: give the folder that holds the wheels: --wheels DIR")
    if not (paths := list(folder.glob("*.whl"))):
        raise EraError(f"{folder}: it holds no wheel. Next: failurelab pack where there is a network")
    for path in paths:
        if not zipfile.is_zipfile(path):
            raise EraError(
                f"{path.name} is no whole wheel: its download or copy was cut short. "
                "Next: copy it again, then the same command"
            )


def mark(era: Era, folder: pathlib.Path, **facts) -> None:
    """Mark the environment at `folder` as the era's, whole."""
    (folder / MARKER).write_text(json.dumps({"lock": fingerprint(era.lock), **facts}))


def _deepspeed(era: Era) -> str:
    """Return the DeepSpeed that an era pins, such as `deepspeed==0.16.3`; empty without one."""
    pin = re.search(r"^deepspeed==[^\s;]+", era.lock.read_text(), re.MULTILINE)
    return pin[0] if pin else ""


# Ninja's commands end with the file to make.
_COPIES = """#!/bin/sh
for output; do :; done
case "$output" in *.o|*.so) test -f "$BUILT/$output" && exec cp "$BUILT/$output" "$output";; esac
exec {compiler} "$@"
"""


def copying_compiler(folder: pathlib.Path, built: pathlib.Path) -> dict[str, str]:
    """Write a compiler into `folder` that copies a file that is built already; return the variables that choose it.

    All eras have the same torch and Python. So the operation of one DeepSpeed is the same in each, but torch builds it
    for each environment, with commands that name the environment, and would build a plain copy again.

    Args:
        folder: an empty one, there for the build alone.
        built: the folder with what another build has left.
    """
    program = folder / "c++"
    program.write_text(_COPIES.format(compiler=shutil.which("c++")))
    program.chmod(0o755)
    return {"BUILT": str(built), "PATH": os.pathsep.join([str(folder), os.environ.get("PATH", "")])}


def _built_for_another(era: Era) -> pathlib.Path | None:
    """Return where the operation of this era's DeepSpeed was built for another era; None where it was not."""
    for other in known():
        if other.name != era.name and other.is_finished and other.has_zero3 and _deepspeed(other) == _deepspeed(era):
            return next((path.parent for path in other.folder.glob("torch_extensions/*/*.so")), None)
    return None


def finish(era: Era, say=print) -> None:
    """Build DeepSpeed's CPU operation, once for each DeepSpeed; without a compiler ZeRO-3 is NOT RUN in the era."""
    zero3 = False
    if not _deepspeed(era):
        say(f"era {era.name}: holds no DeepSpeed, so ZeRO-3 is NOT RUN there")
    elif shutil.which("g++") or shutil.which("c++"):
        say(f"era {era.name}: DeepSpeed's operation for the CPU is built (a minute or two)")
        for lock in era.folder.glob("torch_extensions/*/lock"):
            lock.unlink()  # of a build that was broken off: torch would wait for it for good
        code = (
            "import deepspeed.ops.op_builder as b; from deepspeed.accelerator import get_accelerator;"
            "get_accelerator().create_op_builder('ShareMemCommBuilder').load(verbose=False)"
        )
        with tempfile.TemporaryDirectory(prefix="failurelab-build-") as folder:
            copied = _built_for_another(era) if shutil.which("c++") and "CXX" not in os.environ else None
            chosen = copying_compiler(pathlib.Path(folder), copied) if copied else {}
            if copied:  # run() puts the era's own programs first, and there is no compiler among them
                chosen["PATH"] = os.pathsep.join([str(era.folder / "bin"), chosen["PATH"]])
            built = run(era, ["-c", code], capture_output=True, text=True, env=chosen)
        zero3 = built.returncode == 0
        if not zero3:
            say(f"era {era.name}: that build failed, so ZeRO-3 is NOT RUN: {last_line(built.stderr)}")
    else:
        say(
            f"era {era.name}: no C++ compiler is found, so ZeRO-3 is NOT RUN. Next: install g++, then "
            f"failurelab eras remove {era.name} and create it again"
        )
    mark(era, era.folder, zero3=zero3)
    say(f"era {era.name}: ready")


def _kernelspec(era: Era) -> pathlib.Path:
    return find(TODAY, ready=False).folder / "share" / "jupyter" / "kernels" / era.kernel_name


def register_kernel(era: Era) -> None:
    """Write the era's kernelspec into the course's environment, so that JupyterLab offers it."""
    spec = {
        "argv": [str(era.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": era.title,
        "language": "python",
        "metadata": {"debugger": True, "failurelab_era": era.name},
        "env": era.variables | {"PATH": f"{era.folder / 'bin'}{os.pathsep}${{PATH}}"},
    }
    folder = _kernelspec(era)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.json").write_text(json.dumps(spec, indent=1))


def find_links() -> str:
    """Return the folder that find-links name, for uv or pip; uv does not read what pip reads."""
    return os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""


def uv() -> str:
    """Return the program uv that installs.

    Raises:
        EraError: there is none.
    """
    for place in (root() / ".venv" / "bin" / "uv", pathlib.Path(sys.prefix) / "bin" / "uv", shutil.which("uv")):
        if place and os.access(place, os.X_OK):
            return str(place)
    raise EraError("uv is not found: eras are installed with it. Next: make, or pip install uv")


def _works(*command: str) -> bool:
    """Whether a command starts, and ends well."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


NO_NETWORK = re.compile(
    r"failed to fetch|dns error|error sending request|could not connect|network is unreachable|"
    r"timed out|temporary failure in name resolution|connection refused|max retries|"
    r"newconnectionerror|network connectivity is disabled",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"no space left|os error 28|disk quota", re.IGNORECASE)
_DAMAGED = re.compile(r"hash mismatch|invalid package format|failed to (download|extract|unzip|read)", re.IGNORECASE)
_NOT_RESOLVED = re.compile(
    r"no solution found|no matching distribution|could not find a version|was not found", re.IGNORECASE
)


def step(command: list[str], what: str, subject: str, unresolved: str) -> str:
    """Run one step of a set-up, and return its output; turn its failure into one line (see `explain`).

    Raises:
        EraError: it failed.
    """
    env = inherited() | {"DS_BUILD_OPS": "0", "UV_FIND_LINKS": find_links()}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, preexec_fn=_end_with_parent)
    except OSError as error:
        raise EraError(f"{what} could not be made: {error}") from error
    if done.returncode:
        raise EraError(explain(done.stderr + done.stdout, what, subject, unresolved))
    return done.stdout


def _end_with_parent() -> None:
    """Let Linux end an installer whose set-up was killed: it would write into what the next set-up makes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def explain(output: str, what: str, subject: str, unresolved: str) -> str:
    """Return one line for the failure of an installer: what was found, and the next step.

    Args:
        output: the installer's.
        what: was being installed or fetched.
        subject: the line's beginning, such as `era today`.
        unresolved: the next step where a package has no such version.
    """
    again = "Next: run the same command again; what is done already is kept."
    if _NO_SPACE.search(output):
        return f"{subject}: no space is left on the disk while installing {what}. Free some. {again}"
    if NO_NETWORK.search(output):
        return (
            f"{subject}: {what} could not be fetched, the package index was not reached. Set-up needs the network "
            f"once. Check it, or the proxy. {again}"
        )
    if _DAMAGED.search(output):
        return f"{subject}: {what} came damaged, or is another file than the package index names. {again}"
    if _NOT_RESOLVED.search(output):
        reason = re.search(r"(because|no matching distribution|could not find a version)\b.*", output, re.IGNORECASE)
        said = reason[0][:300] if reason else last_line(output)
        return f"{subject}: {what} does not resolve ({said}). Next: {unresolved}"
    return f"{subject}: {what} could not be installed: {last_line(output)}. {again}"


def last_line(text: str) -> str:
    """Return the last line of an output that tells of an error, or else the last."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"(error|\w*Error|×)\b", line)] or lines
    return told[-1][:300] if told else "no message"


def main(arguments: list[str] | None = None) -> int:
    """Make environments before the rest of the package can be imported: `create NAME ...`, or `begin COMMAND ...`."""
    parser = argparse.ArgumentParser("python3 -m failurelab_course.eras", description="Make the pinned library stacks.")
    verbs = parser.add_subparsers(required=True, dest="verb")
    make = verbs.add_parser("create", help="make what is missing")
    make.add_argument("names", nargs="*", metavar="NAME", help="eras; all without one")
    make.add_argument(
        "--wheels",
        metavar="DIR",
        type=pathlib.Path,
        help="take everything from this folder of wheels, without a network",
    )
    start = verbs.add_parser("begin", help="make the first notebook's eras, and the others while a command runs")
    start.add_argument("--finish", action="store_true", help="end when the others are made, and not before")
    start.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(text, flush=True)

    # By this signal `begin` ends the set-up in the background.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if asked.verb == "begin":
            return begin(asked.command, say, finish=asked.finish)
        create_all(asked.names or [era.name for era in known()], say, wheels=asked.wheels)
    except (EraError, OSError) as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted: what is done already is kept; run the same command again", file=sys.stderr)
        return 130
    return 0
