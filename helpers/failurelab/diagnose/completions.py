"""Logged completions: trl's `completions/*.parquet`, JSON lines or CSV, and what is seen in them."""

import contextlib
import csv
import itertools
import json
import math
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

LIMIT = 20_000  # rows that are looked at
_MARKS = re.compile(r"<\|?[A-Za-z_ ]+\|?>|\[/?INST\]|<\w+_of_turn>")
_ENDS = re.compile(r"<\|im_end\|>|<\|eot_id\|>|<\|endoftext\|>|</s>|<end_of_turn>|<\|end\|>")
_OTHER = {"step", "prompt", "completion", "advantage", "reward"}


class CompletionsError(ValueError):
    """Completions cannot be read; the message says why."""


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return rows with prompt, completion and rewards.

    Raises:
        CompletionsError: pyarrow is missing, or the file is damaged.
    """
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise CompletionsError("parquet needs pyarrow, which is not installed here: pip install pyarrow") from error
        try:
            batches = parquet.ParquetFile(path).iter_batches(LIMIT)
            return list(itertools.islice((row for batch in batches for row in batch.to_pylist()), LIMIT))
        except Exception as error:  # pyarrow's own errors have no common base that is documented
            raise CompletionsError(f"it is no parquet file that pyarrow can read ({type(error).__name__})") from error
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        if path.suffix == ".csv":
            return list(itertools.islice(csv.DictReader(file), LIMIT))
        rows = []
        for line in itertools.islice(file, LIMIT):
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]


def measure(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of logged completions."""
    rows = [row for row in rows if "completion" in row]
    result: dict[str, Any] = {"completions": len(rows)}
    if not rows:
        return result
    texts = [_text(row["completion"]) for row in rows]
    prompts = [row.get("prompt") for row in rows]
    return result | {
        "mean_characters": statistics.fmean(map(len, texts)),
        "prompt_marks": statistics.fmean(bool(_MARKS.search(_text(prompt))) for prompt in prompts),
        "prompts_are_messages": any(isinstance(prompt, list) for prompt in prompts),
        "end_inside": statistics.fmean(bool(_ENDS.search(text[:-1])) and not _ENDS.fullmatch(text) for text in texts),
        "rewards_invalid": statistics.fmean(_reward(row) is None for row in rows),
    }


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(str(part.get("content", "")) if isinstance(part, dict) else str(part) for part in value)
    return "" if value is None else str(value)


def _reward(row: Mapping[str, Any]) -> float | None:
    """Return a row's reward: under its name, or the sum of what the functions gave."""
    if "reward" in row:
        return _number(row["reward"])
    parts = [_number(value) for name, value in row.items() if name not in _OTHER and not isinstance(value, list)]
    numbers = [part for part in parts if part is not None]
    return sum(numbers) if numbers else None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
