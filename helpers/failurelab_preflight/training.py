"""What a judge is asked about: a script's training, the models that it loads, and the script."""

import ast
import dataclasses
from collections.abc import Callable
from typing import Any

from failurelab.textbook.rows import Ids
from failurelab_preflight.reward_table import RewardTable
from failurelab_preflight.script_text import location


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
        model: a weak reference to the model that came of it.
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
    model: Any = None


@dataclasses.dataclass(frozen=True)
class TrainedAdapter:
    """A trained adapter of the script's, and the logits that the model gives with it and without it.

    Attributes:
        name: of the adapter, for messages.
        logits: of eight tokens, `(1, 8, vocabulary)`, see `stage.models.probe`.
        base: the same without the adapter.
        trainable: whether it was loaded to be trained.
    """

    name: str
    logits: Any
    base: Any
    trainable: bool = True


@dataclasses.dataclass
class Training:
    """The training that is judged: its trainer and what the script gave it, and what came of it. Judges change none.

    Attributes:
        trainer: the script's trainer, built with the cut model. Its reward functions and tokenizer are real.
        dataset: the training dataset as the script gave it to the trainer: whole, and before the trainer tokenized it.
        arguments: the training arguments as the script gave them, before they were cut, by name.
        loads: of models, in order.
        adapters: trained ones, in order.
        finished: whether the cut training came to its end.
        world_size: of the launch.
        small: whether the model was cut.
        keywords: the arguments that the script gave the trainer, by name. `trainer.eval_dataset` is cut; the whole one
            is here.
        device: the GPU that the last rank trains on, by the number that it has there: 0 where a scheduler shows each
            process one. None is as many as there are other ranks.
        zero_stage: of DeepSpeed, from the launch or the training arguments; 0 without.
        lacks: the path of DeepSpeed's configuration where that file is not there, so that no stage is known; else "".
        source: the script, for repairs that are a diff of its lines.
        reward_inputs: what the trainer handed to a reward function at its first call, by name; None where it never did.
        drawn: the completions of each prompt that the trainer's model drew in one call, as ids.
        called: the places of the reward functions that the trainer has called in the cut training.
        rewards: what the reward functions pay for made-up completions; None where they were not asked.
        model_defaults: options of sampling that the first generation took from the model's generation config, by name:
            the value, and the one that it would have without.
        flat: whether the trainer gets equal rewards in this step, so that a penalty alone has a gradient.
        moved: whether a judge has moved the policy for this step, and puts it back at its end.
        asks_for_gpus: whether the script's own code has asked for GPUs, and was told that there are none.
        own: whether a file of code is the script's own, by its path.
        notes: what judges have to tell beside their findings.
    """

    trainer: Any
    arguments: dict[str, Any]
    dataset: Any = None
    loads: list[Load] = dataclasses.field(default_factory=list)
    adapters: list[TrainedAdapter] = dataclasses.field(default_factory=list)
    finished: bool = False
    world_size: int = 1
    small: bool = True
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: int | None = None
    zero_stage: int = 0
    lacks: str = ""
    source: "Source | None" = None
    reward_inputs: dict[str, Any] | None = None
    drawn: list[list[Ids]] = dataclasses.field(default_factory=list)
    called: set[int] = dataclasses.field(default_factory=set)
    rewards: RewardTable | None = None
    model_defaults: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    flat: bool = False
    moved: bool = False
    asks_for_gpus: bool = False
    own: Callable[[str], bool] = lambda file: False
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def model_name(self) -> str:
        """What figures of the model are figures of."""
        return "the cut model" if self.small else "the model"


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

    def at(self, line: int) -> str:
        """Return a line in words: of a notebook the cell, and the line in it."""
        return location(self.path, line, self.text).within

    def training_lines(self) -> list[int]:
        """Return the lines of the script that call `train()` of what is called a trainer, as a frame tells them."""
        called = (
            node.func
            for node in ast.walk(ast.parse(self.text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "train"
        )
        return sorted(
            trainer.end_lineno or trainer.lineno
            for trainer in called
            if "trainer" in ast.unparse(trainer.value).lower()
        )
