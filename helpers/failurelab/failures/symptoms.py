"""From a log to the failures whose literal texts occur in it; `failurelab symptoms`.

A text is no diagnosis by itself: some are printed by healthy runs too (the registry calls these notices, and says what
decides), so errors come first, and each match is shown with the number of its line.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator

from failurelab import failures
from failurelab.errors import FailureLabError

PAGE = "docs/symptoms.md"
_CUT = 20  # characters of a text that a reader must have left of it
_SHORT = 40  # lines; what is pasted is looked at for texts that were cut short, a whole log is not
_BLOCK = 20_000  # lines that are looked at together
_WRAPPED = 8  # lines that a terminal may make of one text
_NUMBER = r"['\"]?(-?[\d.]+(?:e-?\d+)?)['\"]?"
_METRIC = re.compile(rf"['\"](loss|grad_norm|reward_std|frac_reward_zero_std)['\"]: {_NUMBER}")


class LogError(FailureLabError):
    """A log cannot be read as text; the message says why and the next step."""

    exit_status = 2


@dataclasses.dataclass(frozen=True)
class Match:
    """A text of the registry that occurs in a log.

    Attributes:
        failure: whose text it is.
        symptom: the text.
        number: of the line where it begins, from 1.
        line: that line.
    """

    failure: failures.Failure
    symptom: str
    number: int
    line: str

    @property
    def notice(self) -> str:
        """What decides, where healthy runs print the text too; else empty."""
        return self.failure.notices.get(self.symptom, "")


def read_log(path: pathlib.Path) -> Iterator[str]:
    """Yield a log's lines; it may be large, and in UTF-8, UTF-16 or any encoding that keeps ASCII.

    Raises:
        LogError: it is empty, no text, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise LogError(f"{path} cannot be read ({error.strerror}). Next: failurelab symptoms < train.log") from error
    if not start.strip():
        raise LogError(f"{path} is empty: nothing can be looked up. Next: give the log that the run printed")
    wide = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in start and not wide:
        raise LogError(f"{path} is no text (it holds zero bytes). Next: give the log that the run printed")
    with path.open(encoding="utf-16" if wide else "utf-8", errors="replace") as file:
        yield from file


def find_matches(lines: Iterable[str]) -> list[Match]:
    """Return the first match of each text, errors before notices, and longer texts before shorter ones.

    Case and line breaks do not matter: terminals and web pages wrap logs. A text is found in a short paste also if the
    reader cut it short.
    """
    texts = [(_normal(symptom), symptom, failure) for failure in failures.all() for symptom in failure.symptoms]
    matches: dict[tuple[str, str], Match] = {}  # by failure and text: two failures may print the same
    block: list[str] = []
    before, total = 0, 0  # lines that went before the block, and lines in all
    for line in lines:
        block.append(line)
        total += 1
        if len(block) == _BLOCK:
            _match_block(block, before, texts, matches)
            before, block = total - _WRAPPED, block[-_WRAPPED:]
    _match_block(block, before, texts, matches)
    if total <= _SHORT:
        _match_cut(block, texts, matches)
    whole = [match for match in matches.values() if not _is_part(match, matches)]
    return sorted(whole, key=lambda match: (bool(match.notice), -len(match.symptom), match.failure.id))


def _match_block(block: list[str], before: int, texts: list, matches: dict[tuple[str, str], Match]) -> None:
    starts, position = [], 0
    words = [_normal(line) for line in block]
    for line in words:
        starts.append(position)
        position += len(line) + bool(line)
    joined = " ".join(line for line in words if line)
    for text, symptom, failure in texts:
        at = joined.find(text)
        if at >= 0 and (failure.id, symptom) not in matches:
            number = max(index for index, start in enumerate(starts) if start <= at and words[index])
            matches[failure.id, symptom] = Match(failure, symptom, before + number + 1, block[number].strip())


def _match_cut(block: list[str], texts: list, matches: dict[tuple[str, str], Match]) -> None:
    for index, line in enumerate(block):
        words = _normal(line)
        for text, symptom, failure in texts:
            whole = len(words) >= _CUT and words in text
            left = any(words.endswith(text[:length]) for length in range(_CUT, len(text)))
            if (whole or left) and (failure.id, symptom) not in matches:
                matches[failure.id, symptom] = Match(failure, symptom, index + 1, line.strip())


def _is_part(match: Match, matches: dict[tuple[str, str], Match]) -> bool:
    """Whether a longer text of the same failure was found where this one was."""
    return any(
        other.number == match.number and other.failure == match.failure and len(other.symptom) > len(match.symptom)
        for other in matches.values()
    )


def describe(lines: Iterable[str]) -> str:
    """Return the failures whose texts occur in a log, with the lines, what decides, and what repairs them."""
    metrics: dict[str, set[float]] = {}
    matches = find_matches(_with_metrics(lines, metrics))
    parts = [_describe_match(match) for match in matches]
    if _is_flat(metrics):
        parts.append(
            "Loss, grad_norm and the spread of the rewards are 0 in every line: the rewards of each group are equal, "
            "so there is nothing to learn from.\n  decides: guards.RewardGuard(trainer) tells whether they are all at "
            "the floor, all at the ceiling, or constant"
        )
    if parts:
        return "\n\n".join(parts)
    silent = [f"  {failure.id}: {seen}" for failure in failures.all() for seen in failure.seen_as if "reward" in seen]
    return "\n".join(
        [
            "None of the course's literal texts is in it. Some failures are silent. What a reward does in them:",
            *silent,
            f"More in {PAGE}. Which of them your versions have: failurelab doctor --python PATH; "
            "which your script has: failurelab preflight SCRIPT",
        ]
    )


def _with_metrics(lines: Iterable[str], metrics: dict[str, set[float]]) -> Iterator[str]:
    for line in lines:
        if "'loss'" in line or '"loss"' in line:
            for name, value in _METRIC.findall(line):
                metrics.setdefault(name, set()).add(float(value))
        yield line


def _is_flat(metrics: dict[str, set[float]]) -> bool:
    """Whether a trainer's lines say that no group of completions has different rewards."""
    spread = metrics.get("frac_reward_zero_std") == {1.0} or metrics.get("reward_std") == {0.0}
    return spread and metrics.get("grad_norm") == {0.0}


def _describe_match(match: Match) -> str:
    failure = match.failure
    shown = match.line if len(match.line) <= 160 else match.line[:157] + "..."
    lines = [f"line {match.number}: {shown}", f"{failure.id}: {failure.title}"]
    if match.notice:
        lines.append(f"  no verdict: {match.notice}")
    else:
        lines.append(f"  check: {failure.check}")
    lines.append(f"  {'if it is' if match.notice else 'repair'}: {failure.fix}")
    lines += [f"  helper: failurelab.{failure.helper}"] if failure.helper else []
    lines += [f"  why: notebooks/{failure.notebook}.ipynb"] if failure.notebook else []
    return "\n".join(lines)


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()
