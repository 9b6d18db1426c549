"""Checks sent to an era's check server, a process of the era (see `server`).

What this side adds: the server's start in the era's environment, with a time limit for its imports,
and its end, whatever happens here. And which GPU a check sees: none on the CPU, so that a script that takes a GPU where
there is one is measured alike everywhere; on a GPU exactly one, for with two transformers would wrap nn.DataParallel
around the model.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from failurelab_course import eras, state_file
from failurelab_course.experiments import machine
from failurelab_course.labs.checker import server as check_server

# Seconds for the imports of a stack: 5 to 20 on two idle cores, more on a busy machine or the first time.
IMPORT_LIMIT = 300.0
# Seconds over a check's own limit in which the server must have answered.
_GRACE = 30.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
# On a GPU each check is a fresh process, and has these beside its own limits: seconds for its imports, and MiB of the
# machine's memory for CUDA's libraries and context.
_FRESH_SECONDS, _FRESH_MEMORY = 120.0, 4096


class EnvironmentBroken(Exception):
    """The question could not be asked in this era; the message says why."""


def one_gpu(device: str) -> str:
    """Return the CUDA_VISIBLE_DEVICES that shows `cuda:N` alone: the N-th that this process may see."""
    number, named = machine.read_device(device), machine.visible_gpus()
    return named[number] if named else str(number)


class Server:
    """A check server that runs."""

    def __init__(self, process: subprocess.Popen, pipe: Connection, folder: pathlib.Path, device: str):
        self.process, self.pipe, self.folder, self.device = process, pipe, folder, device
        self._count = 0

    @functools.cached_property
    def broken(self) -> dict[str, str]:
        """Which of the needed imports fail, and how; asking waits until all were tried.

        Raises:
            EnvironmentBroken: the server ended, or they took too long.
        """
        return self.answer(IMPORT_LIMIT)["broken"]

    def check(
        self,
        id: int,
        script: pathlib.Path,
        model: pathlib.Path,
        trainer: str,
        time_limit: float,
        *,
        memory_limit: int = 4096,
        **asked: Any,
    ) -> None:
        """Order one check; its answer carries `id`. Limits are in seconds and MiB; `asked` is for `measure.run`.

        Raises:
            EnvironmentBroken: the server has ended.
        """
        self._count += self.broken is not None  # the first answer must have come
        on_gpu = self.device != "cpu"
        order = {
            "device": self.device.partition(":")[0],
            "visible": one_gpu(self.device) if on_gpu else "",
            "id": id,
            "script": str(pathlib.Path(script).resolve()),
            "model": str(model),
            "folder": str(self.folder / f"check-{self._count}"),
            "asked": {"trainer_class": trainer, **asked},
            "time_limit": time_limit + (_FRESH_SECONDS if on_gpu else 0),
            "memory_limit": memory_limit + (_FRESH_MEMORY if on_gpu else 0),
        }
        try:
            self.pipe.send_bytes(json.dumps(order).encode())
        except OSError as error:
            raise EnvironmentBroken(self._last_words()) from error

    def longest(self, time_limit: float) -> float:
        """Return the seconds within which one of several checks with this limit must be answered."""
        return 2 * (time_limit if self.device == "cpu" else time_limit + _FRESH_SECONDS) + _GRACE

    def answer(self, limit: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            EnvironmentBroken: the server ended, or did not answer within `limit` seconds.
        """
        try:
            if not self.pipe.poll(limit):
                raise EnvironmentBroken(f"the era's process did not answer within {limit:g} s")
            return json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise EnvironmentBroken(self._last_words()) from error

    def _last_words(self) -> str:
        self.process.wait()
        lines = (self.folder / "server.txt").read_text(errors="replace").strip().splitlines()
        said = lines[-1][:300] if lines else state_file.full_disk(self.folder) or "nothing"
        return f"the era's process ended with status {self.process.returncode}; it said last: {said}"


@contextlib.contextmanager
def start(era_name: str, needs: list[str], jobs: int, *, device: str = "cpu") -> Iterator[Server]:
    """Start an era's check server, and end it and all its checks when the block is left.

    It does not wait for the server's imports: they go on while others are checked.

    Args:
        era_name: the era's.
        needs: what is imported before the first check, as `module.Name`.
        jobs: how many checks run at once, each with one thread.
        device: `cpu`, `cuda` or `cuda:N`, where the checks compute.

    Raises:
        EnvironmentBroken: the era is not ready.
    """
    try:
        era = eras.find(era_name, wait=functools.partial(print, file=sys.stderr, flush=True))
    except eras.EraError as error:
        raise EnvironmentBroken(str(error)) from error
    variables = eras.environment(era) | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # The server itself never touches a GPU: it forks. DeepSpeed up to 0.16, which trl imports, looks for a compiler for
    # CUDA when it is imported for GPUs; no lab that is checked on a GPU uses it.
    variables |= {VISIBLE: "", "DS_ACCELERATOR": "cpu", check_server.NEEDS: " ".join(needs)}
    here, there = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(prefix="failurelab-check-", ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        if len(name) < 60:  # what a server that is killed leaves goes too; a socket's path has some hundred bytes
            variables["TMPDIR"] = name
        with open(folder / "server.txt", "wb") as log:
            process = subprocess.Popen(
                [str(era.python), "-m", check_server.__name__, str(there.fileno()), str(jobs), device],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd=folder,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        there.close()
        try:
            yield Server(process, here, folder, device)
        finally:
            _end(process, here)


def _end(server: subprocess.Popen, pipe: Connection) -> None:
    """Close the connection, at which the server ends its checks and itself; kill it if it does not."""
    pipe.close()
    try:
        server.wait(_GRACE)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
