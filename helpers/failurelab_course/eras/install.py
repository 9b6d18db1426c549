"""Make an era's environment, and remove it.

uv does the work: torch first, then the lock (`uv pip install -r`, never `sync`: torch is in no lock), then the course's
two packages from the repository. An installer's pages of output become one line: what was found, and the next step.
Only the standard library is needed.
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator

from failurelab_course.eras import (
    MARKER,
    TODAY,
    Era,
    EraError,
    by_need,
    find,
    fingerprint,
    inherited,
    is_hosted,
    known,
    lent,
    root,
)

Say = Callable[[str], object]  # is told what is done, line by line
# Free bytes asked for before an environment is made: as measured with a CPU build of torch, and a third more.
ROOM = {TODAY: 3_000_000_000, "era": 2_000_000_000}


def create(names: Iterable[str], say: Say = print) -> list[Era]:
    """Make the environments of eras that are not there, whole, one after the other; then their kernelspecs.

    Each is made in a temporary folder and renamed when whole, under a file lock, so that an interruption leaves nothing
    half-made in its place, and two set-ups at once wait for each other. Where one cannot be made, neither are those
    after it, and the reason is kept for whoever asks for one of them.

    Args:
        names: the eras'.
        say: is told what is done, line by line.

    Raises:
        EraError: Python is too old, no disk space, no network, or a lock that does not resolve.
    """
    eras = [find(name, ready=False) for name in names]
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise EraError(
            f"Python {sys.version.split()[0]} runs this, and the locks are for 3.11 to 3.13. "
            "Next: install one of these and run: make PYTHON=python3.11"
        )
    (root() / ".eras").mkdir(exist_ok=True)
    with contextlib.ExitStack() as locks:
        # in one order, or two set-ups could wait for each other for good
        tell = {era: locks.enter_context(_locked(era, say)) for era in sorted(eras, key=lambda era: era.name)}
        try:
            for era in eras:
                _create(era, tell[era])
                tell[era](f"era {era.name}: ready")
        except BaseException as error:
            why = "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            for era in eras:
                _leave_line(era, why)
            raise
    return eras


def _create(era: Era, say: Say) -> None:
    if era.status != "ready":
        if era.status != "missing":
            say(f"era {era.name}: {era.status}, made again")
        need, free = ROOM.get(era.name, ROOM["era"]), shutil.disk_usage(root()).free
        if free < need:
            raise EraError(
                f"{free / 1e9:.1f} GB of disk are free at {root()} and era {era.name} needs about "
                f"{need / 1e9:.1f} GB. Next: free some, and run the same command again."
            )
        (_make_today if era.name == TODAY else _make)(era, say)
    if era.name != TODAY:
        register_kernel(era)


def remove(name: str, say: Say = print) -> None:
    """Delete the era's environment and kernelspec.

    Raises:
        EraError: the era is unknown, or it is `today`, which this very command may be running in.
    """
    era = find(name, ready=False)
    if name == TODAY:
        raise EraError("today is the environment that the course itself runs in. Next: rm -r .venv, then make")
    with _locked(era, say):
        shutil.rmtree(era.folder, ignore_errors=True)
        shutil.rmtree(_kernelspec(era), ignore_errors=True)
    say(f"era {name}: removed")


@contextlib.contextmanager
def _locked(era: Era, say: Say) -> Iterator[Say]:
    """Hold the lock of an era's set-up; yield a `say` that also leaves the line for whoever waits for the era."""
    with open(era.setup_file, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"era {era.name}: another set-up is making it, waiting for that")
            fcntl.flock(file, fcntl.LOCK_EX)
        _leave_line(era, f"era {era.name}: waits for its turn")

        def tell(line: str) -> None:
            _leave_line(era, line)
            say(line)

        yield tell


def _leave_line(era: Era, line: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk there is none
        era.setup_file.write_text(line, encoding="utf-8")


def begin(command: list[str], say: Say = print, *, finish: bool = False) -> int:
    """Make the first notebook's eras, then run a command while the others are made; return its exit status.

    The others are made by a process of its own, in the order in which notebooks need them. It ends with the command, or
    with `finish`, when all are there.

    Raises:
        EraError: as `create`, for the first eras.
    """
    first, later = by_need()
    create([era.name for era in first], say)
    later = [era for era in later if era.status != "ready"]
    behind = create_behind(later, say) if later else None
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


def create_behind(eras: list[Era], say: Say) -> subprocess.Popen:
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


def _make_today(era: Era, say: Say) -> None:
    """Make `.venv` in place: its scripts name their interpreter, so it cannot be renamed. The marker comes last."""
    (era.folder / MARKER).unlink(missing_ok=True)
    program = era.folder / "bin" / "uv"
    if not (os.access(era.python, os.X_OK) and program.exists()):
        # The interpreter that runs this may be the broken one that is deleted here.
        base = getattr(sys, "_base_executable", None) or sys.executable
        say(f"era {TODAY}: a virtual environment, and uv in it")
        run_step([base, "-m", "venv", "--clear", str(era.folder)], "an environment", era)
        run_step([str(era.python), "-m", "pip", "install", "--quiet", "uv"], "uv", era)
    fill(era, era.python, say)
    mark(era, era.folder)


def _make(era: Era, say: Say) -> None:
    """Make an era's environment in a temporary folder, and rename it when it is whole."""
    partial = root() / ".eras" / f".{era.name}.partial"
    try:
        empty = ["venv", "--quiet", "--relocatable", "--clear", "--python", sys.executable]
        run_step([uv(), *empty, str(partial)], "an environment", era)
        fill(era, partial / "bin" / "python", say)
        mark(era, partial)
        shutil.rmtree(era.folder, ignore_errors=True)
        partial.rename(era.folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fill(era: Era, python: pathlib.Path, say: Say, *, lock: pathlib.Path | None = None) -> None:
    """Install torch, then the lock, then the course's two packages, into the environment of an interpreter.

    On a hosted runtime torch is lent by the Python that runs, and nothing else asks for another one.

    Args:
        era: whose lock it is.
        python: the environment's interpreter.
        say: is told what is done.
        lock: instead of the era's, for a Python that has torch and much else already.

    Raises:
        EraError: a step failed.
    """
    install = [uv(), "pip", "install", "--python", str(python), "--compile-bytecode", "--quiet"]
    hosted = is_hosted()
    if not hosted:
        torch = re.search(r"^torch==\S+", (era.lock.parent / "torch.txt").read_text(), re.MULTILINE)[0]
        # A CPU build at hand is taken where find-links names one; elsewhere uv chooses the build by the machine's GPU.
        backend = [] if find_links() else ["--torch-backend=auto"]
        say(f"era {era.name}: {torch}")
        run_step([*install, *backend, torch], torch, era)
    locked = (lock or era.lock).read_text()
    say(f"era {era.name}: {locked.count('==')} packages")
    if hosted:  # the system's Python, perhaps; its lock is whole, and torch is in none
        install += ["--break-system-packages"]
    run_step([*install, *(["--no-deps"] if hosted else []), "-r", str(lock or era.lock)], era.lock.name, era)
    editable = ["--editable", str(root() / "helpers"), "--editable", str(root())]
    run_step([*install, "--no-deps", *editable], "the packages of the course", era)
    if hosted and not lock:
        say(f"era {era.name}: torch {lent.link_torch(python, locked)}, lent by this runtime")


def mark(era: Era, folder: pathlib.Path) -> None:
    """Mark the environment at `folder` as the era's, whole."""
    (folder / MARKER).write_text(json.dumps({"lock": fingerprint(era.lock)}))


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
    scripts = pathlib.Path(sysconfig.get_path("scripts"))
    for place in (root() / ".venv" / "bin" / "uv", scripts / "uv", shutil.which("uv")):
        if place and os.access(place, os.X_OK):
            return str(place)
    raise EraError("uv is not found: eras are installed with it. Next: make, or pip install uv")


NO_NETWORK = re.compile(
    r"failed to fetch|dns error|error sending request|could not connect|network is unreachable|"
    r"timed out|temporary failure in name resolution|connection refused|max retries|newconnectionerror",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"no space left|os error 28|disk quota", re.IGNORECASE)
_DAMAGED = re.compile(r"hash mismatch|invalid package format|failed to (download|extract|unzip|read)", re.IGNORECASE)
_NOT_RESOLVED = re.compile(r"(because|no matching distribution|could not find a version)\b.*", re.IGNORECASE)


def run_step(command: list[str], what: str, era: Era) -> None:
    """Run one step of a set-up; `what` is installed by it.

    Raises:
        EraError: it failed (see `explain`).
    """
    env = inherited() | {"DS_BUILD_OPS": "0", "UV_FIND_LINKS": find_links()}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, preexec_fn=_end_with_parent)
    except OSError as error:
        raise EraError(f"{what} could not be made: {error}") from error
    if done.returncode:
        raise EraError(explain(done.stderr + done.stdout, what, era))


def _end_with_parent() -> None:
    """Let Linux end an installer whose set-up was killed: it would write into what the next set-up makes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def explain(output: str, what: str, era: Era) -> str:
    """Return one line for an installer's output when `what` could not be installed: what was found, the next step."""
    again = "Next: run the same command again; what is done already is kept."
    if _NO_SPACE.search(output):
        found = f"no space is left on the disk while installing {what}. Free some. {again}"
    elif NO_NETWORK.search(output):
        found = f"{what} could not be fetched, the package index was not reached. "
        found += f"Set-up needs the network once. Check it, or the proxy. {again}"
    elif _DAMAGED.search(output):
        found = f"{what} came damaged, or is another file than the package index names. {again}"
    elif reason := _NOT_RESOLVED.search(output):
        found = f"{what} does not resolve ({reason[0][:300]}). Next: "
        if os.environ.get("UV_OFFLINE"):
            found += "make pack where there is a network, for this Python, and carry the folder here again"
        else:
            found += f"git checkout eras/{era.name}.txt, or after a change to eras/{era.name}.in: make lock"
    else:
        found = f"{what} could not be installed: {_last_line(output)}. {again}"
    return f"era {era.name}: {found}"


def _last_line(text: str) -> str:
    """Return the last line of an output that tells of an error, or else the last."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error|\w*Error|×)\b", line)]
    return (errors or lines or ["no message"])[-1][:300]


def main(arguments: list[str] | None = None) -> int:
    """Make environments before the rest of the package can be imported: `create NAME ...`, or `begin COMMAND ...`."""
    parser = argparse.ArgumentParser("python3 -m failurelab_course.eras", description="Make the pinned library stacks.")
    verbs = parser.add_subparsers(required=True, dest="verb")
    make = verbs.add_parser("create", help="make what is missing")
    make.add_argument("names", nargs="*", metavar="NAME", help="eras; all without one")
    start = verbs.add_parser("begin", help="make the first notebook's eras, and the others while a command runs")
    start.add_argument("--finish", action="store_true", help="end when the others are made, and not before")
    start.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(text, flush=True)

    # By this signal `begin` ends the set-up in the background.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.verb == "begin":
            return begin(options.command, say, finish=options.finish)
        create(options.names or [era.name for era in known()], say)
    except (EraError, OSError) as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted: what is done already is kept; run the same command again", file=sys.stderr)
        return 130
    return 0
