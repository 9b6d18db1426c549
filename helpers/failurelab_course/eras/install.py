"""Make an era's environment: from a package index, or from a folder of wheels where there is no network.

With wheels nothing is resolved: every line of the lock names one wheel, all are looked up before the first is
installed (see `wheels`), and neither an index nor a cache outside the course is touched. uv is taken where it is;
else pip, from its own wheel or from the Python that runs this. Only the standard library is needed.
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator

from failurelab_course import eras
from failurelab_course.eras import TODAY, Era, EraError, find, fingerprint, register_kernel, root, run
from failurelab_course.eras.installers import find_links, last_line, pip, step, uv, works

# Free bytes asked for before an environment is made: as measured with a CPU build of torch, and a third more.
ROOM = {TODAY: 3_000_000_000, "era": 2_000_000_000}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where packages come from: an index without `wheels`. The fields are as in `eras.create`."""

    wheels: pathlib.Path | None = None
    torch_here: bool = False
    also: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What goes into an environment.

    Attributes:
        wheels: what is installed from the folder, all without what it depends on.
        linked: distributions of this Python that the era sees, by name (see `era_links`).
        other: of these, the versions of those that are not the lock's.
        left_out: packages of the lock that are in neither.
    """

    wheels: list = dataclasses.field(default_factory=list)
    linked: dict = dataclasses.field(default_factory=dict)
    other: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)


def create(name: str, say, source: Source) -> Era:
    """Make an era; see `eras.create`."""
    era = find(name, ready=False)
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise EraError(
            f"Python {sys.version.split()[0]} runs this, and the locks are for 3.11 and 3.12. "
            "Next: install one of these and run: make PYTHON=python3.11"
        )
    top = root()
    if name == TODAY and source.wheels is not None:
        # Never the environment that runs this, be it one of another copy of the course.
        era = dataclasses.replace(era, folder=top / ".venv")
    (top / ".eras").mkdir(exist_ok=True)
    with locked(top / ".eras" / f".{name}.lock", say, name):
        if era.status == "ready":
            say(f"era {name}: ready")
        else:
            plan = _plan(era, source)
            _check_room(era, plan)
            if era.status != "missing":
                say(f"era {name}: {era.status}, made again")
            _make_today(era, say, source, plan) if name == TODAY else _make(era, say, source, plan)
    if name != TODAY:
        register_kernel(era)
    return era


@contextlib.contextmanager
def locked(path: pathlib.Path, say, name: str) -> Iterator[None]:
    """Hold the lock of an era's set-up; wait for another one that does."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"era {name}: another set-up is making it, waiting for that")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _plan(era: Era, source: Source) -> Plan | None:
    """Look up all wheels before anything is made; None where an index is asked.

    Raises:
        EraError: a wheel is missing, or cut short.
    """
    if source.wheels is None:
        return None
    from failurelab_course.eras.offline import machine_torch as own_torch
    from failurelab_course.eras.offline import wheels

    folder = wheels.read(source.wheels)
    if source.torch_here:
        return own_torch.plan(era, folder, source)
    pinned = wheels.lines(era.lock.parent / "torch.txt") | wheels.lines(era.lock)
    return Plan(wheels.select(pinned, folder, era.name, source.wheels))


def _check_room(era: Era, plan: Plan | None) -> None:
    need = ROOM.get(era.name, ROOM["era"])
    if plan is not None:
        need = int(1.35 * sum(wheel.unpacked_bytes() for wheel in plan.wheels))  # compiled modules come on top
    free = shutil.disk_usage(root()).free
    if free < need:
        raise EraError(
            f"{free / 1e9:.1f} GB of disk are free at {root()} and era {era.name} needs about "
            f"{need / 1e9:.1f} GB. Next: free some, and run the same command again."
        )


def _make_today(era: Era, say, source: Source, plan: Plan | None) -> None:
    """Make `.venv` in place: its scripts name their interpreter, so it cannot be renamed. The marker comes last."""
    (era.folder / eras.MARKER).unlink(missing_ok=True)
    offline = plan is not None
    # The interpreter that runs this may be the broken one that is deleted here.
    base = sys.executable if source.torch_here else getattr(sys, "_base_executable", None) or sys.executable
    probe = ["-c", ""] if offline else ["-m", "pip", "--version"]
    if not (era.python.exists() and works([str(era.python), *probe])):
        shutil.rmtree(era.folder, ignore_errors=True)
        say(f"era {era.name}: a virtual environment{'' if offline else ', and uv in it'}")
        # ensurepip is missing on some machines; with wheels, pip is one of them.
        step([base, "-m", "venv", *(["--without-pip"] if offline else []), str(era.folder)], "an environment", TODAY)
    if offline:
        first = [name for name in ("pip", "uv") if list(source.wheels.glob(f"{name}-*.whl"))]
        if first:
            step([*pip(str(era.python), source.wheels), *first], " and ".join(first), TODAY, offline=True)
    elif not os.access(era.folder / "bin" / "uv", os.X_OK):
        step([str(era.python), "-m", "pip", "install", "--quiet", "uv"], "uv", TODAY)
    _fill(era, era.folder, say, source, plan)
    _finish(era, say, plan)


def _make(era: Era, say, source: Source, plan: Plan | None) -> None:
    partial = root() / ".eras" / f".{era.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if plan is None or uv(required=False):
            empty = [uv(), "venv", "--quiet", "--relocatable", *(["--offline"] if plan else [])]
            command = [*empty, "--python", sys.executable, str(partial)]
        else:
            command = [sys.executable, "-m", "venv", "--without-pip", "--prompt", era.name, str(partial)]
        step(command, "an environment", era.name, offline=plan is not None)
        _fill(era, partial, say, source, plan)
        (partial / eras.MARKER).write_text(json.dumps({"lock": fingerprint(era.lock)}))
        _settle(partial, era.folder)
        shutil.rmtree(era.folder, ignore_errors=True)
        partial.rename(era.folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _finish(era, say, plan)


def _settle(partial: pathlib.Path, folder: pathlib.Path) -> None:
    """Let scripts that pip wrote name the interpreter where it will be, not where it was made."""
    for path in (partial / "bin").iterdir():
        if path.is_symlink() or not path.is_file() or path.stat().st_size > 1_000_000:
            continue
        text = path.read_bytes()
        if str(partial).encode() in text:
            path.write_bytes(text.replace(str(partial).encode(), str(folder).encode()))


def _fill(era: Era, folder: pathlib.Path, say, source: Source, plan: Plan | None) -> None:
    """Install torch, then the lock, then this package, into the environment at `folder`."""
    python = str(folder / "bin" / "python")
    if plan is not None:
        _fill_from_wheels(era, folder, say, source, plan)
        return
    install = [uv(), "pip", "install", "--python", python, "--compile-bytecode", "--quiet"]
    torch = next(line for line in (era.lock.parent / "torch.txt").read_text().splitlines() if line.startswith("torch="))
    # A CPU build at hand is taken where find-links names one; elsewhere uv chooses the build by the machine's GPU.
    backend = [] if find_links() else ["--torch-backend=auto"]
    say(f"era {era.name}: {torch}")
    step([*install, *backend, torch], torch, era.name)
    say(f"era {era.name}: {sum('==' in line for line in era.lock.read_text().splitlines())} packages")
    step([*install, "-r", str(era.lock)], era.lock.name, era.name)
    editable = ["--editable", str(root() / "helpers"), "--editable", str(root())]
    step([*install, "--no-deps", *editable], "the packages of the course", era.name)


def _fill_from_wheels(era: Era, folder: pathlib.Path, say, source: Source, plan: Plan) -> None:
    from failurelab_course.eras.offline import links as era_links
    from failurelab_course.eras.offline import machine_torch as own_torch

    python = str(folder / "bin" / "python")
    if uv(required=False):
        quiet = ["--python", python, "--compile-bytecode", "--quiet", "--offline", "--no-config"]
        install = [uv(), "pip", "install", *quiet, "--no-index", "--find-links", str(source.wheels), "--no-deps"]
    else:
        install = pip(python, source.wheels)
    say(f"era {era.name}: {len(plan.wheels)} wheels of {source.wheels}")
    named = [f"{each.name}=={each.version}" for each in plan.wheels]
    step([*install, *named], era.lock.name, era.name, offline=True)
    era_links.add_course(folder)
    if not source.torch_here:
        return
    era_links.link(plan.linked, folder)
    for line in era_links.told(era, plan):
        say(line)
    command = own_torch.COMMAND if era.name == TODAY else ()
    era_links.try_imports(era, python, ["torch", *own_torch.STUDIED, *command, "failurelab"])


def _finish(era: Era, say, plan: Plan | None) -> None:
    """Build DeepSpeed's CPU operation, once; without a compiler the era works and ZeRO-3 is NOT RUN there."""
    zero3 = False
    if not _holds_deepspeed(era, plan):
        say(f"era {era.name}: holds no DeepSpeed, so ZeRO-3 is NOT RUN there")
    elif shutil.which("g++") or shutil.which("c++"):
        say(f"era {era.name}: DeepSpeed's operation for the CPU is built (up to a minute)")
        code = (
            "import deepspeed.ops.op_builder as b; from deepspeed.accelerator import get_accelerator;"
            "get_accelerator().create_op_builder('ShareMemCommBuilder').load(verbose=False)"
        )
        built = run(era, ["-c", code], capture_output=True, text=True)
        zero3 = built.returncode == 0
        if not zero3:
            say(f"era {era.name}: that build failed, so ZeRO-3 is NOT RUN: {last_line(built.stderr)}")
    else:
        say(
            f"era {era.name}: no C++ compiler is found, so ZeRO-3 is NOT RUN. Next: install g++, then "
            f"failurelab eras remove {era.name} and create it again"
        )
    made = {"lock": fingerprint(era.lock), "zero3": zero3}
    if plan is not None and plan.linked:
        made |= {"machine": plan.other, "left_out": plan.left_out}
    (era.folder / eras.MARKER).write_text(json.dumps(made))
    say(f"era {era.name}: ready")


def _holds_deepspeed(era: Era, plan: Plan | None) -> bool:
    if plan is not None and "deepspeed" in plan.left_out:
        return False
    return bool(re.search(r"^deepspeed==", era.lock.read_text(), re.MULTILINE))
