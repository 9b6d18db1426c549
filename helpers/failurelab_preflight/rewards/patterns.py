"""Forms in a reward function's own texts and patterns: its tags, fences, cues, words, and the keys of its JSON.

A form is a text with two marks, `ANSWER` and `REASONING`.
"""

import json
import re
from collections.abc import Sequence

ANSWER, REASONING = "\ue000", "\ue001"  # in private use: no pattern and no prompt has them
MOST = 8  # forms of one function
_KEYS = ("content", "role", "assistant", "user", "system")  # of a message: they stand in many functions


def fill(form: str, answer: str, reasoning: str = "") -> str:
    """Return a form with an answer and a reasoning in the places of its marks."""
    return form.replace(ANSWER, answer).replace(REASONING, reasoning)


def own_forms(texts: Sequence[str], reads_json: bool) -> list[str]:
    """Return the forms that a function's own texts ask for, at most eight.

    Args:
        texts: the strings and patterns that stand in the function.
        reads_json: whether it reads JSON.
    """
    forms = []
    for each in [*texts, "".join(text for text in texts if re.fullmatch(r"<\w+>", text))]:
        tags = [tag for tag in dict.fromkeys(re.findall(r"<(\w+)>", each)) if f"(?P<{tag}>" not in each]
        inside = [REASONING] * (len(tags) - 1) + [ANSWER]
        forms += [
            "".join(f"{gap * bool(place)}<{tag}>{mark}</{tag}>" for place, (tag, mark) in enumerate(zip(tags, inside)))
            for gap in ("\n", "")
        ]
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
