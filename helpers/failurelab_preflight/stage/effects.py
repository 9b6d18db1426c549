"""What a script does beside its training: files that it writes, processes that it starts, connections that it makes.

A second run would do all that once more. So preflight listens to Python's audit events in the first one, and asks
before it runs the script again. Caches, the run's own temporary folder and the hub are no effects. What code in C
writes is no event; the command compares the script's folder for that.
"""

import json
import os
import pathlib
import socket
import sys
import threading
import traceback
import urllib.parse
from collections.abc import Iterable
from typing import Any
from unittest import mock

from failurelab_preflight.stage.own_code import OwnCode

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {  # events; of their arguments, those that are paths which change, each with that of the folder it is below
    "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.rename": ((0, 2), (1, 3)), "os.link": ((1, 3),),
    "os.symlink": ((1, 2),), "os.truncate": ((0, None),), "sqlite3.connect": ((0, None),),
}  # fmt: skip
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
_CACHES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE",
    "HF_ASSETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
    "MPLCONFIGDIR", "XDG_CACHE_HOME",
)  # fmt: skip
_IN_HOME = (".cache", ".triton", ".config/matplotlib", ".nv")
_HUB = ("huggingface.co", "hf.co")
_MOST = 20  # effects that are told
_BARRIER = pathlib.Path(__file__).parents[1] / "run.py"


def cache_folders() -> set[str]:
    """Return the folders of the libraries' caches, each with a separator at its end."""
    folders = [pathlib.Path.home() / name for name in _IN_HOME]
    folders += [pathlib.Path(value) for name in _CACHES if (value := os.environ.get(name))]
    return {os.path.join(os.path.realpath(folder), "") for folder in folders}


class Effects:
    """Writes each effect of this process into a file, as it happens, one JSON object a line.

    Files in the `allowed` folders may be written.
    """

    def __init__(self, path: pathlib.Path, own: OwnCode, allowed: Iterable[str | os.PathLike]):
        self._path, self._own = path, own
        inside = {os.path.join(os.path.realpath(folder), "") for folder in allowed}
        self._allowed = (*inside, *cache_folders(), "/dev/", "/proc/")
        self._hub: set[str] = set()  # addresses
        self._lines: set[str] = set()
        self._inside = threading.local()

    def listen(self) -> None:
        """Listen until this process ends: an audit hook cannot be taken away."""
        resolve = socket.getaddrinfo

        def note_hub(host: Any, *args: Any, **kwargs: Any) -> Any:
            addresses = resolve(host, *args, **kwargs)
            if _is_hub(host):
                self._hub.update(str(entry[4][0]) for entry in addresses)
            return addresses

        mock.patch.object(socket, "getaddrinfo", note_hub).start()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if getattr(self._inside, "busy", False):
            return
        self._inside.busy = True
        try:
            for kind, what in self._read(event, arguments):
                self._tell(kind, what)
        finally:
            self._inside.busy = False

    def _read(self, event: str, arguments: tuple) -> Iterable[tuple[str, str]]:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and self._is_outside(path):
                yield "writes", os.fsdecode(path)
        elif event in _PATHS:
            for place, below in _PATHS[event]:
                path = _whole(arguments[place], -1 if below is None else arguments[below])
                if self._is_outside(path):
                    yield "removes" if event in ("os.remove", "os.rmdir") else "writes", os.fsdecode(path)
        elif event in _STARTS and self._is_own():
            command = arguments[1] if event == "subprocess.Popen" else arguments[0]
            words = [command] if isinstance(command, (str, bytes)) else list(command)
            yield "starts", " ".join(map(os.fsdecode, words))[:120]
        elif event == "socket.connect":
            connection, address = arguments
            if connection.family == socket.AF_UNIX and not self._is_outside(address):
                return  # processes of this run that talk with each other, as those of `Dataset.map` do
            if connection.type == socket.SOCK_STREAM and not (isinstance(address, tuple) and address[0] in self._hub):
                host = ":".join(map(str, address[:2])) if isinstance(address, tuple) else os.fsdecode(address)
                yield "connects to", host

    def _is_outside(self, path: Any) -> bool:
        if isinstance(path, int) or not path:
            return False
        real = os.path.realpath(os.fsdecode(path)) + os.sep
        return not real.startswith(self._allowed) and "__pycache__" not in real

    def _is_own(self) -> bool:
        """Return whether the script's own code is what starts a process, and no import or training of a library's."""
        for frame, _ in traceback.walk_stack(sys._getframe(3)):
            file = frame.f_code.co_filename
            if file.startswith("<frozen importlib") or file == str(_BARRIER):
                return False
            if self._own.holds(file):
                return True
        return False

    def _tell(self, kind: str, what: str) -> None:
        line = json.dumps({"kind": kind, "what": what})
        if line not in self._lines and len(self._lines) < _MOST:
            self._lines.add(line)
            with self._path.open("a") as file:
                file.write(line + "\n")


def _whole(path: Any, folder: int) -> Any:
    """Return a path, of one that is given below an open folder, as `shutil.rmtree` does, the whole one."""
    if folder < 0 or isinstance(path, int):
        return path
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
    except OSError:
        return path


def _is_hub(host: Any) -> bool:
    name = os.fsdecode(host) if isinstance(host, (str, bytes)) else ""
    endpoint = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT", "")).hostname
    return bool(name) and (name == endpoint or any(name == hub or name.endswith("." + hub) for hub in _HUB))
