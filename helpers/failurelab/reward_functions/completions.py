"""Completions made up to ask reward functions with: right, wrong and other ones, in the forms that a model may write.

A form is taken from three places: what answers commonly look like, what the function's own patterns and texts ask for
(`patterns`), and what the script's prompts show (a system prompt's `<think> ... </think>`, a few-shot answer, a JSON
object). Reasoning is written in one line and in several, because a pattern without DOTALL sees only the first one.
Where the prompt ends with an opened tag, a completion begins inside of it.
"""

import ast
import contextlib
import dataclasses
import fractions
import json
import operator
import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from failurelab.reward_functions import patterns

LINE, LINES = "Let me think.", "First I look at it.\nThen I add up.\n\nSo it is clear."
Write = Callable[[str, str], str]  # (answer, reasoning) -> a completion
_COMMON = (
    "{answer}",
    "The answer is {answer}.",
    "Answer: {answer}",
    "#### {answer}",
    "\\boxed{{{answer}}}",
    "<answer>{answer}</answer>",
    '{{"answer": "{answer}"}}',
    '```json\n{{"answer": "{answer}"}}\n```',
)
_REASONED = (
    "{reasoning} {answer}",
    "{reasoning} #### {answer}",
    "{reasoning} The answer is {answer}.",
    "{reasoning} \\boxed{{{answer}}}",
    "<think>{reasoning}</think><answer>{answer}</answer>",
    "<think>\n{reasoning}\n</think>\n<answer>\n{answer}\n</answer>",
    "<think>\n{reasoning}\n</think>\n{answer}",
    "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>\n",
)
OTHERS = ("", "I do not know.", "The cat sat on the mat. " * 8)
_VARIANTS = 3  # ways to write one reference
_ANSWER_TAG = re.compile(r"answer|solution|result|final|output|response|json", re.IGNORECASE)
_PAIR = re.compile(r"<(\w+)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_CUE = re.compile(
    r"(?:end|finish|form|format|write|respond|reply|conclude|line|with|as)\b[^.\n]{0,30}?[\s\"'`:]"
    r"((?:final |the )?(?:answer|result|solution)(?: is|:))\s*[<\[{(.$NX_\"]",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Probe:
    """One made-up completion.

    Attributes:
        row: of the rows asked about.
        kind: `right`, `wrong` or `other`.
        form: a number that is the same for the right and the wrong answer in one form.
        text: of the completion.
        shown: whether the prompts show this form.
        lines: how many lines the reasoning has; 0 in a form without reasoning, or whose reasoning ends with its line.
        variant: 0 for the answer as the dataset writes it, more for other ways to write it.
    """

    row: int
    kind: str
    form: int
    text: str
    shown: bool = False
    lines: int = 0
    variant: int = 0


def make(
    rows: Sequence[Mapping[str, Any]],
    column: str | None,
    functions: Sequence[Any],
    opened: str = "",
    drawn: Sequence[str] = (),
) -> list[Probe]:
    """Return the made-up completions for these rows.

    Args:
        rows: of the dataset.
        column: with the reference answers; None where there is none.
        functions: whose own forms are written too.
        opened: what the prompt of a generation ends with, `<think>` say; no completion begins with it then.
        drawn: completions of a model, to be asked about as well.
    """
    probes: list[Probe] = []
    known = [readings(row.get(column))[:_VARIANTS] if column else [] for row in rows]
    few = list(dict.fromkeys(answers[0] for answers in known if answers))
    for number, (row, answers) in enumerate(zip(rows, known)):
        shown = shown_forms(row["prompt"])
        form = 0
        for variant, answer in enumerate(answers or ["4"]):
            pair = [("right", answer), ("wrong", other_answer(answer, few))] if answers else [("other", answer)]
            for write, is_shown, reasons in _forms(functions, shown, answer, whole=not variant):
                for lines, reasoning in ((1, LINE), (3, LINES)) if reasons else ((0, LINE),):
                    form += 1
                    probes += [
                        Probe(number, kind, form, _after(opened, write(text, reasoning)), is_shown, lines, variant)
                        for kind, text in pair
                    ]
        solution = "" if not column else str(row.get(column) or "")
        if answers and len(solution) > 3 * len(answers[0]) and answers[0] in solution:  # a worked solution
            head, _, tail = solution.rpartition(answers[0])
            pair = [("right", answers[0]), ("wrong", other_answer(answers[0], few))]
            probes += [Probe(number, kind, form + 1, _after(opened, head + text + tail)) for kind, text in pair]
        probes += [Probe(number, "other", -1 - place, text) for place, text in enumerate((*OTHERS, *drawn))]
    return list({(probe.row, probe.kind, probe.text): probe for probe in reversed(probes)}.values())[::-1]


def _forms(
    functions: Sequence[Any], shown: Sequence[Write], answer: str, whole: bool
) -> Iterator[tuple[Write, bool, bool]]:
    """Yield each form, whether the prompts show it, and whether it has reasoning; the common ones where `whole`."""
    for write in shown:
        yield write, True, _reasons_inside(write, answer)
    for function in functions:
        for write in patterns.forms(function, answer):
            yield write, False, _reasons_inside(write, answer)
    for text in _COMMON if whole else _COMMON[:1]:
        yield _writer(text), False, False
    for text in _REASONED if whole else ():
        yield _writer(text), False, True


def _reasons_inside(write: Write, answer: str) -> bool:
    """Whether a form's reasoning stands in a tag. Without one, the end of a line may be what ends it."""
    return bool(re.search(rf"{LINE}\s*</", write(answer, LINE)))


def _writer(text: str) -> Write:
    return lambda answer, reasoning: text.format(answer=answer, reasoning=reasoning)


def _after(opened: str, text: str) -> str:
    """Return what a model writes after `opened`: the text without it."""
    start = opened.strip()
    return text.lstrip()[len(start) :] if start and text.lstrip().startswith(start) else text


# What the prompts show.


def shown_forms(prompt: Any) -> list[Write]:
    """Return the forms of an answer that a prompt shows: tags, few-shot answers, a box, a cue, a JSON object."""
    texts = _texts(prompt)
    found: list[Write] = []
    if texts and texts[-1][0] == "assistant":  # the beginning of the completion, which the model goes on with
        texts.pop()
    for role, text in texts:
        found += _few_shot(text) if role == "assistant" else [*_tagged(text), *_json(text), *_marked(text)]
    return found[:6]


def _texts(prompt: Any) -> list[tuple[Any, str]]:
    """Return the role and the text of each message of a prompt."""
    messages = prompt if is_conversation(prompt) else [{"role": "user", "content": prompt}]
    return [(each.get("role"), each["content"]) for each in messages if isinstance(each.get("content"), str)]


def asks_for_one_line(prompt: Any) -> bool:
    """Return whether a prompt asks for an answer of one line."""
    wanted = r"\b(?:one|a single|the same)[ -]line\b|\b(?:no|without) (?:line ?breaks?|newlines?)\b"
    return any(re.search(wanted, text, re.IGNORECASE) for _, text in _texts(prompt))


def is_shown(text: str, prompt: Any, answers: Sequence[str]) -> bool:
    """Return whether all that a completion has beside an answer and the reasoning stands in the prompt."""
    own = literals_beside(text, answers)
    return bool(own) and own <= _literals("\n".join(each for _, each in _texts(prompt)))


def literals_beside(text: str, answers: Sequence[str]) -> set[str]:
    """Return the tags, markers and words that a completion has beside an answer and the reasoning."""
    for said in (LINES, LINE, *sorted(answers, key=len, reverse=True)):
        text = text.replace(said, " ")
    return _literals(text)


def _literals(text: str) -> set[str]:
    """Return the tags, markers and words of a text, without the signs around them."""
    return {each.strip("\"'`.,;()") for each in re.findall(r"</?\w+>|[^\s<>]+", text)} - {""}


def _tagged(text: str) -> Iterator[Write]:
    """Yield the longest row of tags that a text shows, as it is written there; the last of them holds the answer."""
    rows: list[list[re.Match[str]]] = []
    for match in _PAIR.finditer(text):
        if rows and not text[rows[-1][-1].end() : match.start()].strip():
            rows[-1].append(match)
        else:
            rows.append([match])
    if not rows:
        return
    row = max(rows, key=len)
    if len(row) == 1 and len(rows) > 1:  # "<think> </think> and <answer> </answer>": no word is said of what is between
        names = list(dict.fromkeys(each[0][1] for each in rows))
        written = [
            [(gap * bool(place), f"<{name}>", f"</{name}>") for place, name in enumerate(names)] for gap in ("\n", "")
        ]
    else:
        names = [match[1] for match in row]
        pieces = []
        for before, match in zip([None, *row], row):
            inner = match[2]
            left, right = inner[: len(inner) - len(inner.lstrip())], inner[len(inner.rstrip()) :]
            if not inner.strip():
                left, right = inner, ""
            gap = text[before.end() : match.start()] if before else ""
            pieces.append((gap, f"<{match[1]}>{left}", f"{right}</{match[1]}>"))
        written = [pieces]
    if not _ANSWER_TAG.search(names[-1]):
        yield from _answered_behind(text, [each[-1] for each in rows])
        return
    for pieces in written:
        for end in ("", "\n") if "\n" in text[row[-1].start() :] else ("",):

            def write(answer: str, reasoning: str, pieces: list[tuple[str, str, str]] = pieces, end: str = end) -> str:
                inside = [reasoning] * (len(pieces) - 1) + [answer]
                return "".join(f"{gap}{start}{said}{stop}" for (gap, start, stop), said in zip(pieces, inside)) + end

            yield write


def _answered_behind(text: str, matches: Sequence[re.Match[str]]) -> Iterator[Write]:
    """Yield the form of an example whose answer stands behind its tags: `<think>1 and 1</think> 2`."""
    for match in matches:
        answer_there = re.match(r"(\s*)-?\d[\d.,]*(?=\s|$)", text[match.end() :])
        inner = match[2].strip()
        if answer_there and inner:
            start, _, stop = match[0].partition(inner)
            yield _behind(start, stop + answer_there[1])
            return


def _behind(start: str, stop: str) -> Write:
    """Return the form of an answer behind its reasoning."""
    return lambda answer, reasoning: f"{start}{reasoning}{stop}{answer}"


def _json(text: str) -> Iterator[Write]:
    """Yield the JSON object that a text shows; its last value is the answer, and the others are reasoning."""
    match = re.search(r"\{\s*\"\w+\"\s*:[^{}]*\}", text)
    if match is None:
        return
    names = re.findall(r"\"(\w+)\"\s*:", match[0])
    chosen = next((name for name in names if _ANSWER_TAG.search(name)), names[-1])

    def write(answer: str, reasoning: str) -> str:
        return json.dumps({name: answer if name == chosen else reasoning for name in names})

    def write_number(answer: str, reasoning: str) -> str:
        return write(answer, reasoning).replace(json.dumps(answer), answer)

    yield write
    if re.search(rf"\"{chosen}\"\s*:\s*[^\"\s]", match[0]):
        yield write_number


def _marked(text: str) -> Iterator[Write]:
    """Yield a box, `####`, or labels such as `Answer:` that a text asks for; with reasoning before, and without."""
    forms = ["\\boxed{{{answer}}}"] * ("\\boxed" in text) + ["#### {answer}"] * ("####" in text)
    labels = re.findall(r"^(\w[\w ]*:) *[<\[{(].*[>\]})] *$", text, re.MULTILINE)
    if len(labels) > 1:
        lines = [f"{label} {'{answer}' if label == labels[-1] else '{reasoning}'}" for label in labels]
        yield _writer("\n".join(lines))
    else:
        forms += [f"{match[1]} {{answer}}" for match in _CUE.finditer(text) if not _PAIR.search(text)][-1:]
    for form in forms:
        yield _writer(f"{{reasoning}}\n{form}")
        yield _writer(form)


def _few_shot(text: str) -> Iterator[Write]:
    """Yield the form of an answer that the prompt gives as an example."""
    numbers = list(re.finditer(r"-?\d[\d,.]*\d|\d", text))
    if _PAIR.search(text):
        yield from _tagged(text)
    elif numbers:
        last = numbers[-1]
        yield lambda answer, reasoning: text[: last.start()] + answer + text[last.end() :]


def opened_by(text: str) -> str:
    """Return what a rendered prompt has written of the completion already: a tag that it opens, or an empty one."""
    match = re.search(r"<(\w+)>\s*(?:</\1>\s*)?$", text)
    return match[0] if match else ""


def is_conversation(prompt: Any) -> bool:
    """Return whether a prompt, or a completion, is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


# A reference, and answers that are not.


def readings(value: Any) -> list[str]:
    """Return the texts that a right answer may have, by a reference: as written, bare, with and without commas."""
    if isinstance(value, (list, tuple)) and value and not is_conversation(value):
        value = value[0]
    if is_conversation(value):
        value = value[-1].get("content", "")
    text = "" if value is None or isinstance(value, Mapping) else str(value).strip()
    if not text:
        return []
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    answer = text.rpartition("####")[2].strip() if "####" in text else boxed[-1] if boxed else text
    found = [answer, bare(answer)]
    if plain := _plain_number(found[-1]):
        whole, point, fraction = plain.partition(".")
        found += [plain, f"{int(whole):,}{point}{fraction}"]
    if len(text) < 60:
        found.append(text)
    return list(dict.fromkeys(filter(None, found)))


# A number with thousands: 1,234.5, 1.234,5, 1 234,5 or 1234.5. What 1.234 is, nobody knows.
_BLANK = "[ \u00a0\u2009\u202f]"
_THOUSANDS = (
    (r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?|[-+]?\d{4,}(\.\d+)?", {",": ""}),
    (r"[-+]?\d{1,3}(\.\d{3})+,\d+|[-+]?\d{1,3}(\.\d{3}){2,}", {".": "", ",": "."}),
    (rf"[-+]?\d{{1,3}}({_BLANK}\d{{3}})+([.,]\d+)?", {**dict.fromkeys(_BLANK[1:-1], ""), ",": "."}),
)


def _plain_number(text: str) -> str:
    """Return a number of a thousand or more without what parts its thousands; empty for another text."""
    for pattern, changed in _THOUSANDS:
        if re.fullmatch(pattern, text, re.ASCII):
            return "".join(changed.get(sign, sign) for sign in text)
    return ""


def bare(text: str) -> str:
    r"""Return an answer without what is put around it: `$5$`, `\(5\)`, `\boxed{5}`, `5 cm`, `$5`, `5 %`, `5.`"""
    around = r"\$+(.+?)\$+|\\\((.+)\\\)|\\\[(.+)\\\]|\\(?:boxed|text|mathrm)\{(.+)\}"
    text = text.strip()
    while match := re.fullmatch(around, text):
        text = match[match.lastindex or 0].strip()
    number, unit = r"[$€£]?\s*([-+]?\d[\d,]*(?:\.\d+)?)\s*", r"[%°]|\\%|[A-Za-z][A-Za-z .^/0-9]*"
    match = re.fullmatch(rf"{number}(?!{_NO_UNIT})(?:{unit})?\.?", text)
    return match[1] if match else text


# After a number, these are a part of it: 1e3, 0x1F, 2x, 5k, 5 million, 2 or 3.
_NO_UNIT = r"(?:[eE]-?\d|[xX][0-9a-fA-F]|[ijknxyz]\b|(?:[kKMB]|hundred|thousand|[mb]illion|dozen|or|and|to)\b)"


def other_answer(text: str, few: Sequence[str] = ()) -> str:
    """Return a wrong answer of the same length, so that a reward for length sees no difference.

    No usual reading of it is the right one: neither as a number in other digits nor as a fraction of the same value.

    Args:
        text: the right one.
        few: the answers of all rows: where they are choices (A to D, yes and no) a wrong one is another of them.
    """
    places = [place for place, letter in enumerate(text) if unicodedata.numeric(letter, None) is not None]
    for changed in (places, places[:1], places[-1:]) if places else ():
        other = "".join(_other_digit(letter) if place in changed else letter for place, letter in enumerate(text))
        if not _is_same(other, text):
            return other
    choices = [each for each in few if not _is_same(each, text)]
    if choices and (len(text) == 1 or len(set(few)) < 4):
        return choices[0]
    other = "".join(_other_letter(letter) for letter in text)
    return other if not _is_same(other, text) else text[:-1] + ("x" if text[-1:] != "x" else "y")


def _other_digit(letter: str) -> str:
    """Return another digit of the same script; of a numeral that is no digit, such as ½ or 二, another such one."""
    digit = unicodedata.decimal(letter, None)
    if digit is not None:
        return chr(ord(letter) - digit + (digit + 3) % 9 + 1)
    row = next((each for each in ("½¼¾", "一二三四五六七八九十") if letter in each), "")
    if row:
        return row[row.index(letter) - 1]
    near = (chr(ord(letter) + step) for step in (1, -1, 2, -2))
    return next((each for each in near if unicodedata.numeric(each, None) is not None), letter)


def _other_letter(letter: str) -> str:
    """Return the letter three further on; of a script without an alphabet of 26 another one of the same kind."""
    for letters in (string.ascii_lowercase, string.ascii_uppercase):
        if letter in letters:
            return letters[(letters.index(letter) + 3) % 26]
    if not letter.isalpha():
        return letter
    near = (chr(ord(letter) + step) for step in (3, -3, 1, -1))
    return next((each for each in near if unicodedata.category(each) == unicodedata.category(letter)), letter)


def _is_same(one: str, other: str) -> bool:
    """Whether two answers are read as the same: the same letters, the same numbers in any order, or the same value."""
    letters, numbers, values = zip(*(_read(text) for text in (one, other)))
    return (
        letters[0] == letters[1]
        or (len(numbers[0]) > 1 and numbers[0] == numbers[1])
        or (values[0] is not None and values[0] == values[1])
    )


def _read(text: str) -> tuple[str, list[str], fractions.Fraction | None]:
    """Return the letters of an answer without case and signs, its numbers, and its value where it is arithmetic."""
    text = "".join(str(unicodedata.decimal(letter, letter)) for letter in unicodedata.normalize("NFKC", text))
    text = text.casefold()
    letters = re.sub(r"[\s$.,;:!?()\[\]{}\"'`*]", "", text) or text
    written = re.sub(r"\\d?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", bare(text))
    for signs, sign in (("\u2044:÷", "/"), ("×·", "*"), ("−–", "-"), ("^", "**")):
        written = re.sub(f"[{re.escape(signs)}]", sign, written)
    return letters, sorted(re.findall(r"\d+", text)), _value_of(written)


def _value_of(text: str) -> fractions.Fraction | None:
    """Return the value of numbers with + - * / and small powers between them; None for what is something else."""
    operators: dict[type[ast.operator], Callable[..., fractions.Fraction]] = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    }  # fmt: skip

    def value(node: ast.expr) -> fractions.Fraction:
        if isinstance(node, ast.Constant):
            return fractions.Fraction(str(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if not isinstance(node, ast.BinOp):
            raise ValueError(f"no arithmetic: {ast.unparse(node)}")
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) < 50:
            return fractions.Fraction(left ** int(right))
        return operators[type(node.op)](left, right)

    with contextlib.suppress(SyntaxError, ValueError, ArithmeticError, KeyError):
        return value(ast.parse(text.strip(), mode="eval").body)
    return None
