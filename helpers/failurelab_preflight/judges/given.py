"""What transformers itself says of arguments and dataset as they were given: they are cut before it compares them."""

from collections.abc import Iterator, Mapping
from typing import Any

from failurelab_preflight.answer import Finding
from failurelab_preflight.judges.rows import generates, prompted
from failurelab_preflight.repairs import Arguments
from failurelab_preflight.rewards.forms import last_text
from failurelab_preflight.rewards.table import quote
from failurelab_preflight.training import Training

FAILURE = "given"
_ROWS = 256  # whose prompts are read


def judge_refused(said: str, undo: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what transformers says of training arguments that it refuses as they were given, if it does.

    Args:
        said: by transformers, which has compared the arguments that are cut here; empty if nothing.
        undo: the argument without which it takes them, and the value that says so.
    """
    if said:
        without = " and ".join(f"{name}={value!r}" for name, value in undo.items())
        repair = f"Set {without}, or the others as it asks for." if without else "Set them as it asks for."
        evidence = f"transformers refuses these training arguments: {said}"
        tried = f"with {without} it takes them" if without else ""
        yield Finding(
            FAILURE, evidence, repair, Arguments(dict(undo)) if undo else None, tried, ends=True, part="arguments"
        )


def judge_dataset(training: Training) -> Iterator[Finding]:
    """Tell a dataset without a length and a run without a number of steps; note rows that all have one prompt."""
    if not generates(training.trainer):
        return
    prompts = [row["prompt"] for row in prompted(training, _ROWS)]
    if len({repr(prompt) for prompt in prompts}) == 1:
        training.notes.append(f"all {len(prompts)} rows that were read have one prompt, {quote(last_text(prompts[0]))}")
    endless = training.dataset is not None and not hasattr(training.dataset, "__len__")
    if endless and (training.arguments.get("max_steps") or -1) <= 0:
        kind = type(training.dataset).__name__
        said = f"train_dataset is of the class {kind}, which has no length, and max_steps is not set"
        repair = "Set max_steps to the optimizer steps that you want."
        tried = f"with max_steps={training.trainer.args.max_steps}, of the cut, it trains"
        evidence = f"{said}: transformers refuses it"
        yield Finding(FAILURE, evidence, repair, tried=tried, ends=True, part="max_steps")
