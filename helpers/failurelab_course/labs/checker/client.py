"""Checks sent to an era's check server: one process of the era, which imports once and forks for each check.

What this side adds to `check_server`: the server's start in the era's environment, with a time limit for its imports,
and its end, whatever happens here. And which GPU a check sees: none on the CPU, so that a script that takes a GPU where
there is one is measured alike everywhere; on a GPU exactly one, for with two transformers would wrap nn.DataParallel
around the model.
"""

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from failurelab_course import eras

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
    number = int(device.partition(":")[2] or 0)
    named = [each.strip() for each in os.environ.get(VISIBLE, "").split(",") if each.strip()]
    return named[number] if named else str(number)


class Server:
    """A check server that runs. `broken` says which of the needed imports fail, and how."""

    def __init__(self, process: subprocess.Popen, folder: pathlib.Path, needs: list[str], device: str):
        self.process, self.folder, self.needs, self.device = process, folder, needs, device
        self.broken: dict[str, str] = {}
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._count = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def order(self, content: dict[str, Any]) -> None:
        """Send one order.

        Raises:
            EnvironmentBroken: the server has ended.
        """
        try:
            self.process.stdin.write(json.dumps(content).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EnvironmentBroken(self._last_words()) from error

    def check(
        self,
        id: int,
        script: pathlib.Path,
        model: pathlib.Path,
        trainer: str,
        time_limit: float,
        record: Any = None,
        *,
        kind: str = "trainer",
        memory_limit: int = 4096,
    ) -> None:
        """Order one check; its answer carries `id`. Limits are in seconds and MiB; for `kind` see `measure`."""
        self._count += 1
        if self.device != "cpu":
            time_limit, memory_limit = time_limit + _FRESH_SECONDS, memory_limit + _FRESH_MEMORY
        self.order(
            {
                "device": self.device.partition(":")[0],
                "visible": "" if self.device == "cpu" else one_gpu(self.device),
                "needs": self.needs,
                "id": id,
                "script": str(pathlib.Path(script).resolve()),
                "model": str(model),
                "folder": str(self.folder / f"check-{self._count}"),
                "trainer": trainer,
                "kind": kind,
                "time_limit": time_limit,
                "memory_limit": memory_limit,
                "record": record,
            }
        )

    def longest(self, time_limit: float) -> float:
        """Return the seconds within which one of several checks with this limit must be answered."""
        return 2 * (time_limit if self.device == "cpu" else time_limit + _FRESH_SECONDS) + _GRACE

    def answer(self, limit: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            EnvironmentBroken: the server ended, or did not answer within `limit` seconds.
        """
        try:
            answer = self._answers.get(timeout=limit)
        except queue.Empty as error:
            raise EnvironmentBroken(f"the era's process did not answer within {limit:g} s") from error
        if answer is None:
            raise EnvironmentBroken(self._last_words())
        return answer

    def _last_words(self) -> str:
        self.process.wait()
        lines = (self.folder / "server.txt").read_text(errors="replace").strip().splitlines()
        said = lines[-1][:300] if lines else "nothing"
        return f"the era's process ended with status {self.process.returncode}; it said last: {said}"


@contextlib.contextmanager
def start(
    era_name: str, needs: list[str], jobs: int, import_limit: float = IMPORT_LIMIT, *, device: str = "cpu"
) -> Iterator[Server]:
    """Start an era's check server, and end it and all its checks when the block is left.

    Args:
        era_name: the era.
        needs: what is imported before the first check, as `module.Name`.
        jobs: how many checks run at once, each with one thread.
        import_limit: seconds for the imports.
        device: `cpu`, `cuda` or `cuda:N`, where the checks compute.

    Raises:
        EnvironmentBroken: the era is not ready, or its process did not start.
    """
    try:
        era = eras.find(era_name)
    except eras.EraError as error:
        raise EnvironmentBroken(str(error)) from error
    variables = eras.environment(era) | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # The server itself never touches a GPU: it forks. DeepSpeed up to 0.16, which trl imports, looks for a compiler for
    # CUDA when it is imported for GPUs; no lab that is checked on a GPU uses it.
    variables |= {VISIBLE: "", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory(prefix="failurelab-check-", ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        with open(folder / "server.txt", "wb") as log:
            process = subprocess.Popen(
                [str(era.python), "-m", "failurelab_course.labs.checker.server", str(jobs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=variables,
                cwd=folder,
                start_new_session=True,
            )
        try:
            server = Server(process, folder, needs, device)
            server.order({"imports": needs})
            server.broken = server.answer(import_limit)["broken"]
            yield server
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Close the server's orders, at which it ends its checks and itself; kill it if it does not."""
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
