"""Look at a machine before a course; `failurelab doctor`. (Another Python's libraries: `failurelab.failures.versions`.)

Who runs this the day before a course wants one answer: am I ready? So the first line is a verdict, each thing to do is
a command, and a check that breaks is a failed check and no traceback. Most of the time goes into one real kernel.
"""

import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

import psutil

from failurelab.checks import FAIL, NOT_RUN, PASS, Check
from failurelab.failures.versions import LIBRARIES
from failurelab_course import eras

_TOOLS = ("jupyterlab", "ipykernel", "papermill", "nbconvert", "matplotlib")
_GB = 1e9
# A machine that is sold with 4 GB tells of somewhat less.
MEMORY, FREE_MEMORY, DISK, TEMPORARY = 3.5 * _GB, 1.5 * _GB, 1 * _GB, 0.2 * _GB
# What was found, what is to do (empty if nothing is), and the status where it is neither PASS nor FAIL by that.
_Found = tuple[str, str] | tuple[str, str, str]


def check_course() -> list[Check]:
    """Check what the course needs on this machine: Python, packages, eras, a kernel, memory, disk, a GPU.

    Raises:
        EraError: this is not the course's repository.
    """
    top = eras.root()
    others = [era for era in eras.known() if era.name != eras.TODAY]
    ready = [era.name for era in others if era.status == "ready"]
    return [
        _check("Python", _python),
        _check("Packages", _packages),
        *(_check(f"Era {era.name}", lambda era=era: _era(era)) for era in others),
        _check(f"Kernel of {ready[0]}" if ready else "Kernel", lambda: _kernel(ready[0] if ready else "")),
        _check("Memory", _memory),
        _check("Disk", lambda: _disk(top)),
        _check("GPU", _gpu),
    ]


def _check(name: str, look: Callable[[], _Found]) -> Check:
    """Look; what breaks while looking is a failed check, so that the others are asked too."""
    try:
        detail, step, *status = look()
        return Check(name, *(status or [FAIL if step else PASS]), detail, step)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        step = "look at that file or folder, and at its disk" if isinstance(error, OSError) else _set_up()
        return Check(name, FAIL, reason, step)


def _set_up(era: str = "") -> str:
    """Return the command that makes an era, or all: at once by make, one by one in a conda environment."""
    top = eras.root()
    if not (top / ".venv").exists():
        return f"failurelab eras create {era}".strip()
    return "make setup" if pathlib.Path.cwd() == top else f"make -C {top} setup"


def _python() -> _Found:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    step = "" if fits else "install Python 3.11, 3.12 or 3.13, then make setup PYTHON=python3.11"
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}", step


def _packages() -> _Found:
    """Compare the packages installed with the lock; a conda environment may hold others, which is said."""
    lock = eras.find(eras.TODAY, ready=False).lock.read_text(encoding="utf-8")
    wanted = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE))
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    have = {name: installed.get(name, "missing") for name in (*LIBRARIES[1:], *_TOOLS)}
    others = {name: version for name, version in have.items() if version != wanted.get(name)}
    if others:
        return "; ".join(f"{name} {others[name]}, the lock says {wanted.get(name)}" for name in others), _set_up()
    return ", ".join(f"{name} {have[name]}" for name in LIBRARIES[1:]), ""


def _era(era: eras.Era) -> _Found:
    return (era.title, "") if era.status == "ready" else (f"{era.title}: {era.status}", _set_up(era.name))


def _kernel(era: str) -> _Found:
    """Start the kernel of an era, as a notebook's cell does, and ask it for its trl; end it again."""
    from failurelab_course.notebook import kernel as kernels
    from failurelab_course.notebook.kernel_output import EraCellError

    if not era:
        return "no era is ready, so none was started", _set_up()
    try:
        kernel = kernels.EraKernel(era)
        try:
            code = "import trl; from trl import GRPOTrainer; answer = trl.__version__"
            return f"imported GRPOTrainer of trl {kernel.run(code, fetch=['answer'])['answer']}", ""
        finally:
            kernel.stop()
    except (eras.EraError, EraCellError) as error:
        venv = eras.root() / ".venv" / "bin" / "failurelab"
        program = os.path.relpath(venv) if venv.exists() else "failurelab"
        reason = str(error).strip().splitlines()[0].partition(" Next: ")[0]
        return reason, f"{program} eras remove {era}, then {program} eras create {era}"


def _memory() -> _Found:
    memory = psutil.virtual_memory()
    room = f"{memory.total / _GB:.1f} GB, {memory.available / _GB:.1f} GB of it free"
    if memory.total < MEMORY:
        return f"{room}; the course takes 4 GB", "use a larger machine, or work with a neighbour"
    if memory.available < FREE_MEMORY:
        return f"{room}; one notebook takes 1.5 GB or more", "close what takes memory"
    return room, ""


def _disk(top: pathlib.Path) -> _Found:
    """The clone's disk, and the one where temporary files go: a run without room there fails in odd places."""
    places = {top: DISK, pathlib.Path(tempfile.gettempdir()): TEMPORARY}
    free = {place: shutil.disk_usage(place).free for place in places}
    short = [place for place in places if free[place] < places[place]]
    steps = " and ".join(f"{places[place] / _GB:g} GB in {place}" for place in short)
    sizes = ", ".join(f"{free[place] / _GB:.1f} GB free in {place}" for place in (short or [top]))
    return sizes, f"free {steps}" if short else ""


def _gpu() -> _Found:
    """A GPU that works is a gain and none is no loss; one that is there and cannot be used has a reason."""
    if not shutil.which("nvidia-smi"):
        return "none found, and none is needed: all runs on the CPU", "", NOT_RUN
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip().splitlines()
    if not names:
        return "nvidia-smi is here and shows no GPU: all runs on the CPU", "", NOT_RUN
    from failurelab_course.experiments import devices

    reason, _, step = devices.gpu_problem().partition(" Next: ")
    return ("; ".join(names), "") if not reason else (f"{'; '.join(names)}: {reason}", f"for the GPU: {step}", NOT_RUN)
