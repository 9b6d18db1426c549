"""A real DeepSpeed engine on any machine: one process, a CPU, and no trace left; or what is in the way, said plainly.

DeepSpeed wants what a launcher sets up: five environment variables, a free port, a config that fits. Where one is wrong
it waits forever, or fails far from the cause. `one_process` sets these up for a
notebook or a script that nobody launched, and `ready` does so only where no launcher has, so that one script runs
alone, under `accelerate launch`, and on several nodes.

    with deepspeed.one_process(stage=3) as config:
        trainer = GRPOTrainer(..., args=GRPOConfig(..., deepspeed=config))
        trainer.train()

A config is a DeepSpeed config: https://www.deepspeed.ai/docs/config-json/

On a CPU DeepSpeed builds an operation in C++ when an engine first starts, for a minute. Training does not call it, and
`without_operations` lets DeepSpeed do without: no compiler is needed.
"""

import atexit
import collections
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from packaging.version import Version

STAGES = (0, 1, 2, 3)
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What DeepSpeed prints whatever its logger's level is, and is no news of the run. A trace is invalid after each
# generation, by design: https://github.com/deepspeedai/DeepSpeed/discussions/4081
_CHATTER = re.compile(r"Parameter Offload: |Invalidate trace cache @ ")


class EngineError(RuntimeError):
    """A DeepSpeed engine cannot be made here; the message says what was found, why it matters and the next step."""


def config(stage: int = 3, **options: Any) -> dict[str, Any]:
    """Return a DeepSpeed config that transformers fills in ("auto"), for a small model on any device.

    Args:
        stage: of ZeRO, 0 to 3; see `check_config`.
        options: further entries of the config, at its top level.
    """
    settings: dict[str, Any] = {
        "zero_optimization": {"stage": stage},
        # torch's own AdamW: DeepSpeed's CPU optimizer would be compiled first, and rounds otherwise
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
    }
    if stage == 3:
        # 0: partition every parameter. The default keeps those of up to 100,000 elements whole: all of a small model's.
        settings["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    check_config(settings)
    return settings | options


def check_config(source: Mapping[str, Any] | str | pathlib.Path) -> int:
    """Return the ZeRO stage of a DeepSpeed config, or of the config in a JSON file.

    Raises:
        EngineError: no such file, no JSON, no `zero_optimization`, or a stage that does not exist.
    """
    name = "the config"
    if not isinstance(source, Mapping):
        name = str(source)
        try:
            source = json.loads(pathlib.Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise EngineError(
                f"DeepSpeed's config {name} cannot be read: {error.strerror}. Next: check its path."
            ) from error
        except ValueError as error:
            raise EngineError(f"DeepSpeed's config {name} is no JSON ({error}). Next: correct that line.") from error
    zero = source.get("zero_optimization") if isinstance(source, Mapping) else None
    if not isinstance(zero, Mapping) or "stage" not in zero:
        raise EngineError(
            f"{name} has no zero_optimization.stage, so DeepSpeed would run at stage 0 and partition nothing. "
            'Next: write "zero_optimization": {"stage": 3}.'
        )
    stage = zero["stage"]
    if isinstance(stage, bool) or stage not in STAGES:
        raise EngineError(
            f"{name} asks for ZeRO stage {stage!r}, and there are 0 (nothing partitioned), 1 (the optimizer's state), "
            "2 (gradients too) and 3 (parameters too). Next: give one of these, as a number."
        )
    return stage


def check() -> None:
    """Raise EngineError where DeepSpeed is not installed, before an engine is made."""
    if importlib.util.find_spec("deepspeed") is None:
        raise EngineError(
            f"DeepSpeed is not installed in {sys.prefix}: ZeRO cannot run here. Next: pip install deepspeed, or use an "
            "era that has it (trl-0.14, trl-0.15, today)."
        )


class _Sieve:
    """A stream that lets all lines through but DeepSpeed's chatter; for the rest the stream below it."""

    def __init__(self, stream: Any):
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        """Pass on whole lines as they come."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if not _CHATTER.match(line):
                self._stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Pass on what is there of a line, unless it may become chatter."""
        if self._line and not _CHATTER.match(self._line):
            self._stream.write(self._line)
            self._line = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def launched() -> bool:
    """Whether a launcher (torchrun, accelerate launch, deepspeed) has set this process up.

    Raises:
        EngineError: some of its variables are set and others are not: by a scheduler, an export, an old shell.
    """
    present = [name for name in LAUNCHED if os.environ.get(name)]
    if not present or present == ["MASTER_PORT"]:
        return False
    missing = [name for name in LAUNCHED if name not in present]
    if missing:
        given = ", ".join(f"{name}={os.environ[name]}" for name in present)
        raise EngineError(
            f"{given} set by someone else, and {', '.join(missing)} not: DeepSpeed would wait for processes that "
            "nobody starts. Next: unset what is set, or start this script with accelerate launch or torchrun, which "
            "set all five."
        )
    return True


@contextlib.contextmanager
def one_process(stage: int = 3, **options: Any) -> Iterator[dict[str, Any]]:
    """Let a DeepSpeed engine run in this process alone; yield a config for `TrainingArguments(deepspeed=...)`.

    Sets what a launcher would set, on a free port, and takes it back at the end, with accelerate's and transformers'
    memory of DeepSpeed; so blocks may follow each other, with other stages, and a trainer without DeepSpeed after them.
    The process group and its port (MASTER_PORT's, else a free one) stay until the process ends: DeepSpeed makes them
    once.

    Raises:
        EngineError: whatever `check`, `check_config` and `launched` find; or this process is one of several.
    """
    settings = config(stage, **options)
    if launched() and os.environ["WORLD_SIZE"] != "1":
        raise EngineError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set: this process would wait for the others of that group. "
            f"Next: unset {', '.join(LAUNCHED)} to run alone; or deepspeed.ready() in a script for launchers."
        )
    with _alone(), contextlib.redirect_stdout(_Sieve(sys.stdout)), without_operations(), each_gather_finished():
        yield settings


@contextlib.contextmanager
def ready() -> Iterator[None]:
    """Let a script use DeepSpeed as it was started: under a launcher as that says, else in one process.

    The script then runs without a changed line alone, with `accelerate launch` or torchrun, and on several nodes.

    Raises:
        EngineError: as for `one_process`.
    """
    if launched():
        check()
        os.environ.update(_surroundings())
        alone = contextlib.nullcontext()
    else:
        alone = _alone()
    with alone:
        try:
            with without_operations(), each_gather_finished():
                yield
        finally:  # so that no process of a group waits for one that is gone
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def end_without_teardown() -> None:
    """Let this process end where its script ends: gloo's threads may still need Python, and it is then torn down.

    Under DeepSpeed the same six threads are there before `destroy_process_group` and after it. A thread that calls
    Python during the teardown ends the process in SIGABRT, after its work; of about 260 starts of two processes on a
    CPU, one ended so. The exit status is 1 after an exception, else 0: one that is given to `sys.exit` is lost.
    """

    def end() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(hasattr(sys, "last_value")))  # Python sets it when it has printed a traceback

    atexit.register(end)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Set what a launcher would set, and make accelerate and transformers forget DeepSpeed before and after."""
    check()
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    if not torch.distributed.is_initialized():
        # 0: torch listens on any free one, so no other process can take it
        variables["MASTER_PORT"] = os.environ.get("MASTER_PORT") or "0"
    with mock.patch.dict(os.environ, variables | _surroundings()):  # with accelerate's own, all put back at the end
        _forget()
        try:
            yield
        finally:
            _forget()


@contextlib.contextmanager
def without_operations() -> Iterator[None]:
    """Let DeepSpeed do without what it compiles, on a CPU: no operation counts as compatible while the block runs.

    `deepspeed.ops.__compatible_ops__` is replaced, which DeepSpeed itself asks. On a CPU an engine would build
    `shm_comm` when it starts, which needs a compiler and a minute. `inference_all_reduce` alone uses that, and no
    training calls it.
    """
    from deepspeed import ops
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        yield
        return
    with mock.patch.dict(vars(ops), __compatible_ops__=collections.defaultdict(bool)):
        yield


@contextlib.contextmanager
def each_gather_finished() -> Iterator[None]:
    """Let DeepSpeed wait for each gathering of parameters, on a CPU: the releases up to 0.19 wait for the last only.

    That is enough over NCCL, which does one after the other. Over gloo, which a CPU uses, an earlier one may still be
    under way, and a process reads memory that nobody has written yet: 3 of 24 starts of two processes ended in
    NaN. `deepspeed.comm.all_gather_into_tensor` is replaced while the block runs. DeepSpeed 0.19.8 waits for each.

    Upstream: https://github.com/deepspeedai/DeepSpeed/pull/8539
    """
    import deepspeed
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    gather = comm.all_gather_into_tensor

    def finished(*tensors: Any, **options: Any) -> Any:
        handle = gather(*tensors, **options)
        if handle is not None:
            handle.wait()
        return handle

    if get_accelerator().device_name() != "cpu" or Version(deepspeed.__version__) >= Version("0.19.8"):
        yield
        return
    with mock.patch.object(comm, "all_gather_into_tensor", finished):
        yield


def _surroundings() -> dict[str, str]:
    """Return what DeepSpeed should know of this machine: that there is no GPU."""
    return {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}


def _forget() -> None:
    """Make accelerate and transformers forget DeepSpeed: both keep its config for the whole process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if "transformers.integrations.deepspeed" in sys.modules:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
