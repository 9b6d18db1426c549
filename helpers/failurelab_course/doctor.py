"""Look at a machine before a course; `failurelab doctor`. (Another Python's libraries: `failurelab.failures.versions`.)

Who runs this the day before a course wants one answer: am I ready? So the first line is a verdict, each thing to do is
a command, and a check that breaks is a failed check and no traceback. Nothing heavy is imported here (versions are
asked of the packages' metadata) but for the GPU's sake where there is one; most of the time goes into one real kernel.
"""

import errno
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from failurelab.checks import FAIL, NOT_RUN, PASS, Check
from failurelab.failures.versions import LIBRARIES
from failurelab_course import eras

_TOOLS = ("jupyterlab", "ipykernel", "papermill", "nbconvert", "matplotlib")
_GB = 1e9
# A machine that is sold with 4 GB tells of somewhat less.
MEMORY, FREE_MEMORY, DISK, TEMPORARY = 3.5 * _GB, 1.5 * _GB, 1 * _GB, 0.2 * _GB


def check_course() -> list[Check]:
    """Check what the course needs on this machine: Python, packages, eras, a kernel, model, memory, disk, a GPU.

    Raises:
        EraError: this is not the course's repository.
    """
    top = eras.root()
    era_checks = _eras(top)
    ready = [check.name.removeprefix("Era ") for check in era_checks if check.status == PASS]
    return [
        _guarded("Python", _python),
        _guarded("Packages", _packages),
        *era_checks,
        _guarded(f"Kernel of {ready[0]}", lambda: _kernel(ready[0], top)) if ready else _no_kernel(top),
        _guarded("Small Qwen2", lambda: _model(top)),
        _guarded("C++ compiler", _compiler),
        _guarded("Memory", _memory),
        _guarded("Disk", lambda: _disk(top)),
        _guarded("Your progress", _progress),
        _guarded("GPU", _gpu),
    ]


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    """Look; what breaks while looking is a failed check, so that the others are asked too."""
    try:
        return look()
    except OSError as error:
        full = error.errno == errno.ENOSPC
        step = "free some disk space" if full else f"look at {error.filename or 'that file or folder'}: who may use it?"
        return Check(name, FAIL, f"{error.strerror or error}: {error.filename or 'while looking'}", step)
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        return Check(name, FAIL, f"{type(error).__name__}: {reason}", _setup(eras.root()))


def _made_by(top: pathlib.Path, name: str) -> str:
    """Return the command that makes an era: all at once by make, one by one in a conda environment."""
    return _setup(top) if (top / ".venv").exists() else f"failurelab eras create {name}".strip()


def _setup(top: pathlib.Path) -> str:
    return "make setup" if pathlib.Path.cwd() == top else f"make -C {top} setup"


def _no_kernel(top: pathlib.Path) -> Check:
    return Check("Kernel", FAIL, "no era is ready, so none was started", _made_by(top, ""))


def _kernel(era: str, top: pathlib.Path) -> Check:
    """Start the kernel of an era, as a notebook's cell does, and ask it for its trl; end it again."""
    from failurelab_course.notebook import kernel as kernels
    from failurelab_course.notebook.kernel_output import EraCellError

    name = f"Kernel of {era}"
    began = time.monotonic()
    try:
        kernel = kernels.EraKernel(era)
        try:
            code = "import trl; from trl import GRPOTrainer; answer = trl.__version__"
            answer = kernel.run(code, fetch=["answer"])["answer"]
        finally:
            kernel.stop()
    except (eras.EraError, EraCellError) as error:
        reason = str(error).strip().splitlines()[0].partition(" Next: ")[0]
        return Check(name, FAIL, reason, f"{_program(top)} eras remove {era}, then {_program(top)} eras create {era}")
    seconds = time.monotonic() - began
    return Check(name, PASS, f"imported GRPOTrainer of trl {answer}, {seconds:.0f} s from start to end")


def _program(top: pathlib.Path) -> str:
    return os.path.relpath(top / ".venv" / "bin" / "failurelab") if (top / ".venv").exists() else "failurelab"


def _python() -> Check:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    step = "install Python 3.11, 3.12 or 3.13, then make setup PYTHON=python3.11"
    return Check("Python", PASS if fits else FAIL, text, "" if fits else step)


def _packages() -> Check:
    """Compare the packages installed with the lock; a conda environment may hold others, which is said."""
    today = eras.find(eras.TODAY, ready=False)
    lock = today.lock.read_text(encoding="utf-8")
    wanted = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE))
    wrong = []
    for name in (*LIBRARIES[1:], *_TOOLS):
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = "missing"
        if have != wanted.get(name):
            wrong.append(f"{name} {have}, the lock says {wanted.get(name)}")
    if wrong:
        return Check("Packages", FAIL, "; ".join(wrong), _setup(eras.root()))
    return Check("Packages", PASS, ", ".join(f"{name} {wanted[name]}" for name in LIBRARIES[1:]))


def _eras(top: pathlib.Path) -> list[Check]:
    checks = []
    for era in eras.known():
        if era.name == eras.TODAY:
            continue
        ready = era.status == "ready"
        detail = era.title if ready else f"{era.title}: {era.status}"
        step = "" if ready else _made_by(top, era.name)
        checks.append(Check(f"Era {era.name}", PASS if ready else FAIL, detail, step))
    return checks


def _model(top: pathlib.Path) -> Check:
    weights = top / "models" / "tiny-qwen2" / "model.safetensors"
    if weights.is_file() and weights.stat().st_size > 100_000:
        return Check("Small Qwen2", PASS, f"{weights.stat().st_size / 1e6:.1f} MB of weights")
    return Check("Small Qwen2", FAIL, "its weights are missing or cut short", "git checkout models/tiny-qwen2")


def _compiler() -> Check:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler:
        return Check("C++ compiler", PASS, pathlib.Path(compiler).name)
    step = "for notebook 06 (ZeRO-3): install g++, then make the eras again"
    return Check("C++ compiler", NOT_RUN, "none found: ZeRO-3 cannot run on the CPU, all else can", step)


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    size, free = memory.total, memory.available
    room = f"{size / _GB:.1f} GB, {free / _GB:.1f} GB of it free"
    if size < MEMORY:
        return Check("Memory", FAIL, f"{room}; the course takes 4 GB", "use a larger machine, or work with a neighbour")
    if free < FREE_MEMORY:
        return Check("Memory", FAIL, f"{room}; one notebook takes 1.5 GB or more", "close what takes memory")
    return Check("Memory", PASS, room)


def _disk(top: pathlib.Path) -> Check:
    """The clone's disk, and the one where temporary files go: a run without room there fails in odd places."""
    places = {top: DISK, pathlib.Path(tempfile.gettempdir()): TEMPORARY}
    free = {place: shutil.disk_usage(place).free for place in places}
    short = [place for place, need in places.items() if free[place] < need]
    sizes = ", ".join(f"{free[place] / _GB:.1f} GB free in {place}" for place in (short or [top]))
    if not short:
        return Check("Disk", PASS, sizes)
    steps = [f"{places[place] / _GB:g} GB in {place}" for place in short]
    return Check("Disk", FAIL, sizes, f"free {' and '.join(steps)}")


def _progress() -> Check:
    """Whether what a learner does in the labs can be kept: the file is whole, and its folder can be written."""
    from failurelab_course.labs import progress as lab_state

    path = lab_state.default_path()
    try:
        state = lab_state.read(path)
    except lab_state.StateError as error:
        problem, _, step = str(error).partition(" Next: ")
        return Check("Your progress", FAIL, problem, step)
    folder = next(parent for parent in path.parents if parent.exists())
    if not os.access(folder, os.W_OK):
        return Check(
            "Your progress", FAIL, f"{folder} cannot be written", f"make {folder} writable, or set FAILURELAB_STATE"
        )
    solved = sum(bool(progress.solved) for progress in state.values())
    return Check("Your progress", PASS, f"{solved} labs solved" if state else "no lab was begun yet")


def _gpu() -> Check:
    """A GPU that works is a gain and none is no loss; one that is there and cannot be used has a reason."""
    if not shutil.which("nvidia-smi"):
        return Check("GPU", NOT_RUN, "none found, and none is needed: all runs on the CPU")
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    names = asked.stdout.strip().splitlines()
    if asked.returncode or not names:
        return Check("GPU", NOT_RUN, "nvidia-smi is here and shows no GPU: all runs on the CPU")
    from failurelab_course.experiments import devices

    reason, _, step = devices.gpu_problem().partition(" Next: ")
    if reason:
        return Check("GPU", NOT_RUN, f"{'; '.join(names)}: {reason}", f"for the GPU: {step}")
    return Check("GPU", PASS, "; ".join(names))
