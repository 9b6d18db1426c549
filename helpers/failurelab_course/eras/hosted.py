"""A notebook that was opened alone, on a hosted runtime: Colab, Kaggle, or any Python with torch and no clone of this.

There is no `make` and no `.venv` there, and the kernel that runs is the environment. `prepare` installs today's lock
into it, around the torch that is there; to the historic stacks this torch is lent (`lent`), so that none of them
downloads another one. A file in the course's root, `.hosted`, says that it is used in this way. Only the standard
library is needed.
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import atexit
import importlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable

from failurelab_course.eras import HOSTED, TODAY, EraError, find, install, is_hosted, lent, root

Say = Callable[[str], object]  # is told what is done, line by line
# What notebooks measure with: these are the lock's. Anything else that runs already is the kernel's own.
_MEASURES = ("numpy", "pandas", "matplotlib", "safetensors", "tokenizers", "transformers", "accelerate", "peft", "trl",
             "datasets", "pyarrow", "huggingface-hub", "bitsandbytes", "deepspeed")  # fmt: skip
_NEEDED = 3_000_000_000  # free bytes, as measured for today's lock without torch, and a half more


def prepare(say: Say = print) -> None:
    """Install today's lock and the course into the Python that runs, around its torch; then go to the notebooks.

    A second call installs what a first one did not, and nothing that is there.

    Args:
        say: is told what is done, and how long it took.

    Raises:
        EraError: Python has no lock, torch is missing, there is no installer or no room, or a library was imported in
            another version before: then the runtime has to be restarted.
    """
    started = time.monotonic()
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise EraError(
            f"this runtime has Python {sys.version.split()[0]}, and the locks are for 3.11 to 3.13. "
            "Next: choose a runtime with one of these"
        )
    torch = lent.installed("torch")
    if not torch:
        raise EraError("this runtime has no torch. Next: choose one that has, or pip install torch, and run this again")
    if (free := shutil.disk_usage(root()).free) < _NEEDED:
        raise EraError(
            f"{free / 1e9:.1f} GB of disk are free at {root()} and about {_NEEDED / 1e9:.0f} GB are needed. "
            "Next: free some, and run this cell again"
        )
    (root() / HOSTED).write_text(f"{sys.prefix}\n{sys.executable}\n", encoding="utf-8")
    (root() / ".eras").mkdir(exist_ok=True)
    era = find(TODAY, ready=False)
    if era.status != "ready":
        say(f"today's libraries are installed around torch {torch}: a minute or two, once a runtime")
        if not _has_uv():
            install.run_step([sys.executable, "-m", "pip", "install", "--quiet", "uv"], "uv", era)
        lock = root() / ".eras" / "hosted.txt"
        lock.write_text(_without_the_kernels_own(era.lock.read_text(encoding="utf-8")), encoding="utf-8")
        install.fill(era, pathlib.Path(sys.executable), lambda line: None, lock=lock)
        importlib.invalidate_caches()
        install.mark(era, era.folder)
        say(f"installed in {time.monotonic() - started:.0f} seconds")
    enter()


def enter() -> None:
    """Go to the notebooks' folder, which the paths in them begin at; does nothing where the course is not hosted.

    Raises:
        EraError: a library that the notebooks measure with was imported in another version than is installed now.
    """
    if not is_hosted():
        return
    loaded = {name: getattr(sys.modules.get(name.replace("-", "_")), "__version__", None) for name in _MEASURES}
    if stale := [
        f"{name} {version}" for name, version in loaded.items() if version not in (None, lent.installed(name))
    ]:
        raise EraError(
            f"{', '.join(stale)} was imported before the course's own version was installed. "
            "Next: restart the runtime (Colab: Runtime, Restart session; Kaggle: Run, Restart), and run all cells"
        )
    os.chdir(root() / "notebooks")


def make_behind(names: list[str], say: Say = print) -> None:
    """On a hosted runtime, start making the stacks that are not there, in the background; a cell waits for its own."""
    if not is_hosted():
        return
    missing = [era for era in map(_find, names) if era.status != "ready" and not era.is_being_made]
    if missing:
        behind = install.create_behind(missing, say)
        atexit.register(_end, behind)  # with the kernel


def _end(behind: subprocess.Popen) -> None:
    if behind.poll() is None:
        os.killpg(behind.pid, signal.SIGTERM)
        behind.wait()


def _find(name: str):
    return find(name, ready=False)


def _without_the_kernels_own(lock: str) -> str:
    """Return a lock without what this process has imported for itself: a host's kernel needs its own versions."""
    modules: dict[str, list[str]] = {}
    for module, names in importlib.metadata.packages_distributions().items():
        for name in names:
            modules.setdefault(lent.normal(name), []).append(module)

    def is_kept(line: str) -> bool:
        name = lent.normal(re.match(r"[\w.-]*", line)[0])
        return name not in _MEASURES and any(module in sys.modules for module in modules.get(name, ()))

    return "".join(f"{line}\n" for line in lock.splitlines() if not is_kept(line))


def _has_uv() -> bool:
    scripts = pathlib.Path(sysconfig.get_path("scripts"), "uv")
    return bool(shutil.which("uv")) or os.access(scripts, os.X_OK)
