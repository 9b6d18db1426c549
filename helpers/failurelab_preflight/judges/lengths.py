"""F11: prompts that do not fit. How long completions are, only the real model tells, in a whole run.

A prompt that is too long loses its beginning (the system's message, the chat template's first mark) without a word.
That depends on the data alone, so it is counted on the real dataset with the real tokenizer.

Upstream: TRL #5697, PR #5759, #6263, #6369.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from failurelab_preflight.finding import Finding, Verdict
from failurelab_preflight.judges.rows import generates, prompt_ids, prompt_limit, prompted
from failurelab_preflight.repairs import Arguments
from failurelab_preflight.training import Training

ROWS = 256
PROMPTS = 0.1  # share from which on it is told
_OF_THE_RUN = "the real model's log tells how many of its completions reach their limit (clipped_ratio)"


def judge_lengths(training: Training) -> Iterator[Finding]:
    """Tell the share of prompts that are longer than the limits of the trainer."""
    trainer = training.trainer
    if not generates(trainer):
        return
    rows = prompted(training, ROWS)
    if not rows:
        yield Finding.not_checked("F11", "the dataset has no column `prompt` that could be read")
        return
    answers = [*_prompts(training, rows), Finding.not_checked("F11", _OF_THE_RUN)]
    if any(answer.verdict is Verdict.FOUND for answer in answers):
        answers = [answer for answer in answers if answer.verdict is Verdict.FOUND]
    yield from answers


def _prompts(training: Training, rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    limit = prompt_limit(training)
    if not limit:
        return
    lengths = [len(ids) for ids in prompt_ids(training.trainer, [row["prompt"] for row in rows])]
    cut = sum(length > limit for length in lengths)
    evidence = (
        f"{cut} of {len(rows)} prompts are longer than max_prompt_length {limit} (median {median(lengths):g} tokens, "
        f"longest {max(lengths)})"
    )
    if cut > PROMPTS * len(rows):
        yield Finding(
            "F11",
            f"{evidence}: they lose their beginning",
            f"Set max_prompt_length={max(lengths)}, or leave out the longest prompts.",
            undo=Arguments({"max_prompt_length": max(lengths)}),
            part="max_prompt_length",
        )
    else:
        yield Finding.held(
            "F11", evidence, f"with a limit of 1, the number would be {sum(length > 1 for length in lengths)}"
        )
