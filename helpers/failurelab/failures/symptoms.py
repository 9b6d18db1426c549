"""From a log to the failures whose literal texts occur in it; `failurelab symptoms`.

A text is no diagnosis by itself: some are printed by healthy runs too (the registry calls these notices, and says what
decides), so errors come first, and each match is shown with the number of its line.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

from failurelab import failures
from failurelab.errors import FailureLabError
from failurelab.failures import atlas, names

PAGE = "docs/symptoms.md"
_Text = tuple[str, str, failures.Failure]  # as it is looked up, as the registry has it, and whose it is
_CUT = 20  # characters of a text that a reader must have left of it
_SHORT = 40  # lines; what is pasted is looked at for texts that were cut short, a whole log is not
_NUMBER = r"['\"]?(-?[\d.]+(?:e-?\d+)?)['\"]?"
_METRIC = re.compile(rf"['\"](loss|grad_norm|reward_std|frac_reward_zero_std)['\"]: {_NUMBER}")
_GUARD = re.compile(r"Guard(?:Warning|Tripped): (\w+): (.+)")  # as Python prints a warning, or an error that ended it
_NAMES = re.compile(
    r"unexpected keyword argument|cannot import name|No module named|has no attribute|missing \d+ required|"
    r"positional arguments? but|HfArgumentParser|not used by the model"
)
_LOSS = re.compile(
    r"\bloss\b[^.\n\w]*(?:\s*\b(?:is|of|stays|stuck|at|always|shown|as|remains|to)\b)*\s*(?:0(?:\.0*)?(?![\d.])|zero\b)",
    re.IGNORECASE,
)
_NEXT = (
    "Next: failurelab preflight SCRIPT judges the script, failurelab diagnose RUN what the run left behind; "
    f"{PAGE} lists what is seen where nothing is said"
)
_FLAT = (
    "Loss, grad_norm and the spread of the rewards are 0 in every line: the rewards of each group are equal, so there "
    "is nothing to learn from.\n  decides: failurelab preflight asks each function, and tells why"
)
_RENAMED = (
    "transformers 5.23 has renamed gradient_checkpointing to activation_checkpointing: no failure. Every config of trl "
    "1.16 says it, because trl's own default has the old name.\n"
    "  ends it: activation_checkpointing=True in the config, model.activation_checkpointing_enable(); the old names go "
    "in v6"
)
_LOSS_OF_ZERO = (
    "A loss of 0, or nearly 0, is healthy: the advantages of a group have a mean of 0, and so has the loss at the "
    "first use of a batch; what is left is beta times KL. Its gradient is not 0.\n"
    "  watch instead: reward, grad_norm (where it is 0 too, see F10), frac_reward_zero_std (below 1), "
    "completions/clipped_ratio"
)


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
        """What decides, where healthy runs print the text too, or a part of it; else empty."""
        return next((told for text, told in self.failure.notices.items() if text in self.symptom), "")


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
    log = list(lines)
    _match_whole(log, texts, matches)
    if len(log) <= _SHORT:
        _match_cut(log, texts, matches)
    return sorted(
        (match for match in matches.values() if not _is_part(match, matches)),
        key=lambda match: (bool(match.notice), -len(match.symptom), match.failure.id),
    )


def _match_whole(log: list[str], texts: list[_Text], matches: dict[tuple[str, str], Match]) -> None:
    starts, position = [], 0
    words = [_normal(line) for line in log]
    for line in words:
        starts.append(position)
        position += len(line) + bool(line)
    joined = " ".join(line for line in words if line)
    for text, symptom, failure in texts:
        at = joined.find(text)
        if at >= 0:
            number = max(index for index, start in enumerate(starts) if start <= at and words[index])
            matches[failure.id, symptom] = Match(failure, symptom, number + 1, log[number].strip())


def _match_cut(log: list[str], texts: list[_Text], matches: dict[tuple[str, str], Match]) -> None:
    for index, line in enumerate(log):
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


def describe(lines: Iterable[str], installed: Mapping[str, str] | None = None) -> str:
    """Return what a log says; see `look_up`."""
    return look_up(lines, installed)[0]


def look_up(lines: Iterable[str], installed: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return what a log says, and the exit status of the command: 1 where nothing in the log is known, else 0.

    It says what guards measured, the texts of failures with what decides, and what the log's figures show. An error
    about a name is told with the releases that have it; `installed` is package to version, where it is known.
    """
    read = Log(lines)
    matches = find_matches(read)
    parts = [_describe_guard(*warning) for warning in read.guards.items()]
    parts += [_describe_match(match) for match in matches]
    told = {number: names.explain(line, installed) for number, line in read.errors.items()}
    parts += [f"line {number}: {read.errors[number][:160]}\n  {said}" for number, said in told.items() if said]
    parts += [_RENAMED] if read.has_renamed else []
    parts += [_FLAT] if read.is_flat() else [_LOSS_OF_ZERO] if read.has_loss_of_zero() else []
    if not parts:
        said = f"None of the known texts is in it (lines read: {read.total}). Most failures print none.\n{_NEXT}"
        return said, 1
    measured = atlas.cite(installed) if matches else ""
    parts += [f"Known of {'these releases' if installed else 'the releases here'}: {measured}"] if measured else []
    return "\n\n".join([*parts, _NEXT]), 0


class Log:
    """A log's lines, and what is noted of them while they are read once.

    Attributes:
        total: lines that were read.
        guards: guard and message, with the number of the first line that has them.
        errors: the lines that may be errors about names, by number: each text once.
    """

    def __init__(self, lines: Iterable[str]):
        self._lines = lines
        self.total = 0
        self.guards: dict[tuple[str, str], int] = {}
        self.errors: dict[int, str] = {}
        self._metrics: dict[str, list[float]] = {}
        self._says_zero = self.has_renamed = False

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.total += 1
            if warning := _GUARD.search(line):
                self.guards.setdefault((warning[1], warning[2].strip()), self.total)
            if "'loss'" in line or '"loss"' in line:
                for name, value in _METRIC.findall(line):
                    self._metrics.setdefault(name, []).append(float(value))
            elif self.total <= _SHORT and _LOSS.search(line):
                self._says_zero = True
            if _NAMES.search(line) and line.strip() not in self.errors.values():
                self.errors[self.total] = line.strip()
            self.has_renamed |= "checkpointing" in line and "will be removed in v6" in line
            yield line

    def is_flat(self) -> bool:
        """Return whether a trainer's lines say that no group of completions has different rewards."""
        values = {name: set(logged) for name, logged in self._metrics.items()}
        spread = values.get("frac_reward_zero_std") == {1.0} or values.get("reward_std") == {0.0}
        return spread and values.get("grad_norm") == {0.0}

    def has_loss_of_zero(self) -> bool:
        """Return whether the loss is 0 in half of a trainer's lines, or a reader says so; and grad_norm is not 0."""
        losses = self._metrics.get("loss")
        if not losses:
            return self._says_zero and self.total <= _SHORT
        zeros = sum(abs(loss) < 1e-4 for loss in losses)
        return zeros >= len(losses) / 2 and any(self._metrics.get("grad_norm", ()))


def _describe_guard(warning: tuple[str, str], number: int) -> str:
    guard, message = warning
    about = [failure.id for failure in failures.all() if f"guards.{guard}" in failure.check + failure.helper]
    _, judged_nothing, reason = message.partition("could not check: ")
    if judged_nothing:
        return f"line {number}: {guard} judged nothing: {reason}"
    lines = [f"line {number}: {guard} measured in this run: {message}"]
    lines += [f"  it is about: {', '.join(about)}, see {PAGE}"] if about else []
    return "\n".join(lines)


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
