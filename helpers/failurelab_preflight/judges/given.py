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
    """Note rows that all have one prompt."""
    prompts = [row["prompt"] for row in prompted(training, _ROWS)] if generates(training.trainer) else []
    if len({repr(prompt) for prompt in prompts}) == 1:
        training.notes.append(f"all {len(prompts)} rows that were read have one prompt, {quote(last_text(prompts[0]))}")
    yield from ()
