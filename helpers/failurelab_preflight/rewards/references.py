"""A reference answer of a dataset: the texts that say it, and a wrong answer that looks like it."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any


def is_conversation(prompt: Any) -> bool:
    """Return whether a prompt, or a completion, is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def readings(value: Any) -> list[str]:
    """Return the texts that a right answer may have, by a reference: as written, bare, with and without commas."""
    if isinstance(value, (list, tuple)) and value and not is_conversation(value):
        value = value[0]
    if is_conversation(value):
        value = value[-1].get("content", "")
    if isinstance(value, float) and value.is_integer():  # as pandas reads whole numbers where one is missing
        return [str(int(value)), str(value)]
    text = "" if value is None or isinstance(value, Mapping) else str(value).strip()
    if not text:
        return []
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    answer = text.rpartition("####")[2].strip() if "####" in text else boxed[-1] if boxed else text
    texts = [answer, bare(answer)]
    if re.fullmatch(r"[-+]?(\d{1,3}(,\d{3})+|\d{4,})(\.\d+)?", texts[-1], re.ASCII):
        plain = texts[-1].replace(",", "")
        whole, point, fraction = plain.partition(".")
        texts += [plain, f"{int(whole):,}{point}{fraction}"]
    if len(text) < 60 and "####" not in text:  # with the mark it is a solution and its answer: no model answers so
        texts.append(text)
    return list(dict.fromkeys(filter(None, texts)))


# After a number, these are a part of it: 1e3, 0x1F, 2x, 5k, 5 million, 2 or 3.
_NO_UNIT = r"(?:[eE]-?\d|[xX][0-9a-fA-F]|[ijknxyz]\b|(?:[kKMB]|hundred|thousand|[mb]illion|dozen|or|and|to)\b)"


def bare(text: str) -> str:
    r"""Return an answer without what is put around it: `$5$`, `\(5\)`, `\boxed{5}`, `5 cm`, `$5`, `5 %`, `5.`"""
    around = r"\$+(.+?)\$+|\\\((.+)\\\)|\\\[(.+)\\\]|\\(?:boxed|text|mathrm)\{(.+)\}"
    text = text.strip()
    while match := re.fullmatch(around, text):
        text = match[match.lastindex or 0].strip()
    number, unit = r"[$€£]?\s*([-+]?\d[\d,]*(?:\.\d+)?)\s*", r"[%°]|\\%|[A-Za-z][A-Za-z .^/0-9]*"
    match = re.fullmatch(rf"{number}(?!{_NO_UNIT})(?:{unit})?\.?", text)
    return match[1] if match else text


def other_answer(text: str, choices: Sequence[str] = ()) -> str:
    """Return a wrong answer of the same length, so that a reward for length sees no difference.

    Of an answer with numbers the last one has other digits: with all of them changed, 1/1 would be 5/5.

    Args:
        text: the right one.
        choices: the answers of all rows: where they are few (A to D, yes and no) a wrong one is another of them.
    """
    numbers = list(re.finditer(r"\d+(?:,\d{3})*(?:\.\d+)?(?!\d)", text))
    start, end = numbers[-1].span() if numbers else (0, len(text))
    if not numbers and not any(unicodedata.numeric(letter, None) for letter in text):
        others = [each for each in choices if _letters(each) != _letters(text)]
        if others and (len(text) == 1 or len(set(choices)) < 4):
            return others[0]
    other = text[:start] + "".join(map(_other_letter, text[start:end])) + text[end:]
    return other if other != text else text[:-1] + ("x" if text[-1:] != "x" else "y")


def _letters(text: str) -> str:
    return re.sub(r"\W", "", text.casefold())


def _other_letter(letter: str) -> str:
    """Return another letter, digit or numeral of the same kind; a sign as it is."""
    kind = unicodedata.category(letter)
    near = (chr(ord(letter) + step) for step in (3, -3, 1, -1, 2, -2))
    return next((each for each in near if unicodedata.category(each) == kind), letter) if kind[0] in "LN" else letter
