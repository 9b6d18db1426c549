"""The kind `ranks`: a trainer in two real processes, by gloo, whose optimizer steps are held against the textbook.

As the kind `step`, of a launch such as `torchrun --nproc_per_node 2 train.py` makes. The check itself is rank 0, and
figures are rank 0's. Rank 1 is forked: it imports the script anew, builds its trainer and trains beside rank 0.
"""

import contextlib
import os
import signal
import socket
import traceback
import types
from collections.abc import Iterator
from unittest import mock

from failurelab import textbook
from failurelab_course.labs.checker.base import CheckRun, import_script
from failurelab_course.labs.checker.kinds import step
from failurelab_course.labs.checker.kinds import trainer as trainer_kind


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Train the script's trainer in two processes, and fill in `run.metrics`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, launch | {"RANK": "0", "LOCAL_RANK": "0"}), _beside(script, run):
        step.measure(import_script(script.__file__), run)  # anew, for a script may ask for its rank as it is imported


@contextlib.contextmanager
def _beside(script: types.ModuleType, run: CheckRun) -> Iterator[None]:
    """Within the block rank 1 runs; it is ended with the block."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.environ |= {"RANK": "1", "LOCAL_RANK": "1"}
            _train(import_script(script.__file__), run)
            status = 0
        except BaseException:  # in the check's output, beside what rank 0 says of it
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _train(script: types.ModuleType, run: CheckRun) -> None:
    trainer = trainer_kind.build_trainer(script, run)
    if run.stop_after:
        trainer.add_callback(trainer_kind.Stop(run.stop_after))
    with textbook.compare(trainer, step.STEPS, with_suspects=False):
        trainer.train()
