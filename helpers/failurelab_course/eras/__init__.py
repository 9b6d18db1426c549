"""Pinned library stacks, each in an environment of its own: create, find, list, remove.

A failure is shown in the versions that had it. An era is such a stack: `eras/NAME.in` says what is asked for,
`eras/NAME.txt` is the lock, `.eras/NAME` the environment, and a kernelspec makes it open in JupyterLab. `today` is the
course's own environment, `.venv`.

This module uses the standard library alone, for it makes the environments that the rest of the package needs:

    PYTHONPATH=helpers python3 -m failurelab_course.eras create today trl-0.14
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable

from failurelab.errors import FailureLabError

TODAY = "today"
MARKER = "failurelab-era.json"
LINKS = "machine"  # in an era: links to packages of the machine's own Python
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
            "TORCH_EXTENSIONS_DIR": str(self.folder / "torch_extensions"),
            "TOKENIZERS_PARALLELISM": "false",
            "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "") or ("cuda" if _builds_for_gpus() else "cpu"),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    @property
    def status(self) -> str:
        """`ready`, `missing`, `broken` (half-made, or its interpreter is gone) or `stale` (another lock)."""
        if not self.folder.is_dir():
            return "missing"
        if not self.marker:
            return "broken"
        if not os.access(self.python, os.X_OK) or not self.python.resolve().exists():
            return "broken"
        links = self.folder / LINKS
        if links.is_dir() and not all(link.exists() for link in links.iterdir()):
            return "broken"  # what it took from the machine was moved or replaced
        return "ready" if self.marker.get("lock") == fingerprint(self.lock) else "stale"

    @property
    def marker(self) -> dict:
        """What its set-up wrote down; empty where it did not end.

        `lock` (see `fingerprint`), `zero3` (DeepSpeed's operation was built), and of an era that was made with the
        machine's own torch: `machine` (packages taken from there in another version than the lock's, with it) and
        `left_out` (packages of the lock that it lacks).
        """
        try:
            found = json.loads((self.folder / MARKER).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def has_zero3(self) -> bool:
        """Whether DeepSpeed's CPU operation was built at set-up, so that ZeRO-3 runs here without a GPU."""
        return bool(self.marker.get("zero3"))


def _builds_for_gpus() -> bool:
    """Whether DeepSpeed can be told to use GPUs: up to 0.16 its mere import fails there without a CUDA compiler."""
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
    top = root()
    made = []
    for source in sorted((top / "eras").glob("*.in")):
        title = re.search(r"^# title: (.+)$", source.read_text(), re.MULTILINE)
        name = source.stem
        made.append(Era(name, title.group(1) if title else name, source.with_suffix(".txt"), _folder(top, name)))
    return sorted(made, key=lambda each: (each.name != TODAY, each.name))


def _folder(top: pathlib.Path, name: str) -> pathlib.Path:
    if name != TODAY:
        return top / ".eras" / name
    # Where the course was put into an environment of the reader's own (conda, Binder), that one is it; a Python that
    # only makes environments, a cluster's say, is left as it is.
    own = any(pathlib.Path(sys.prefix).glob("lib/python*/site-packages/*failurelab*"))
    return pathlib.Path(sys.prefix) if own and not (top / ".venv").exists() else top / ".venv"


def find(name: str, *, ready: bool = True) -> Era:
    """Return the era called `name`.

    Raises:
        EraError: no era is called so (the message lists those that are); or, if `ready`, it has not been made.
    """
    eras = {each.name: each for each in known()}
    if name not in eras:
        raise EraError(f"unknown era {name!r}: the eras are {', '.join(eras)}")
    found = eras[name]
    if ready and found.status != "ready" and not (name == TODAY and _is_own(found)):
        raise EraError(
            f"era {name} is {found.status} ({found.folder}): its library stack cannot be imported. "
            f"Next: failurelab eras create {name}"
        )
    return found


def _is_own(era: Era) -> bool:
    """Whether this very process runs in the era's environment, made by whatever means (conda, Binder)."""
    return pathlib.Path(sys.prefix).resolve() == era.folder.resolve()


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
    kept = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    return kept | era.variables


def create(
    name: str,
    say=print,
    *,
    wheels: pathlib.Path | None = None,
    torch_here: bool = False,
    also: Iterable[str] = (),
) -> Era:
    """Make the era's environment if it is not there, whole; then its kernelspec. Does nothing where all is there.

    It is made in a temporary folder and renamed when whole, under a file lock, so that an interruption leaves nothing
    half-made in its place, and two set-ups at once wait for each other.

    Args:
        name: the era's.
        say: is told what is done.
        wheels: a folder of wheels that everything comes from; without one, from a package index.
        torch_here: take torch, and what only it needs, from the Python that runs this (see `own_torch`).
        also: with `torch_here`, packages that must not be left out, such as `deepspeed`.

    Raises:
        EraError: Python is too old, no disk space, no network, a lock that does not resolve, or a wheel is missing.
    """
    from failurelab_course.eras import install as era_install

    return era_install.create(name, say, era_install.Source(wheels, torch_here, tuple(also)))


def create_all(names: Iterable[str], say=print, **source) -> None:
    """Make several eras; the options are those of `create`.

    Raises:
        EraError: as `create`; what is made already stays.
    """
    from failurelab_course.eras.installers import forget_cache

    try:
        for name in names:
            create(name, say, **source)
    finally:
        forget_cache()


def register_kernel(era: Era) -> pathlib.Path:
    """Write the era's kernelspec into the course's environment, so that JupyterLab offers it; return its folder."""
    prefix = find(TODAY, ready=False).folder
    folder = prefix / "share" / "jupyter" / "kernels" / era.kernel_name
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "argv": [str(era.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": era.title,
        "language": "python",
        "metadata": {"debugger": True, "failurelab_era": era.name},
        "env": era.variables | {"PATH": f"{era.folder / 'bin'}{os.pathsep}${{PATH}}"},
    }
    text = json.dumps(spec, indent=1)
    path = folder / "kernel.json"
    if not path.is_file() or path.read_text() != text:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    return folder


def remove(name: str, say=print) -> None:
    """Delete the era's environment and kernelspec.

    Raises:
        EraError: the era is unknown, or it is `today`, which this very command may be running in.
    """
    from failurelab_course.eras.install import locked

    era = find(name, ready=False)
    if name == TODAY:
        raise EraError("today is the environment that the course itself runs in. Next: rm -r .venv, then make")
    with locked(root() / ".eras" / f".{name}.lock", say, name):
        shutil.rmtree(era.folder, ignore_errors=True)
        spec = find(TODAY, ready=False).folder / "share" / "jupyter" / "kernels" / era.kernel_name
        shutil.rmtree(spec, ignore_errors=True)
    say(f"era {name}: removed")


def main(arguments: list[str] | None = None) -> int:
    """Make environments before the rest of the package can be imported: `create NAME ...`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python3 -m failurelab_course.eras", description="Make the pinned library stacks.")
    make = parser.add_subparsers(required=True, metavar="create").add_parser("create", help="make what is missing")
    make.add_argument("names", nargs="*", metavar="NAME", help="eras; all without one")
    make.add_argument("--wheels", metavar="DIR", help="take everything from this folder of wheels, without a network")
    make.add_argument("--torch", choices=["here"], help="take torch from the Python that runs this")
    make.add_argument("--with", dest="also", default="", metavar="A,B", help="packages that must not be left out")
    try:
        asked = parser.parse_args(arguments)
        source = source_of(asked.wheels, asked.torch or "", asked.also)
        create_all(asked.names or [era.name for era in known()], say=lambda text: print(text, flush=True), **source)
    except EraError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: what is done already is kept; run the same command again", file=sys.stderr)
        return 130
    return 0


def source_of(wheels: str | pathlib.Path | None, torch: str, also: str) -> dict:
    """Return the options of `create` for those of the command line.

    Raises:
        EraError: they do not go together.
    """
    names = tuple(name.strip() for name in also.split(",") if name.strip())
    if torch not in ("", "here"):
        raise EraError(f"--torch {torch}: torch comes from the wheels, or with --torch here from this Python")
    if (torch or names) and not wheels:
        raise EraError("--torch here and --with go with --wheels DIR. Next: name the folder that holds the wheels")
    if names and not torch:
        raise EraError("--with goes with --torch here: without it nothing of a lock is left out. Next: drop --with")
    return {"wheels": pathlib.Path(wheels).resolve() if wheels else None, "torch_here": bool(torch), "also": names}
