"""A real DeepSpeed engine on any machine: one process, a CPU, and no trace left; or what is in the way, said plainly.

DeepSpeed wants what a launcher sets up: five environment variables, a free port, a compiled operation for the CPU, a
config that fits. Where one is wrong it waits forever, or fails far from the cause. `one_process` sets these up for a
notebook or a script that nobody launched, and `ready` does so only where no launcher has, so that one script runs
alone, under `accelerate launch`, and on several nodes.

    with engines.one_process(stage=3) as config:
        trainer = GRPOTrainer(..., args=GRPOConfig(..., deepspeed=config))
        trainer.train()

A config is a DeepSpeed config: https://www.deepspeed.ai/docs/config-json/
"""

import contextlib
import errno
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from failurelab_course.experiments.deepspeed_build import EngineError, check_operation, extensions, load_operation

STAGES = (0, 1, 2, 3)
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What DeepSpeed prints whatever its logger's level is, and is no news of the run. A trace is invalid after each
# generation, by design: https://github.com/deepspeedai/DeepSpeed/discussions/4081
_CHATTER = re.compile(r"DeepSpeed deepspeed\.ops|Parameter Offload: |Invalidate trace cache @ ")


def config(stage: int = 3, **options: Any) -> dict[str, Any]:
    """Return a DeepSpeed config that transformers fills in ("auto"), for a small model on any device.

    Args:
        stage: of ZeRO. 1 partitions the optimizer's state, 2 the gradients too, 3 the parameters too.
        options: further entries of the config, at its top level.

    Raises:
        EngineError: the stage is none of 0 to 3.
    """
    made: dict[str, Any] = {
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
        made["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    check_config(made)
    return made | options


def check_config(source: Mapping[str, Any] | str | pathlib.Path) -> int:
    """Return the ZeRO stage of a DeepSpeed config.

    Args:
        source: the config, or the path of its JSON file.

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
    """Find what would keep a DeepSpeed engine from being made in this process, before it is tried.

    A lock that a killed build has left is removed: every later process would wait for it without end or a word.

    Raises:
        EngineError: DeepSpeed is not installed, or its operation is not built and no compiler or ninja is there.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise EngineError(
            f"DeepSpeed is not installed in {sys.prefix}: ZeRO cannot run here. Next: pip install deepspeed, or use an "
            "era that has it (trl-0.14, trl-0.15, today)."
        )
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        check_operation()


class _Sieve(io.TextIOBase):
    """A stream that lets all lines through but DeepSpeed's chatter."""

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

    def fileno(self) -> int:
        """Return the descriptor below, for processes that are started meanwhile."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return what the stream below says."""
        return self._stream.isatty()


def launched() -> bool:
    """Whether a launcher (torchrun, accelerate launch, deepspeed) has set this process up.

    Raises:
        EngineError: some of its variables are set and others are not: by a scheduler, an export, an old shell.
    """
    found = [name for name in LAUNCHED if os.environ.get(name)]
    if not found or found == ["MASTER_PORT"]:
        return False
    missing = [name for name in LAUNCHED if name not in found]
    if missing:
        given = ", ".join(f"{name}={os.environ[name]}" for name in found)
        raise EngineError(
            f"{given} set by someone else, and {', '.join(missing)} not: DeepSpeed would wait for processes that "
            "nobody starts. Next: unset what is set, or start this script with accelerate launch or torchrun, which "
            "set all five."
        )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ[name].isdigit():
            raise EngineError(f"{name}={os.environ[name]!r} is no number. Next: unset it, or use a launcher.")
    return True


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def check_port(port: int) -> None:
    """Find a port that is taken, which processes would else wait on.

    Raises:
        EngineError: another process listens on it.
    """
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: one that was just left is free
        try:
            asked.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise EngineError(
                f"port {port} is taken by another process, so this run's processes cannot meet there. Next: leave "
                "MASTER_PORT unset and a free one is chosen, or with a launcher give --main_process_port "
                "(accelerate) or --master_port (torchrun)."
            ) from error


@contextlib.contextmanager
def one_process(stage: int = 3, *, port: int | None = None, **options: Any) -> Iterator[dict[str, Any]]:
    """Let a DeepSpeed engine run in this process alone; yield a config for `TrainingArguments(deepspeed=...)`.

    Sets what a launcher would set, on a free port, and takes it back at the end, with accelerate's and transformers'
    memory of DeepSpeed; so blocks may follow each other, with other stages, and a trainer without DeepSpeed after them.
    The process group and its port stay until the process ends: DeepSpeed makes them once.

    Args:
        stage: of ZeRO, 0 to 3.
        port: to listen on; by default MASTER_PORT, else a free one.
        options: further entries of the config.

    Raises:
        EngineError: whatever `check`, `check_config`, `check_port` and `launched` find; or this process was started as
            one of several.
    """
    made = config(stage, **options)
    if launched() and os.environ["WORLD_SIZE"] != "1":
        raise EngineError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set: this process would wait for the others of that group. "
            f"Next: unset {', '.join(LAUNCHED)} to run alone; or engines.ready() in a script for launchers."
        )
    with _variables(port), _memory(), contextlib.redirect_stdout(_Sieve(sys.stdout)):
        load_operation()
        yield made


@contextlib.contextmanager
def ready() -> Iterator[None]:
    """Let a script use DeepSpeed as it was started: under a launcher as that says, else in one process.

    The script then runs without a changed line alone, with `accelerate launch` or torchrun, and on several nodes.

    Raises:
        EngineError: as for `one_process`; under a launcher, of the port only what the launcher itself says.
    """
    if launched():
        os.environ.update(_surroundings())
        check()
        with _group():
            load_operation()
            yield
    else:
        with _variables(None), _memory(), _group():
            load_operation()
            yield


@contextlib.contextmanager
def _variables(port: int | None) -> Iterator[None]:
    check()
    if not torch.distributed.is_initialized():
        named = os.environ.get("MASTER_PORT", "")
        if port is None and named and not named.isdigit():
            raise EngineError(f"MASTER_PORT={named!r} is no number. Next: unset it, and a free port is chosen.")
        port = port or (int(named) if named else free_port())
        check_port(port)
    wanted = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    if port:
        wanted["MASTER_PORT"] = str(port)
    wanted |= _surroundings()
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name in wanted or name.startswith("ACCELERATE_")]:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _surroundings() -> dict[str, str]:
    """Return what DeepSpeed should know of this machine: no GPU, and where its operation was built at set-up."""
    found = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    if "TORCH_EXTENSIONS_DIR" in os.environ or (pathlib.Path(sys.prefix) / "torch_extensions").is_dir():
        found["TORCH_EXTENSIONS_DIR"] = str(extensions())
    return found


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Make accelerate and transformers forget DeepSpeed at the end: both keep its config for the whole process."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if "transformers.integrations.deepspeed" in sys.modules:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """Leave the process group at the end, so that no process of a group waits for one that is gone."""
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def version() -> str:
    """Return DeepSpeed's version, or an empty text where it is not installed (asked without importing it)."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return ""
