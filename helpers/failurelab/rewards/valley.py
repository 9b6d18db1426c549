"""A reward that hangs on a completion's length alone, and pays least at one length and more on both sides of it.

`abs(TARGET - len(completion))` is the distance from what is wanted, and a trainer seeks the most: it pays for being far
away. A hill, and a reward that falls or rises all along, are left alone: which length is wanted only its author knows.

Upstream: TRL #2771.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from failurelab.rewards.examination import Examination
from failurelab.rewards.figures import SAME
from failurelab.rewards.forms import Completion
from failurelab.rewards.table import Flag

Count = Callable[[str], int]
Write = Callable[[int], str]
Unit = tuple[tuple[Count, ...], tuple[Write, ...], int]
_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_SHARED, _RISING, _EACH = 3, 3, 32  # lengths that two texts share; levels behind the valley; lengths of one look


def _prose(count: int) -> str:
    return re.sub(r"\s$", "s", ("The cat sat on the mat. " * (count // 24 + 1))[:count])


# For each unit: how it is counted, two texts that have so many, and the most that is asked about.
_UNITS: dict[str, Unit] = {
    "characters": ((len, lambda text: len(text.strip())), (_prose, lambda count: ("x7." * count)[:count]), 4096),
    "words": ((lambda text: len(text.split()),), (lambda n: " ".join(["word"] * n), lambda n: "a, " * n), 1024),
    "sentences": (
        (
            lambda text: len([each for each in re.split(r"[.!?]+", text) if each.strip()]),
            lambda text: len(re.findall(r"[.!?]", text)),
            lambda text: text.count("."),
        ),
        (lambda n: " ".join(["So it is."] * n), lambda n: " ".join(["Yes."] * n)),
        128,
    ),
    "digits": ((lambda text: sum(map(str.isdigit, text)),), (lambda n: "7" * n, lambda n: "at 1, " * n), 128),
}


def find(x: Examination) -> Flag | None:
    """Return the suspicion that a function's sign is wrong, where it pays least at a length strictly inside."""
    if not x.varies or not x.weight:
        return None
    sign = -1 if x.weight < 0 else 1
    paid = {each.text: sign * value + 0.0 for each, value in zip(x.completions, x.rewards) if value is not None}
    for unit, (counts, texts, most) in {**_UNITS, **_tokens(x, [*paid])}.items():
        for count in counts:
            if _by_length(paid, count, 0) and (flag := _look(x, unit, count, texts, most, dict(paid))):
                return flag
    return None


def _tokens(x: Examination, texts: Sequence[str]) -> dict[str, Unit]:
    """Return the unit of the trainer's tokens, where there is a tokenizer."""
    encode = x.inputs.encode
    if encode is None or not encode(list(texts)):
        return {}

    def count(text: str) -> int:
        return len((encode([text]) or [[]])[0]) if text else 0

    return {"tokens": ((count,), _UNITS["words"][1], 256)}


def _look(
    x: Examination, unit: str, count: Count, texts: Sequence[Write], most: int, paid: dict[str, float]
) -> Flag | None:
    """Ask about texts of many lengths, then about those around the least that was paid."""
    sign, asked = (-1 if x.weight < 0 else 1), [step for step in _STEPS if step <= most]
    while True:
        some = [Completion(0, "none", unit, write(size)) for size in asked for write in texts]
        values = x.ask(some).values
        if len(values) != len(some) or None in values:
            return None
        paid |= {each.text: sign * (value or 0.0) + 0.0 for each, value in zip(some, values)}
        known = _by_length(paid, count, _SHARED)
        if not known or not _is_valley(known):
            return None
        sizes = sorted(known)
        place = sizes.index(min(known, key=lambda size: known[size]))
        low, high = sizes[place - 1], sizes[place + 1]
        step = max(1, (high - low) // _EACH)
        asked = [size for size in range(low + 1, high, step) if size not in known]
        if not asked or unit == "tokens":  # words are no tokens, so not every length is met
            break
    shown = max(count(each.text) for each in x.completions)
    size, far = sizes[place], shown if shown > sizes[place] else sizes[-1]
    times = f"times its weight {x.weight:g}, " if sign < 0 else ""
    said = (
        f"{times}{x.key} pays least at {size} {unit} ({known[size]:g}) and more the farther away: {known[sizes[0]]:g} "
        f"for {'an empty one' if not sizes[0] else sizes[0]}, {known[far]:g} for {far} {unit}: was a minus forgotten?"
    )
    repair = "Turn the sign of the reward (or of its entry in reward_weights), so that the wanted length gets the most."
    why = "which length is wanted only its author knows"
    return Flag(x.key, "F14", "SUSPECTED", said, repair, control=why, fault="sign")


def _by_length(paid: Mapping[str, float], count: Count, least: int) -> dict[int, float]:
    """Return what each length is paid; empty where two texts of one differ, or fewer than `least` have two texts."""
    lengths: dict[int, list[float]] = {}
    for text, value in paid.items():
        lengths.setdefault(count(text), []).append(value)
    apart = any(max(values) - min(values) > SAME for values in lengths.values())
    shared = sum(len(values) > 1 for values in lengths.values())
    return {} if apart or shared < least else {size: values[0] for size, values in lengths.items()}


def _is_valley(known: Mapping[int, float]) -> bool:
    """Return whether values fall to one place strictly inside and rise behind it, over some levels."""
    values = [known[size] for size in sorted(known)]
    place = values.index(min(values))
    before, behind = values[: place + 1], values[place:]
    falls = all(one >= other - SAME for one, other in itertools.pairwise(before))
    rises = all(other >= one - SAME for one, other in itertools.pairwise(behind))
    return falls and rises and before[0] > before[-1] + SAME and len(set(behind)) > _RISING
