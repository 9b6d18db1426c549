"""What preflight answers with: findings, what held, what could not be checked; and what a judge is given to see."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """A failure that the script has.

    Attributes:
        failure: its id in the registry, or `batch` for batch arithmetic that trl refuses.
        evidence: what was measured, with its figure and the scale that makes it large.
        repair: what to change: the next step in one sentence, or a unified diff of the script's own lines.
        notebook: the notebook that tells the story, `09_rounded_away`; None where there is none.
    """

    failure: str
    evidence: str
    repair: str
    notebook: str | None = None


@dataclasses.dataclass(frozen=True)
class Held:
    """A failure that was looked for, and is not there; `evidence` holds the figure."""

    failure: str
    evidence: str


@dataclasses.dataclass(frozen=True)
class NotChecked:
    """A failure that could not be looked for, and why: what a small random model cannot tell is never a PASS."""

    failure: str
    why: str


Answer = Finding | Held | NotChecked


@dataclasses.dataclass
class Load:
    """One call of `from_pretrained` by the script.

    Attributes:
        name: of the checkpoint, as the script gave it.
        options: the call's keyword arguments (`dtype`, `device_map`, `quantization_config` …).
        config: the configuration at full size, before anything was cut.
        by_trainer: whether the trainer loaded it from a name, not the script.
        dtype: of the weights that this call really gives, such as `bfloat16`; the cut model is float32.
        bits: 4 or 8 where the load quantizes, else 0. The cut model is never quantized.
        device_map: as the last rank of the launch gives it.
        early: whether no process knew its device yet: `torch.cuda.current_device()` is 0 in each of them then.
        small: whether the model was cut.
    """

    name: str
    options: dict[str, Any]
    config: Any
    by_trainer: bool
    dtype: str = "float32"
    bits: int = 0
    device_map: Any = None
    early: bool = False
    small: bool = True


@dataclasses.dataclass
class Seen:
    """What preflight has seen of a script when the judges are asked; they change none of it.

    Attributes:
        trainer: the script's trainer, built with the cut model. Its reward functions and tokenizer are real.
        dataset: the training dataset as the script gave it to the trainer: whole, and before the trainer tokenized it.
        asked: the training arguments as the script gave them, before they were cut, by name.
        loads: of models, in order.
        log: the trainer's log history, empty before training.
        world_size: of the launch.
        memory: bytes of one device that the peak at full size is held against, if asked for.
        small: whether the model was cut.
        given: the arguments that the script gave the trainer, by name.
        gpus: that one process sees; None where this machine cannot tell.
        zero_stage: of DeepSpeed, from the launch or the training arguments; 0 without.
        evaluated: whether evaluate() was called before train().
        source: the script, for repairs that are a diff of its lines.
    """

    trainer: Any
    asked: dict[str, Any]
    dataset: Any = None
    loads: list[Load] = dataclasses.field(default_factory=list)
    log: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    world_size: int = 1
    memory: float | None = None
    small: bool = True
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpus: int | None = None
    zero_stage: int = 0
    evaluated: bool = False
    source: "Source | None" = None


@dataclasses.dataclass(frozen=True)
class Source:
    """The script, for repairs that are a diff of its own lines.

    Attributes:
        path: as it was given.
        text: of the file.
        line: of the call that began training; 0 if that call is not in the script's own file.
    """

    path: str
    text: str
    line: int = 0


Judge = Callable[[Seen], Iterator[Answer]]
