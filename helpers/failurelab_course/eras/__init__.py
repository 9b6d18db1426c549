"""Pinned library stacks, each in an environment of its own: create, find, list, remove.

A failure is shown in the versions that had it. An era is such a stack: `eras/NAME.in` says what is asked for,
`eras/NAME.txt` is the lock, `.eras/NAME` the environment, and a kernelspec makes it open in JupyterLab. `today` is the
course's own environment, `.venv`. `install` makes and removes them.

Both modules use the standard library alone, for they make the environments that the rest of the package needs:

    PYTHONPATH=helpers python3 -m failurelab_course.eras create today trl-0.14
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from failurelab.errors import FailureLabError

TODAY = "today"
MARKER = "failurelab-era.json"
HOSTED = ".hosted"  # in the course's root: the prefix and the interpreter that `hosted` installed it into
# Hidden from each other, or a library of the caller's environment would be imported in the era.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "JPY_PARENT_PID")


class EraError(FailureLabError):
    """An era cannot be made, found or used; the message says what was found and the next step."""


@dataclasses.dataclass(frozen=True)
class Era:
    """One pinned library stack. `folder` is its environment, which may not exist yet (see `status`)."""

    name: str
    title: str
    lock: pathlib.Path
    folder: pathlib.Path

    @property
    def python(self) -> pathlib.Path:
        """The era's interpreter."""
        if self.name == TODAY and (named := _hosted(self.lock.parents[1])):
            return named[1]  # a system's may be called python3 alone
        return self.folder / "bin" / "python"

    @property
    def kernel_name(self) -> str:
        """The kernelspec's name; `today` is the course's own kernel, python3."""
        return "python3" if self.name == TODAY else f"failurelab-{self.name}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that a process of this era needs, beside those it inherits."""
        return {
            "FAILURELAB_ERA": self.name,
            "TOKENIZERS_PARALLELISM": "false",
            "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "") or ("cuda" if _builds_for_gpus() else "cpu"),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    @property
    def status(self) -> str:
        """`ready`, `missing`, `broken` (half-made, or its interpreter is gone) or `stale` (another lock)."""
        if not self.folder.is_dir():
            return "missing"
        if not self.marker or not os.access(self.python, os.X_OK):
            return "broken"
        return "ready" if self.marker.get("lock") == fingerprint(self.lock) else "stale"

    @property
    def marker(self) -> dict:
        """What its set-up wrote down: `lock` (see `fingerprint`); empty where it did not end."""
        try:
            found = json.loads((self.folder / MARKER).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def has_zero3(self) -> bool:
        """Whether it holds DeepSpeed, which its locks ask for on Linux alone."""
        return sys.platform == "linux" and "\ndeepspeed==" in self.lock.read_text(encoding="utf-8")

    @property
    def setup_file(self) -> pathlib.Path:
        """The file that a set-up of this era holds a lock on, with the last line that a set-up said."""
        return root() / ".eras" / f".{self.name}.lock"

    @property
    def setup_line(self) -> str:
        """What the era's last set-up said last; empty where there was none."""
        return self.setup_file.read_text(encoding="utf-8") if self.setup_file.is_file() else ""

    @property
    def is_being_made(self) -> bool:
        """Whether it is not ready yet, and a set-up of it is going on or waits for its turn."""
        if self.status == "ready":
            return False
        try:
            with open(self.setup_file) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False


def _builds_for_gpus() -> bool:
    """Whether DeepSpeed can be told to use GPUs: none are hidden, and there is a CUDA compiler.

    Without one its mere import fails up to 0.16. Told to use GPUs that are hidden, it finds none when it trains.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    compiler = shutil.which("nvcc") or os.access(os.path.join(home, "bin", "nvcc"), os.X_OK)
    return os.path.exists("/dev/nvidiactl") and bool(compiler)


def root() -> pathlib.Path:
    """Return the repository's root: FAILURELAB_ROOT, else above this file, else above the working directory.

    Raises:
        EraError: none of these is the course's repository.
    """
    named = os.environ.get("FAILURELAB_ROOT")
    starts = [pathlib.Path(named)] if named else [pathlib.Path(__file__).resolve(), pathlib.Path.cwd()]
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "eras" / "torch.txt").is_file() and (folder / "helpers" / "failurelab").is_dir():
                return folder
    raise EraError(
        f"this is not the course's repository ({starts[-1]}): no eras/torch.txt above it. Notebooks, labs and locks "
        "live there. Next: cd into your clone, or set FAILURELAB_ROOT to it."
    )


def known() -> list[Era]:
    """Return all eras of the course, `today` first."""
    eras = []
    for source in (root() / "eras").glob("*.in"):
        title = re.search(r"^# title: (.+)$", source.read_text(), re.MULTILINE)
        name = source.stem
        eras.append(Era(name, title[1] if title else name, source.with_suffix(".txt"), _folder(root(), name)))
    return sorted(eras, key=lambda era: (era.name != TODAY, era.name))


def _folder(top: pathlib.Path, name: str) -> pathlib.Path:
    if name != TODAY:
        return top / ".eras" / name
    if named := _hosted(top):
        return named[0]
    # Where the course was put into an environment of the reader's own (conda, Binder), that one is it; a Python that
    # only makes environments, a cluster's say, is left as it is.
    own = any(pathlib.Path(sys.prefix).glob("lib/python*/site-packages/*failurelab_course*"))
    return pathlib.Path(sys.prefix) if own and not (top / ".venv").exists() else top / ".venv"


def _hosted(top: pathlib.Path) -> list[pathlib.Path]:
    """Return the prefix and the interpreter that the course was installed into; none where it has its own."""
    file = top / HOSTED
    return [pathlib.Path(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def is_hosted() -> bool:
    """Whether the course is used in a Python that it was installed into, on a hosted runtime (see `hosted`)."""
    return (root() / HOSTED).is_file()


def named_by(notebook: pathlib.Path) -> list[str]:
    """Return the eras that a notebook's opening names, as they stand there; none without such a line."""
    line = re.search(r"Library stacks: (.+?)\.[ *]", notebook.read_text(encoding="utf-8"))
    return [name.strip() for name in line[1].split(",")] if line else []


def by_need() -> tuple[list[Era], list[Era]]:
    """Return the eras that the first notebook needs, and the others, in the order in which notebooks need them."""
    notebooks = sorted((root() / "notebooks").glob("[0-9]*.ipynb"))
    order = [TODAY, *(name for notebook in notebooks for name in named_by(notebook))]
    eras = sorted(known(), key=lambda era: order.index(era.name) if era.name in order else len(order))
    first = {TODAY, *(named_by(notebooks[0]) if notebooks else [])}
    return [era for era in eras if era.name in first], [era for era in eras if era.name not in first]


def find(name: str, *, ready: bool = True, wait=None) -> Era:
    """Return the era called `name`.

    Args:
        name: the era's.
        ready: whether it has to be made.
        wait: while a set-up makes the era, wait for that, and call this with each line that the set-up says.

    Raises:
        EraError: no era is called so (the message lists those that are); or, if `ready`, it has not been made.
    """
    eras = {era.name: era for era in known()}
    if name not in eras:
        raise EraError(f"unknown era {name!r}: the eras are {', '.join(eras)}")
    era, line = eras[name], ""
    while wait and era.is_being_made:
        if era.setup_line != line:
            line = era.setup_line
            wait(line)
        time.sleep(0.5)
    # This very process may run in today's environment, made by whatever means (conda, Binder).
    is_own = name == TODAY and pathlib.Path(sys.prefix).resolve() == era.folder.resolve()
    if ready and era.status != "ready" and not is_own:
        how = f"; its last set-up said: {era.setup_line}" if era.setup_line else ""
        raise EraError(
            f"era {name} is {era.status} ({era.folder}{how}): its library stack cannot be imported. "
            f"Next: failurelab eras create {name}"
        )
    return era


def fingerprint(lock: pathlib.Path) -> str:
    """Return a digest of what an era is made from: its lock, torch's, and Python's minor version."""
    if not lock.is_file():
        raise EraError(f"{lock} is missing: an era is made from its lock. Next: git checkout {lock.name}")
    text = lock.read_bytes() + (lock.parent / "torch.txt").read_bytes() + str(sys.version_info[:2]).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def run(era: Era, arguments: list[str], **options) -> subprocess.CompletedProcess:
    """Run the era's Python with `arguments`; other options go to `subprocess.run`."""
    return subprocess.run([str(era.python), *arguments], env=environment(era) | options.pop("env", {}), **options)


def environment(era: Era) -> dict[str, str]:
    """Return the whole environment for a process of this era."""
    return inherited() | era.variables


def inherited() -> dict[str, str]:
    """Return this process's variables, without those that would lead another environment's Python to this one's."""
    return {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
