"""DeepSpeed's one compiled operation for the CPU: where it lies, how it is built, and what a killed build has left.

DeepSpeed builds it when an engine first starts on a CPU. torch keeps it in a folder, with a lock that is a file: where
a builder was killed, every later process would wait for it without end or a word.
"""

import contextlib
import hashlib
import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

OPERATION = "deepspeed_shm_comm"
_OLD_LOCK = 600.0  # seconds; the build takes about a minute


class EngineError(RuntimeError):
    """A DeepSpeed engine cannot be made here; the message says what was found, why it matters and the next step."""


def check_operation() -> None:
    """DeepSpeed builds one small C++ operation when an engine first starts on a CPU."""
    folder = extensions()
    recover_build(folder)
    if (folder / OPERATION / f"{OPERATION}.so").is_file():
        return
    compiler = os.environ.get("CXX") or "c++"
    if not (shutil.which(compiler) or shutil.which("g++")):
        raise EngineError(
            f"no C++ compiler is found ({compiler}), and DeepSpeed builds its operation for the CPU with one. "
            "Next: install g++ (apt-get install g++), or set CXX to your compiler."
        )
    if not (shutil.which("ninja") or (pathlib.Path(sys.executable).parent / "ninja").exists()):
        raise EngineError(
            "ninja is not found on the path, and torch builds DeepSpeed's operation with it. Next: pip install ninja"
        )


def load_operation() -> None:
    """Build DeepSpeed's operation for the CPU where it is not built, and load it: DeepSpeed would, with more words.

    Raises:
        EngineError: it cannot be built.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    with contextlib.redirect_stderr(sys.__stderr__):
        # Probes which operations could be built, and hides what the linker says by sys.stderr's own descriptor: in a
        # notebook's kernel that is another one than the linker's.
        _ = importlib.import_module("deepspeed.ops").__compatible_ops__
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not builder.is_compatible():
        return  # DeepSpeed does without on such a machine
    try:
        with _own_ninja():
            builder.load(verbose=False)
    except (
        RuntimeError,
        OSError,
        ImportError,
        subprocess.SubprocessError,
    ) as error:  # of torch's builder, and of dlopen
        lines = [line for line in str(error).splitlines() if line.strip()]
        told = next((line for line in lines if "error" in line.lower() and "building" not in line), lines[0])
        raise EngineError(
            f"DeepSpeed's operation {OPERATION} for the CPU cannot be built in {extensions()}: {told.strip()}. Next: "
            "try the compiler (c++ --version), remove that folder, and run again."
        ) from error


@contextlib.contextmanager
def _own_ninja() -> Iterator[None]:
    """Let torch find this environment's ninja for a block, and not one of the system that comes first on the path.

    Releases of ninja do not agree on what a command line's digest is. Two of them in turn build the operation anew each
    time, a minute or more, though nothing has changed.
    """
    path = os.environ.get("PATH")
    own = pathlib.Path(sys.executable).parent
    if (own / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join([str(own), *([path] if path else [])])
    try:
        yield
    finally:
        if path is None:
            os.environ.pop("PATH", None)
        else:
            os.environ["PATH"] = path


def extensions() -> pathlib.Path:
    """Return the folder that torch keeps compiled operations in; an environment of this course has its own."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return _to_write(pathlib.Path(named))
    own = pathlib.Path(sys.prefix) / "torch_extensions"
    if own.is_dir():
        return _to_write(own)
    from torch.utils import cpp_extension

    return pathlib.Path(cpp_extension._get_build_directory(OPERATION, verbose=False)).parent


def _to_write(folder: pathlib.Path) -> pathlib.Path:
    """Return the folder, or where an environment is shared read-only (a class on one server) a copy of one's own.

    torch makes a lock and ninja a log there, even where all is built.
    """
    if not folder.is_dir() or os.access(folder, os.W_OK):
        return folder
    built = folder / OPERATION
    state = f"{folder.resolve()} {built.stat().st_mtime_ns if built.is_dir() else 0}"  # made anew: copied anew
    name = f"extensions-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    own = pathlib.Path.home() / ".cache" / "failurelab" / name
    if not own.is_dir():
        own.parent.mkdir(parents=True, exist_ok=True)
        partial = pathlib.Path(tempfile.mkdtemp(dir=own.parent))
        shutil.copytree(folder, partial, dirs_exist_ok=True)  # with its times, or ninja would build again
        with contextlib.suppress(OSError):  # another process was first
            partial.rename(own)
        shutil.rmtree(partial, ignore_errors=True)
    return own


def recover_build(folder: pathlib.Path) -> list[pathlib.Path]:
    """Remove what killed builds have left in a folder of compiled operations: locks; return those removed.

    torch marks a build by a file `lock`, which the builder holds open until it is done. A process that is killed leaves
    the file, and everyone after it waits for good. A lock that no process holds open is a dead one. Where that cannot
    be seen (no /proc, another user's process, another machine), a lock older than ten minutes is taken for dead.
    torch builds what is missing again, a half-written library included.
    """
    removed = []
    for lock in sorted(folder.glob("*/lock")):
        if not _is_held(lock):
            with contextlib.suppress(FileNotFoundError):  # its builder has just finished
                lock.unlink()
                removed.append(lock)
    return removed


def _is_held(lock: pathlib.Path) -> bool:
    processes = pathlib.Path("/proc")
    if not (processes / "self" / "fd").is_dir():
        return _is_young(lock)
    hidden = False
    for process in processes.glob("[0-9]*"):
        try:
            held = list((process / "fd").iterdir())
        except PermissionError:
            hidden = True
            continue
        except OSError:
            continue
        for each in held:
            with contextlib.suppress(OSError):
                if os.path.samefile(each, lock):
                    return True
    return hidden and _is_young(lock)


def _is_young(lock: pathlib.Path) -> bool:
    try:
        return time.time() - lock.stat().st_mtime < _OLD_LOCK
    except FileNotFoundError:
        return False
