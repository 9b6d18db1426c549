"""F14 of a trainer with a loop of its own: a completion is rewarded beside the columns of another prompt's row.

The loop repeats prompts and columns by itself, and may do so in two orders: P1 P2 .. P1 P2 .. for what it draws, and
P1 P1 .. P2 P2 .. for the answers. The prompts that were drawn behind tell which row of the dataset a completion is of.

Upstream: R1-V #67.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.judges.rows import tokenizer_of
from failurelab.textbook.recorder import RewardCalls
from failurelab.textbook.rows import Row

ONE_ORDER = (
    "Repeat prompts, columns and completions in one order, and group them in it: prompt 1 for all of its completions, "
    "then prompt 2 (repeat_interleave, and torch.stack(completions, 1).flatten(0, 1) behind a loop of generations)."
)
_MOST = 1024  # rows of a dataset; the cut training has fewer


def judge_pairs(trainer: Any, rows: Sequence[Row], asked: RewardCalls, where: str) -> Finding | None:
    """F14: columns of other rows; None where all of them are those of the completion's own prompt, or it is not known.

    Args:
        trainer: of the script.
        rows: completions in the order in which rewards were asked for, with the prompts that they were drawn behind.
        asked: what the reward functions were called with.
        where: what the script overrides, in words.
    """
    dataset: Any = getattr(trainer, "train_dataset", None)
    names = [name for name in getattr(dataset, "column_names", None) or () if isinstance(name, str)]
    if "prompt" not in names or not hasattr(dataset, "__len__") or len(dataset) > _MOST:
        return None
    known = [dataset[place] for place in range(len(dataset))]
    decode = tokenizer_of(trainer).decode
    own = {prompt: _rows_of(decode(list(prompt)), known) for prompt in dict.fromkeys(row.prompt for row in rows)}
    for name in names:
        given = asked.given("prompts" if name == "prompt" else name)
        if len(given) != len(rows) or isinstance(given, str):
            continue
        values = {prompt: {repr(row[name]) for row in found} for prompt, found in own.items()}
        every = set().union(*values.values())
        told = list(zip(rows, map(repr, given)))
        wrong = [(row, value) for row, value in told if values[row.prompt] and value in every - values[row.prompt]]
        if wrong:
            row, value = wrong[0]
            said = (
                f"{len(wrong)} of {len(rows)} completions are rewarded with column {name} of another prompt's row, "
                f"such as {decode(list(row.completion), skip_special_tokens=True)[:40]!r}, drawn behind "
                f"{decode(list(row.prompt))[-40:]!r}, with {value[:40]}: the completions stand in another order than "
                f"the columns.{where}"
            )
            figures = (Quantity("completions with another row's columns", len(wrong), "", len(rows)),)
            return Finding("F14", said, ONE_ORDER, fault="pairs", figures=figures, own=True)
    return None


def _rows_of(text: str, known: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows whose prompt a text holds; those with the longest one, for "1+1=" stands in "11+1=" too."""
    text = "".join(text.split())
    held = [(len(words), row) for row in known if (words := _words(row["prompt"])) and words in text]
    longest = max((size for size, _ in held), default=0)
    return [row for size, row in held if size == longest]


def _words(prompt: Any) -> str:
    """Return a prompt's text, or that of its last message, without blanks."""
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return "".join(prompt.split()) if isinstance(prompt, str) else ""
