"""The kind `ranks`: a trainer in two real processes, by gloo, whose optimizer steps are held against the textbook.

As the kind `trainer`, in a launch such as `torchrun --nproc_per_node 2 train.py` makes. The check itself is rank 0, and
figures are rank 0's. Rank 1 is forked: it imports the script anew, builds its trainer and trains beside rank 0. In
addition three steps of both are compared with GRPO's definition, as the kind `step` does it.
"""

import contextlib
import os
import signal
import traceback
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

from failurelab import textbook
from failurelab._meeting import free_port
from failurelab_course.labs.checker.base import CheckRun, import_script
from failurelab_course.labs.checker.kinds import trainer as trainer_kind
from failurelab_course.labs.checker.kinds.step import compared, other_options, steps_of


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Train the script's trainer in two processes, and fill in `run.metrics`."""
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with free_port() as port, mock.patch.dict(os.environ, launch | {"MASTER_PORT": str(port)}), _beside(script, run):
        fresh = import_script(script.__file__)  # a script may ask for its rank as it is imported
        trainer_kind.measure(fresh, run, _compared)


@contextlib.contextmanager
def _compared(trainer: Any, run: CheckRun) -> Iterator[None]:
    run.metrics["other_options"] = other_options(trainer.args)
    with compared(trainer, run.metrics, "ranks"):
        yield


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
    with textbook.compare(trainer, steps_of(trainer), with_suspects=False):
        trainer.train()
