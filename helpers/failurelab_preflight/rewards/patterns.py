r"""Forms in a reward function's own patterns and texts: what it asks for is written in it.

A form is a text with two marks, `ANSWER` and `REASONING`. A pattern's groups and free parts (`.*?`) take the marks, and
what is left of it (`\s*`, `[A-D]`, `(a|b)`) is written by hypothesis, the simplest text first: it is kept for every
Python, reads all of `re`, and stands in the lock of each stack. Where it is not installed there are no such forms, and
that is told.
"""

import contextlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Sequence

ANSWER, REASONING = "\ue000", "\ue001"  # in private use: no pattern and no prompt has them
MOST = 8  # forms of one function
_EXAMPLES = 40  # texts that are tried for a pattern
_KEYS = ("content", "role", "assistant", "user", "system")  # of a message: they stand in many functions
_FREE = re.compile(r"(?<!\\)(?:\.|\[\\[sSwWdD]\\[sSwWdD]\]|\[\^[^\]]{1,4}\])(?:[*+]|\{\d+,\})\??")


def is_known() -> bool:
    """Return whether the library that writes strings for patterns is installed."""
    return importlib.util.find_spec("hypothesis") is not None


def fill(form: str, answer: str, reasoning: str = "") -> str:
    """Return a form with an answer and a reasoning in the places of its marks."""
    return form.replace(ANSWER, answer).replace(REASONING, reasoning)


def own_forms(texts: Sequence[str], reads_json: bool, answer: str) -> list[str]:
    """Return the forms that a function's own texts ask for, at most eight.

    Args:
        texts: the strings and patterns that stand in the function.
        reads_json: whether it reads JSON.
        answer: that a group of a pattern must be able to hold.
    """
    known = is_known()
    forms = [form for text in texts if known and re.search(r"[(.*\\]", text) for form in _of_pattern(text, answer)]
    tags = [text[1:-1] for text in texts if re.fullmatch(r"<\w+>", text)]
    inside = [REASONING] * (len(tags) - 1) + [ANSWER]
    forms.append("".join(f"<{tag}>{mark}</{tag}>" for tag, mark in zip(tags, inside)))
    fences = [text.rstrip() for text in texts if re.fullmatch(r"```\w*\s*", text)]
    forms += [f"{fence}\n{ANSWER}\n```" for fence in fences]
    cues = [text.rstrip() for text in texts if len(text) <= 30 and re.search(r"[:：#=]\s*$|\bis\s*$", text)]
    forms += [f"{cue} {ANSWER}" for cue in cues]
    words = [text for text in texts if 1 < len(text) <= 30 and not re.search(r"[\\{}*\n]", text) and text not in _KEYS]
    words = [text for text in words if not re.fullmatch(r"([-=*_])\1{5,}", text)]  # a line that is printed
    words = [text for text in words if text not in fences]
    forms.append("\n".join([REASONING, *words[:12], ANSWER]) if words else "")
    keys = [text for text in texts if re.fullmatch(r"[A-Za-z_]\w*", text)] if reads_json else []
    forms += ["{" + ", ".join(f"{json.dumps(key)}: {value}" for key in keys) + "}" for value in (f'"{ANSWER}"', ANSWER)]
    return [form for form in dict.fromkeys(forms) if ANSWER in form][:MOST]


def _of_pattern(pattern: str, answer: str) -> list[str]:
    """Return the forms of one pattern: the answer in each of its groups, or, without any, in its last free part."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError):
        return []
    forms = []
    for group in range(1, compiled.groups + 1) or [0]:
        form = _simplest(_marked(pattern, group))
        match = compiled.search(fill(form, answer, "Let me think.")) if form else None
        if match and (not group or (match[group] or "").strip() == answer):
            forms.append(form)
    return forms


def _marked(pattern: str, group: int) -> str:
    """Return a pattern with marks in the places of what is free in it; empty where nothing is."""
    free = [match.span() for match in _FREE.finditer(pattern)]
    start, end = _span(pattern, group) if group else free[-1] if free else (0, 0)
    if start == end:
        return ""
    pieces, place = [], 0
    for a, b in sorted([(start, end), *((a, b) for a, b in free if b <= start or a >= end)]):
        pieces += [pattern[place:a], ANSWER if (a, b) == (start, end) else REASONING]
        place = b
    return "".join([*pieces, pattern[place:]])


def _span(pattern: str, group: int) -> tuple[int, int]:
    """Return where the inside of a capturing group begins and ends."""
    opened: list[tuple[int, int]] = []
    number = 0
    for match in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?P<\w+>)?(\?)?|\)", pattern, re.DOTALL):
        if match[0].startswith("("):
            number += match[1] is None
            opened.append((number if match[1] is None else 0, match.end()))
        elif match[0] == ")" and opened and (last := opened.pop())[0] == group:
            return last[1], match.start()
    return 0, 0


def _simplest(pattern: str) -> str:
    """Return the simplest text of a pattern that has the answer's mark; empty where none is found."""
    if not pattern:
        return ""
    from hypothesis import HealthCheck, Phase, configuration, find, settings, strategies

    configuration.set_hypothesis_home_dir(tempfile.gettempdir())  # it keeps a table of letters in a folder of its own
    few = settings(
        database=None, derandomize=True, max_examples=_EXAMPLES, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with contextlib.suppress(Exception):  # a pattern with these marks may match nothing, or be none
        return find(strategies.from_regex(pattern), lambda text: ANSWER in text, settings=few)
    return ""
