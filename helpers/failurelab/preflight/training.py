"""What a judge is asked about: a script's training, the models that it loads, and the script."""

import ast
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from failurelab.preflight.script_text import holds_line, location
from failurelab.rewards.table import RewardTable


def score_head(model: Any) -> tuple[int, int] | None:
    """Return which tensor a model's head for scores is, and how often it was written to; None where it has none."""
    weight = getattr(getattr(model, "score", None), "weight", None)
    return None if weight is None else (id(weight), weight._version)


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
        head: which tensor its head for scores was then, and how often that was written to; see `score_head`.
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
    head: tuple[int, int] | None = None

    def came(self, model: Any) -> None:
        """Note the model that came of it."""
        self.model, self.head = weakref.ref(model), score_head(model)


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


@dataclasses.dataclass(frozen=True)
class StateLoad:
    """One `load_state_dict(strict=False)` of the script's own code.

    Attributes:
        model: a weak reference to what took the weights.
        names: of the tensors that were given.
        own: of the model's own tensors.
        place: of the call.
    """

    model: Any
    names: tuple[str, ...]
    own: tuple[str, ...]
    place: Any = None

    @property
    def taken(self) -> list[str]:
        """The names that the model has."""
        own = set(self.own)
        return [name for name in self.names if name in own]


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
        log: the trainer's log history, empty before training.
        world_size: of the launch.
        small: whether the model was cut.
        keywords: the arguments that the script gave the trainer, by name. `trainer.eval_dataset` is cut; the whole one
            is here.
        device: the GPU that the last rank trains on, by the number that it has there: 0 where a scheduler shows each
            process one. None is as many as there are other ranks.
        zero_stage: of DeepSpeed, from the launch or the training arguments; 0 without.
        deepspeed: its configuration as accelerate's launch hands it on, see `launcher_options`; else empty.
        source: the script, for repairs that are a diff of its lines.
        reward_inputs: what the trainer handed to a reward function at its first call, by name; None where it never did.
        handed: what each reward function was handed at its first call, by its place.
        called: the places of the reward functions that the trainer has called in the cut training.
        not_called: reward functions, by their id, that do not return, or cannot be asked here.
        rewards: what the reward functions pay for made-up completions; None where they were not asked.
        best: the shortest of the made-up completions that get the largest reward; empty where none is known.
        reference: the column whose text alone, as a completion, the reward functions pay; empty where none is known.
        real: whether the real weights were asked for.
        resume: what `train()` was given as the checkpoint to go on from.
        calls_evaluate: whether the script has called `evaluate()` before its training.
        model_defaults: options of sampling that the first generation took from the model's generation config, by name:
            the value, and the one that it would have without.
        ended: whether completions of one length, as the model drew them, were ended by `judges.textbook`, so that the
            log does not tell how many reach the limit.
        evaluated: while an evaluation set is evaluated: what each reward function is handed, by its place; else None.
        evaluations: of each evaluation set by name, as `stage.evaluation` made it.
        trains_evaluated: whether the same evaluation of rows of the training set ended well.
        not_evaluated: why no batch was evaluated.
        explained: the step whose gradient an earlier run of this script found wrong, and what explains it, as
            `judges.textbook` wrote it; empty where there is none.
        own: whether a file of code is the script's own, by its path.
        trained_elsewhere: models, by their id, that other trainers of the script were made for.
        states: weights that the script has put into models by their names.
        too_late: arguments that the script set when the trainer had read them; what it has kept, by name.
        notes: what judges have to tell beside their findings.
    """

    trainer: Any
    arguments: dict[str, Any]
    dataset: Any = None
    loads: list[Load] = dataclasses.field(default_factory=list)
    adapters: list[TrainedAdapter] = dataclasses.field(default_factory=list)
    finished: bool = False
    log: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    world_size: int = 1
    small: bool = True
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: int | None = None
    zero_stage: int = 0
    deepspeed: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: "Source | None" = None
    ended: bool = False
    reward_inputs: dict[str, Any] | None = None
    handed: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    called: set[int] = dataclasses.field(default_factory=set)
    not_called: set[int] = dataclasses.field(default_factory=set)
    rewards: RewardTable | None = None
    best: str = ""
    reference: str = ""
    real: bool = False
    resume: Any = None
    calls_evaluate: bool = False
    model_defaults: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    evaluated: dict[int, dict[str, Any]] | None = None
    evaluations: dict[str, Any] = dataclasses.field(default_factory=dict)
    trains_evaluated: bool = False
    not_evaluated: str = ""
    explained: dict[str, Any] = dataclasses.field(default_factory=dict)
    own: Callable[[str], bool] = lambda file: False
    trained_elsewhere: set[int] = dataclasses.field(default_factory=set)
    states: list[StateLoad] = dataclasses.field(default_factory=list)
    too_late: dict[str, Any] = dataclasses.field(default_factory=dict)
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

    def is_either(self, line: int, other: int) -> bool:
        """Return whether one of two lines alone is run.

        They stand in two branches of an `if`, of a `try` and what catches its errors, or behind one that leaves.
        """
        first, second = sorted((line, other))
        for node in ast.walk(ast.parse(self.text)):
            for block in _branches(node):  # of which one alone is run
                inside = [{place for place, body in enumerate(block) if _holds(body, at)} for at in (first, second)]
                if all(inside) and inside[0] != inside[1]:
                    return True
            for name in ("body", "orelse", "finalbody"):
                statements = value if isinstance(value := getattr(node, name, None), list) else []
                for place, statement in enumerate(statements):
                    left = isinstance(statement, ast.If) and _leaves(statement.body) and _holds(statement.body, first)
                    if left and _holds(statements[place + 1 :], second):
                        return True
        return False

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


def _branches(node: ast.AST) -> list[list[Any]]:
    """Return groups of branches of a statement, each a list of statements, of which one alone is run."""
    if isinstance(node, ast.If):
        return [[node.body, node.orelse]]
    if isinstance(node, ast.Try):
        return [[node.body, [caught]] for caught in node.handlers]
    return [[case.body for case in node.cases]] if isinstance(node, ast.Match) else []


def _holds(statements: Any, line: int) -> bool:
    return bool(statements) and holds_line(statements[0], statements[-1], line)


def _leaves(statements: list[ast.stmt]) -> bool:
    """Return whether what stands behind these statements is not run after them."""
    last = statements[-1]
    ends = isinstance(last, ast.Expr) and ast.unparse(last.value).startswith(("sys.exit(", "exit(", "quit("))
    return ends or isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))
