"""Completions made up to ask reward functions with: right, wrong and other ones, in the forms that a model may write.

A form is a text with two marks, `ANSWER` and `REASONING`. It is taken from what the script's prompts show (a system
prompt's `<think> ... </think>`, a box, a JSON object), and from what answers commonly look like. Reasoning is written
in one line and in several, because a pattern without DOTALL sees only the first one. Where the prompt ends with an
opened tag, a completion begins inside of it.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from failurelab_preflight.rewards.references import is_conversation, other_answer, readings

ANSWER, REASONING = "\ue000", "\ue001"  # in private use: no prompt has them
LINE, LINES = "Let me think.", "First I look at it.\nThen I add up.\n\nSo it is clear."
NO_ANSWER = "I do not know."
_COMMON = {
    "alone": ANSWER,
    "sentence": f"The answer is {ANSWER}.",
    "label": f"Answer: {ANSWER}",
    "####": f"#### {ANSWER}",
    "box": f"\\boxed{{{ANSWER}}}",
    "LaTeX": f"${ANSWER}$",
    "unit": f"{ANSWER} cm",
    "tag": f"<answer>{ANSWER}</answer>",
    "JSON": f'{{"answer": "{ANSWER}"}}',
    "fenced": f"```\n{ANSWER}\n```",
    "fenced, language": f"```python\n{ANSWER}\n```",
    "words, answer": f"{REASONING} {ANSWER}",
    "words, ####": f"{REASONING} #### {ANSWER}",
    "words, sentence": f"{REASONING} The answer is {ANSWER}.",
    "words, box": f"{REASONING} \\boxed{{{ANSWER}}}",
    "think, answer": f"<think>{REASONING}</think><answer>{ANSWER}</answer>",
    "think, answer, lines": f"<think>\n{REASONING}\n</think>\n<answer>\n{ANSWER}\n</answer>",
    "think, alone": f"<think>\n{REASONING}\n</think>\n{ANSWER}",
    "reasoning, answer": f"<reasoning>\n{REASONING}\n</reasoning>\n<answer>\n{ANSWER}\n</answer>\n",
}
_OTHERS = {"empty": "", "no answer": NO_ANSWER, "long": "The cat sat on the mat. " * 8}
_VARIANTS = 3  # ways to write one reference
_MOST_SHOWN = 6
_ANSWER_TAG = re.compile(r"answer|solution|result|final|output|response|json", re.IGNORECASE)
_PAIR = re.compile(r"<(\w+)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_FENCED = re.compile(r"```(\w*)[ \t]*\n(.*?)```", re.DOTALL)
_WORD = "your|the|final|answer|result|solution|query|sql|python|code|program|function|goes|here"
_PLACE = re.compile(rf"\s*(?:#|--|//)?(?:[ .…<>()\[\]{{}}]|\b(?:{_WORD})\b)*\s*", re.IGNORECASE)
_CUE = re.compile(
    r"(?:end|finish|form|format|write|respond|reply|conclude|line|with|as)\b[^.\n]{0,30}?[\s\"'`:]"
    r"((?:final |the )?(?:answer|result|solution)(?: is|:))\s*[<\[{(.$NX_\"]",
    re.IGNORECASE,
)
_ONE_LINE = re.compile(r"\b(?:one|a single|the same)[ -]line\b|\b(?:no|without) (?:line ?breaks?|newlines?)\b", re.I)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One made-up completion.

    Attributes:
        row: of the rows asked about.
        worth: `right` or `wrong`; `none` for a text without an answer, `other` where no reference is known.
        form: a name that is the same for the right and the wrong answer in one form.
        text: of the completion.
        shown: whether the prompts show this form.
        lines: how many lines the reasoning has; 0 in a form without reasoning, or whose reasoning ends with its line.
    """

    row: int
    worth: str
    form: str
    text: str
    shown: bool = False
    lines: int = 0


def make(
    rows: Sequence[Mapping[str, Any]], column: str | None, opened: str = "", drawn: Sequence[str] = ()
) -> list[Completion]:
    """Return the made-up completions for these rows, some forty for each.

    Args:
        rows: of the dataset.
        column: with the reference answers; None where there is none.
        opened: what the prompt of a generation ends with, `<think>` say; no completion begins with it then.
        drawn: completions of a model, to be asked about as well.
    """
    known = [readings(row.get(column))[:_VARIANTS] if column else [] for row in rows]
    choices = list(dict.fromkeys(answers[0] for answers in known if answers))
    written: list[Completion] = []
    for number, (row, answers) in enumerate(zip(rows, known)):
        for variant, answer in enumerate(answers or ["4"]):
            pair = [("right", answer), ("wrong", other_answer(answer, choices))] if answers else [("other", answer)]
            for name, form, shown in _forms(row["prompt"], not variant):
                if name == "unit" and not answer.isdecimal():
                    continue
                inside = bool(re.search(rf"{REASONING}\s*</", form)) or name in _COMMON
                several = ((1, LINE), (3, LINES)) if REASONING in form and inside else ((0, LINE),)
                for lines, reasoning in several:
                    label = name + ", several lines" * (lines == 3) + f", written as {answer}" * bool(variant)
                    for worth, text in pair:
                        text = _after(opened, form.replace(ANSWER, text).replace(REASONING, reasoning))
                        written.append(Completion(number, worth, label, text, shown, lines))
        longest = max((c.text for c in written if c.row == number and c.shown), key=len, default="")
        others = dict(_OTHERS) | {f"drawn {place + 1}": text for place, text in enumerate(drawn)}
        others |= {"cut in the middle": longest[: len(longest) // 2]} if longest else {}
        written += [Completion(number, "none", name, text) for name, text in others.items()]
    return list({(each.row, each.worth, each.text): each for each in reversed(written)}.values())[::-1]


def _forms(prompt: Any, whole: bool) -> Iterator[tuple[str, str, bool]]:
    """Yield each form's name, the form, and whether the prompt shows it; all of the common ones where `whole`."""
    for place, form in enumerate(shown_forms(prompt)):
        name = f"prompt's form{f' {place + 1}' if place else ''}"
        yield name, form, True
        if form.endswith(">"):
            yield f"{name} + newline", form + "\n", True
    for name, form in _COMMON.items() if whole else [("alone", ANSWER)]:
        yield name, form, False


def _after(opened: str, text: str) -> str:
    """Return what a model writes after `opened`: the text without it."""
    start = opened.strip()
    return text.lstrip()[len(start) :] if start and text.lstrip().startswith(start) else text


def shown_forms(prompt: Any) -> list[str]:
    """Return the forms of an answer that a prompt shows: tags, few-shot answers, a box, a cue, a block, JSON."""
    messages = _messages(prompt)
    if messages and messages[-1][0] == "assistant":  # the beginning of the completion, which the model goes on with
        messages.pop()
    forms: list[str] = []
    for role, text in messages:
        shown = (_few_shot,) if role == "assistant" else (_tagged, _json, _marked, _fenced)
        forms += [form for read in shown for form in read(text)]
    return list(dict.fromkeys(forms))[:_MOST_SHOWN]


def asks_for_one_line(prompt: Any) -> bool:
    """Return whether a prompt asks for an answer of one line."""
    return any(_ONE_LINE.search(text) for _, text in _messages(prompt))


def opened_by(text: str) -> str:
    """Return what a rendered prompt has written of the completion already: a tag that it opens, or an empty one."""
    match = re.search(r"<(\w+)>\s*(?:</\1>\s*)?$", text)
    return match[0] if match else ""


def _messages(prompt: Any) -> list[tuple[Any, str]]:
    """Return the role and the text of each message of a prompt."""
    messages = prompt if is_conversation(prompt) else [{"role": "user", "content": prompt}]
    return [(each.get("role"), each["content"]) for each in messages if isinstance(each.get("content"), str)]


def _tagged(text: str) -> Iterator[str]:
    """Yield the longest row of tags that a text shows, as it is written there; the last of them holds the answer."""
    rows: list[list[re.Match[str]]] = []
    for match in _PAIR.finditer(text):
        if rows and not text[rows[-1][-1].end() : match.start()].strip():
            rows[-1].append(match)
        else:
            rows.append([match])
    row = max(rows, key=len, default=[])
    gaps = [[text[one.end() : other.start()] for one, other in itertools.pairwise(row)]]
    if len(row) == 1 and len(rows) > 1:  # "<think> </think> and <answer> </answer>": no word is said of what is between
        row = list({match[1]: match for (match, *_) in rows}.values())
        gaps = [[gap] * len(row) for gap in ("\n", "")]
    if not row or not _ANSWER_TAG.search(row[-1][1]):
        return
    marks = [REASONING] * (len(row) - 1) + [ANSWER]
    inside = [re.sub(r"\S(?:.*\S)?", mark, match[2], flags=re.DOTALL) for match, mark in zip(row, marks)]
    tags = [
        f"<{match[1]}>{text if text.strip() else mark}</{match[1]}>" for match, mark, text in zip(row, marks, inside)
    ]
    for between in gaps:
        yield "".join(gap + tag for gap, tag in zip(["", *between], tags))


def _json(text: str) -> Iterator[str]:
    """Yield the JSON object that a text shows; its last value is the answer, and the others are reasoning."""
    match = re.search(r"\{\s*\"\w+\"\s*:[^{}]*\}", text)
    if match is None:
        return
    names = re.findall(r"\"(\w+)\"\s*:", match[0])
    chosen = next((name for name in names if _ANSWER_TAG.search(name)), names[-1])
    form = json.dumps({name: ANSWER if name == chosen else LINE for name in names}, ensure_ascii=False)
    yield form
    if re.search(rf"\"{chosen}\"\s*:\s*[^\"\s]", match[0]):
        yield form.replace(f'"{ANSWER}"', ANSWER)


def _marked(text: str) -> Iterator[str]:
    """Yield a box, `####`, or labels such as `Answer:` that a text asks for; with reasoning before, and without."""
    forms = [f"\\boxed{{{ANSWER}}}"] * ("\\boxed" in text) + [f"#### {ANSWER}"] * ("####" in text)
    labels = re.findall(r"^(\w[\w ]*:) *[<\[{(].*[>\])}] *$", text, re.MULTILINE)
    if len(labels) > 1:
        yield "\n".join([f"{label} {REASONING}" for label in labels[:-1]] + [f"{labels[-1]} {ANSWER}"])
        return
    forms += [f"{match[1]} {ANSWER}" for match in _CUE.finditer(text) if not _PAIR.search(text)][-1:]
    for form in forms:
        yield f"{REASONING}\n{form}"
        yield form


def _fenced(text: str) -> Iterator[str]:
    """Yield the fenced blocks in which a text leaves a place for the answer, `...` or `-- your query here`.

    A block with anything else is a part of the question.
    """
    for language, inside in _FENCED.findall(text):
        if _PLACE.fullmatch(inside):
            form = f"```{language}\n{ANSWER}\n```"
            yield f"{REASONING}\n{form}"
            yield form


def _few_shot(text: str) -> Iterator[str]:
    """Yield the form of an answer that the prompt gives as an example."""
    numbers = list(re.finditer(r"-?\d[\d,.]*\d|\d", text))
    if _PAIR.search(text):
        yield from _tagged(text)
    elif numbers:
        yield text[: numbers[-1].start()] + ANSWER + text[numbers[-1].end() :]
