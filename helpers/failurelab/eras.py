"""Pinned library stacks, each in an environment of its own: create, find, list, remove.

A failure is shown in the versions that had it. An era is such a stack: `eras/NAME.in` says what is asked for,
`eras/NAME.txt` is the lock, `.eras/NAME` the environment, and a kernelspec makes it open in JupyterLab. `today` is the
course's own environment, `.venv`.

This module uses the standard library alone, for it makes the environments that the rest of the package needs:

    PYTHONPATH=helpers python3 -m failurelab.eras create today trl-0.14
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import contextlib
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
from collections.abc import Iterator

TODAY = "today"
MARKER = "failurelab-era.json"
# Hidden from each other, or a library of the caller's environment would be imported in the era.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "JPY_PARENT_PID")
# Free bytes asked for before an environment is made: as measured with a CPU build of torch, and a third more.
_ROOM = {TODAY: 3_000_000_000, "era": 2_000_000_000}


class EraError(Exception):
    """An era cannot be made, found or used; the message says what was found and the next step."""

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook: the frames of this package say nothing more."""
        return [f"{type(self).__name__}: {self}"]


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
            "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "") or ("cuda" if _has_gpu() else "cpu"),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    @property
    def status(self) -> str:
        """`ready`, `missing`, `broken` (half-made, or its interpreter is gone) or `stale` (another lock)."""
        if not self.folder.is_dir():
            return "missing"
        try:
            marker = json.loads((self.folder / MARKER).read_text())
        except (OSError, ValueError):
            return "broken"
        if not os.access(self.python, os.X_OK) or not self.python.resolve().exists():
            return "broken"
        return "ready" if marker.get("lock") == fingerprint(self.lock) else "stale"

    @property
    def has_zero3(self) -> bool:
        """Whether DeepSpeed's CPU operation was built at set-up, so that ZeRO-3 runs here without a GPU."""
        try:
            return bool(json.loads((self.folder / MARKER).read_text()).get("zero3"))
        except (OSError, ValueError):
            return False


def _has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl")


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
    # In a conda or Binder environment the course's own environment is the one that runs.
    return top / ".venv" if (top / ".venv").exists() or sys.prefix == sys.base_prefix else pathlib.Path(sys.prefix)


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


def create(name: str, say=print) -> Era:
    """Make the era's environment if it is not there, whole; then its kernelspec. Does nothing where all is there.

    It is made in a temporary folder and renamed when whole, under a file lock, so that an interruption leaves nothing
    half-made in its place, and two set-ups at once wait for each other.

    Raises:
        EraError: Python is too old, no disk space, no network, or a lock that does not resolve.
    """
    era = find(name, ready=False)
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise EraError(
            f"Python {sys.version.split()[0]} runs this, and the locks are for 3.11 and 3.12. "
            "Next: install one of these and run: make PYTHON=python3.11"
        )
    top = root()
    (top / ".eras").mkdir(exist_ok=True)
    with _locked(top / ".eras" / f".{name}.lock", say, name):
        if era.status == "ready":
            say(f"era {name}: ready")
        else:
            _check_room(era)
            if era.status != "missing":
                say(f"era {name}: {era.status}, made again")
            _make_today(era, say) if name == TODAY else _make(era, say)
    if name != TODAY:
        register_kernel(era)
    return era


@contextlib.contextmanager
def _locked(path: pathlib.Path, say, name: str) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"era {name}: another set-up is making it, waiting for that")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_room(era: Era) -> None:
    need = _ROOM.get(era.name, _ROOM["era"])
    free = shutil.disk_usage(root()).free
    if free < need:
        raise EraError(
            f"{free / 1e9:.1f} GB of disk are free at {root()} and era {era.name} needs about "
            f"{need / 1e9:.0f} GB. Next: free some, and run the same command again."
        )


def _make_today(era: Era, say) -> None:
    """Make `.venv` in place: its scripts name their interpreter, so it cannot be renamed. The marker comes last."""
    (era.folder / MARKER).unlink(missing_ok=True)
    if not (era.python.exists() and _works([str(era.python), "-m", "pip", "--version"])):
        shutil.rmtree(era.folder, ignore_errors=True)
        say(f"era {era.name}: a virtual environment, and uv in it")
        # The interpreter that runs this may be the broken one that was just deleted.
        base = getattr(sys, "_base_executable", None) or sys.executable
        _step([base, "-m", "venv", str(era.folder)], "a virtual environment")
    if not os.access(era.folder / "bin" / "uv", os.X_OK):
        _step([str(era.python), "-m", "pip", "install", "--quiet", "uv"], "uv")
    _fill(era, era.folder, say)
    _finish(era, say)


def _make(era: Era, say) -> None:
    top = root()
    partial = top / ".eras" / f".{era.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _step(
            [_uv(), "venv", "--quiet", "--relocatable", "--python", sys.executable, str(partial)],
            "a virtual environment",
        )
        _fill(era, partial, say)
        (partial / MARKER).write_text(json.dumps({"lock": fingerprint(era.lock)}))
        shutil.rmtree(era.folder, ignore_errors=True)
        partial.rename(era.folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _finish(era, say)


def _fill(era: Era, folder: pathlib.Path, say) -> None:
    """Install torch, then the lock, then this package, into the environment at `folder`."""
    python = str(folder / "bin" / "python")
    install = [_uv(), "pip", "install", "--python", python, "--compile-bytecode", "--quiet"]
    torch = next(line for line in (era.lock.parent / "torch.txt").read_text().splitlines() if line.startswith("torch="))
    # A CPU build at hand is taken where find-links names one; elsewhere uv chooses the build by the machine's GPU.
    backend = [] if _find_links() else ["--torch-backend=auto"]
    say(f"era {era.name}: {torch}")
    _step([*install, *backend, torch], torch, era)
    say(f"era {era.name}: {sum('==' in line for line in era.lock.read_text().splitlines())} packages")
    _step([*install, "-r", str(era.lock)], era.lock.name, era)
    _step([*install, "--no-deps", "--editable", str(root())], "the package failurelab", era)


def _finish(era: Era, say) -> None:
    """Build DeepSpeed's CPU operation, once; without a compiler the era works and ZeRO-3 is NOT RUN there."""
    zero3 = False
    if not _asks_deepspeed(era):
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
            say(f"era {era.name}: that build failed, so ZeRO-3 is NOT RUN: {_last_line(built.stderr)}")
    else:
        say(
            f"era {era.name}: no C++ compiler is found, so ZeRO-3 is NOT RUN. Next: install g++, then "
            f"failurelab eras remove {era.name} and create it again"
        )
    (era.folder / MARKER).write_text(json.dumps({"lock": fingerprint(era.lock), "zero3": zero3}))
    say(f"era {era.name}: ready")


def _asks_deepspeed(era: Era) -> bool:
    return bool(re.search(r"^deepspeed==", era.lock.read_text(), re.MULTILINE))


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
    era = find(name, ready=False)
    if name == TODAY:
        raise EraError("today is the environment that the course itself runs in. Next: rm -r .venv, then make")
    with _locked(root() / ".eras" / f".{name}.lock", say, name):
        shutil.rmtree(era.folder, ignore_errors=True)
        spec = find(TODAY, ready=False).folder / "share" / "jupyter" / "kernels" / era.kernel_name
        shutil.rmtree(spec, ignore_errors=True)
    say(f"era {name}: removed")


def _find_links() -> str:
    return os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""


def _uv() -> str:
    for place in (root() / ".venv" / "bin" / "uv", pathlib.Path(sys.prefix) / "bin" / "uv"):
        if os.access(place, os.X_OK):
            return str(place)
    found = shutil.which("uv")
    if not found:
        raise EraError("uv is not found: eras are installed with it. Next: make, or pip install uv")
    return found


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


_NO_NETWORK = re.compile(
    r"failed to fetch|dns error|error sending request|could not connect|network is unreachable|"
    r"timed out|temporary failure in name resolution|connection refused|max retries|"
    r"newconnectionerror|network connectivity is disabled",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"no space left|os error 28|disk quota", re.IGNORECASE)
_NOT_RESOLVED = re.compile(
    r"no solution found|no matching distribution|could not find a version|was not found", re.IGNORECASE
)


def _step(command: list[str], what: str, era: Era | None = None) -> None:
    """Run one step of a set-up; turn its failure into one line."""
    env = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    env["DS_BUILD_OPS"] = "0"
    if _find_links():
        env["UV_FIND_LINKS"] = _find_links()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    except OSError as error:
        raise EraError(f"{what} could not be made: {error}") from error
    if done.returncode:
        raise EraError(explain(done.stderr + done.stdout, what, era.name if era else TODAY))


def explain(output: str, what: str, name: str) -> str:
    """Return one line for the failure of an installer: what was found, and the next step."""
    again = "Next: run the same command again; what is done already is kept."
    if _NO_SPACE.search(output):
        return f"era {name}: no space is left on the disk while installing {what}. Free some. {again}"
    if _NO_NETWORK.search(output):
        return (
            f"era {name}: {what} could not be fetched, the package index was not reached. Set-up needs the network "
            f"once. Check it, or the proxy. {again}"
        )
    if _NOT_RESOLVED.search(output):
        said = next((line.strip(" ×╰─▶│") for line in output.splitlines() if _NOT_RESOLVED.search(line)), "")
        return (
            f"era {name}: {what} does not resolve ({said}). Next: git checkout eras/{name}.txt, or after a "
            f"change to eras/{name}.in: make lock"
        )
    return f"era {name}: {what} could not be installed: {_last_line(output)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"(error|\w*Error|×)\b", line)] or lines
    return told[-1][:300] if told else "no message"


def main(arguments: list[str] | None = None) -> int:
    """Make environments before the rest of the package can be imported: `create NAME ...`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] != "create":
        print("usage: python3 -m failurelab.eras create [NAME ...]", file=sys.stderr)
        return 2
    try:
        for name in arguments[1:] or [era.name for era in known()]:
            create(name, say=lambda text: print(text, flush=True))
    except EraError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: what is done already is kept; run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
