"""Why a reward function gives the same to all completions of a prompt: each known cause is undone, and it is asked.

A cause is told where undoing it makes the function tell completions apart. Otherwise nobody knows: the completions that
were made up may not have the form that it reads.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from failurelab.preflight.answer import Finding
from failurelab.preflight.judges import reward_figures as figures
from failurelab.preflight.judges.reward_function import RewardFunction
from failurelab.preflight.judges.rows import prompted, tokenizer_of
from failurelab.preflight.repairs import DotAll
from failurelab.reward_functions import completions, patterns
from failurelab.reward_functions import source as reward_source

ROWS = 24  # looked at before it is said that a reference is one that cannot be read
_FEW = 8  # values of a column that says which kind a row is
_MANY = 500  # rows whose kinds are looked at
_WORD, _LONGER = "word ", (4, 16)  # times max_completion_length, in words: no completion has so many letters
_PLAIN = ("7", 7, 7.0)  # references that are as easy to read as any


def explain_equal(reward: RewardFunction) -> Finding:
    """Return why a function gives the same to all completions of a prompt, or that nobody knows."""
    given = f"{reward.name} gives {figures.value(reward.rewards)} for all {len(reward.rewards)} made-up completions"
    if not reward_source.reads_completions(reward.function):
        return _never_reads(reward, given)
    if reward_source.gives_constant(reward.function):
        return _suspect(reward, f"{given}: its text has no other number", "only its text was read")
    for find in (_form, _opened, _line_breaks, find_missing_column, _kind, _one_number, _place, _reference, _slip):
        if answer := find(reward, given):
            return answer
    if answer := _limit(reward, given):
        return answer
    return reward.not_checked(f"{given}: none may have its form. Call it by hand with a completion that deserves more")


def _never_reads(reward: RewardFunction, given: str) -> Finding:
    if len(reward.seen.trainer.reward_funcs) > 1:
        return reward.not_checked(f"{given}: it never reads them, and adds nothing to any advantage", "F10")
    lengths = [float(len(probe.text)) for probe in reward.probes]
    return reward.finding(
        "F10",
        "constant",
        f"{given}: it never reads them, so every advantage and every gradient is 0",
        "Let the reward depend on the completion.",
        tried=f"the completions' lengths in its place give {figures.span(lengths)}",
    )


def _suspect(reward: RewardFunction, evidence: str, why: str) -> Finding:
    """Suspect equal rewards; beside other functions they only add nothing to any advantage."""
    if len(reward.seen.trainer.reward_funcs) > 1:
        return reward.not_checked(f"{evidence}, so it adds nothing to any advantage", "F10")
    return Finding.suspected(
        "F10", evidence, why, "Let the reward depend on the completions that this run can draw.", part=reward.part
    )


def _limit(reward: RewardFunction, given: str) -> Finding | None:
    """A penalty for completions that are longer than the longest that the run lets a model write."""
    limit, tokenizer = reward.seen.asked.get("max_completion_length"), tokenizer_of(reward.seen.trainer)
    if not isinstance(limit, int) or not limit or tokenizer is None:
        return None
    longest = limit * limit // len(tokenizer(_WORD * limit, add_special_tokens=False)["input_ids"])  # in words
    row, lengths = reward.probes[0].row, (longest, *(limit * times for times in _LONGER))
    within, *beyond = (completions.Probe(row, "other", -1, _WORD * length) for length in lengths)
    first = reward.ask([within]).values
    for probe in beyond if first and set(first) <= set(reward.rewards) else ():
        values = reward.ask([within, probe]).values
        if len(values) == 2 and None not in values and values[0] == first[0] != values[1]:
            evidence = f"{given}, and {values[1]:g} to one that is longer than max_completion_length={limit} lets it be"
            return _suspect(reward, evidence, "another form may get more")
    return None


def _form(reward: RewardFunction, given: str) -> Finding | None:
    other = reward.other_form()
    if other is None:
        return None
    return reward.not_read(
        f"{given}: it reads a completion as {other[0]}, and each is {reward.arguments.form} here", other
    )


def _one_number(reward: RewardFunction, given: str) -> Finding | None:
    tried = reward.one_at_a_time()
    evidence = f"{given}: it gives one number for a whole batch, or a whole prompt, so every advantage is 0"
    return (
        reward.finding("F10", "batch", evidence, "Return each completion's own reward.", tried=tried) if tried else None
    )


def find_missing_column(reward: RewardFunction, given: str) -> Finding | None:
    """Look for a column that it takes of its **kwargs, and that the dataset does not have."""
    there = reward.arguments.names()
    for name in reward.asked:
        value = None if name in there else _find_readable(reward, name)
        if value is not None:
            evidence = f"{given}: it asks for the column {name!r}, which never arrives"
            tried = f"with {name}={value!r} it tells right from wrong"
            return reward.never_arrives(name, reward.column, evidence, tried)
    return None


def _kind(reward: RewardFunction, given: str) -> Finding | None:
    """A text of its own that no row has in a column: `code` where the rows say `coding`."""
    rows = prompted(reward.seen, _MANY)
    words = [text for text in patterns.texts(reward.function) if re.fullmatch(r"[\w -]{1,30}", text)]
    for name in reward.asked:
        values = {row[name] for row in rows if isinstance(row.get(name), str)}
        if not 0 < len(values) <= _FEW or name not in reward.arguments.columns or values & set(words):
            continue
        for word in words[:_FEW]:
            if told := reward.tells(columns={name: lambda row, word=word: word}):
                return reward.finding(
                    "F14",
                    "value",
                    f"{given}: its text {word!r} is no value of the column {name}, which has "
                    f"{', '.join(map(repr, sorted(values)))}",
                    f"Compare {name} with a value that it has.",
                    tried=f"with {name}={word!r} it gives {told}",
                )
    return None


def _opened(reward: RewardFunction, given: str) -> Finding | None:
    """A tag that the template has written already, and that it looks for in the completion."""
    told = reward.opened and reward.tells(change=lambda text: reward.opened + text)
    return reward.finding(
        "F14",
        "opened",
        f"{given}: the prompt ends with {reward.opened!r}, so no completion has that, and the function looks for it",
        f"Judge {reward.opened!r} + completion, or make the tag optional in the pattern.",
        tried=f"with it before the same completions it gives {told}",
    ) if told else None  # fmt: skip


def _line_breaks(reward: RewardFunction, given: str) -> Finding | None:
    told = reward.tells(prepare=functools.partial(match_line_breaks, reward.function))
    return by_line_breaks(reward, given, f"with re.DOTALL it gives {told}") if told else None


def by_line_breaks(reward: RewardFunction, given: str, tried: str) -> Finding:
    """Return the finding of patterns that match no completion of several lines."""
    evidence, repair = f"{given}: in its patterns '.' matches no line break", "Give the pattern re.DOTALL."
    return reward.finding("F14", "line breaks", evidence, repair, undo=DotAll(reward.function), tried=tried)


def match_line_breaks(function: Callable[..., Any]) -> None:
    """Let '.' match line breaks in every pattern of this process, also in those that a function has compiled."""
    library: Any = re
    compile_ = library._compile

    def compile_dotall(pattern: Any, flags: Any) -> Any:
        return compile_(pattern, flags if isinstance(pattern, re.Pattern) else flags | re.DOTALL)

    library._compile = compile_dotall
    code = reward_source.plain_function(function)
    for names in (getattr(code, "__globals__", {}), getattr(function, "__dict__", {})):
        names.update({name: _dotall(value) for name, value in names.items() if isinstance(value, re.Pattern)})
    for cell in getattr(code, "__closure__", None) or ():
        if isinstance(cell.cell_contents, re.Pattern):
            cell.cell_contents = _dotall(cell.cell_contents)


def _dotall(pattern: re.Pattern) -> re.Pattern:
    return re.compile(pattern.pattern, pattern.flags | re.DOTALL)


def by_place(reward: RewardFunction, given: str, name: str, column: str, tried: str = "") -> Finding:
    """Return the finding of a list of the script's own that is read by the place in the batch."""
    return reward.finding(
        "F14",
        "own list",
        f"{given} compares with {name}, a list of the script's own, by the place in the batch",
        f"Use the argument {column}: the trainer hands over its values for the prompts of the batch, which it draws in "
        f"another order than {name} has.",
        tried=tried,
    )


def _place(reward: RewardFunction, given: str) -> Finding | None:
    """Ask about one right answer for each of the dataset's first rows, in the order of its own list, and reversed."""
    name, column = reward_source.own_list(reward.function, reward.arguments.rows)
    if name is None or not hasattr(reward.seen.dataset, "__getitem__"):
        return None
    rows = [dict(reward.seen.dataset[place]) for place in range(min(ROWS, len(reward.seen.dataset)))]
    probes = completions.make(rows, column, [reward.function], reward.opened)
    for form in sorted({probe.form for probe in probes if probe.kind == "right"}):
        rights = [probe for probe in probes if probe.kind == "right" and probe.form == form]
        ordered, turned = reward.ask(rights, rows=rows).values, reward.ask(rights[::-1], rows=rows).values[::-1]
        if None not in (*ordered, *turned) and sum(ordered) > sum(turned):
            more = sum(one > other for one, other in zip(ordered, turned))
            said = f"in that list's order {more} of {len(rights)} right answers get more than in the opposite one"
            return by_place(reward, f"{given}: it", name, column, tried=said)
    return None


def _reference(reward: RewardFunction, given: str) -> Finding | None:
    """A reference that it cannot read."""
    if not reward.asks_reference:
        return None
    given = f"{given}, the right answers among them"
    if answer := find_other_reference(reward, given):
        return answer
    name, real = reward.column, reward.arguments.rows[0][reward.column]
    shown = _shown(reward, given)
    value = _find_readable(reward, name)
    if value is None or _reads_another_row(reward):
        return None
    own = next(iter(completions.readings(real)), "")
    finds_other_alone = patterns.forms(reward.function, str(value)) and not patterns.forms(reward.function, own)
    if finds_other_alone or type(value) is not type(real):
        return reward.finding(
            "F14",
            "reference",
            f"{shown}, which its patterns do not find",
            f"Compare with what {name} holds: the same type, and a pattern that finds it.",
            tried=f"with a reference {value!r} ({type(value).__name__}) it tells right from wrong",
        )
    why = f"{shown}, in no form that was tried; a reference {value!r} would be told from a wrong one"
    return reward.not_checked(why)


def find_other_reference(reward: RewardFunction, given: str) -> Finding | None:
    """Ask with the reference in another type, or without what is around it: then right answers get more."""
    name, real = reward.column, reward.arguments.rows[0][reward.column]
    own = (("its own pattern's whole text", write) for write in _own_forms(reward.function, real))
    for what, change in (*_OTHER_REFERENCES, *own):
        if change(real) == real and type(change(real)) is type(real):
            continue
        given_then = reward.ask(columns={name: functools.partial(_column_changed, name, change)}).values
        more, less, _ = reward.compare(values=given_then)
        if more and not less:
            return reward.finding(
                "F14",
                "reference",
                f"{_shown(reward, given)}, which it cannot equal",
                f"Compare with {name} as {what}: {change(real)!r}.",
                tried=f"as {what}, {change(real)!r}, a right answer gets {more[0][0]:g} and a wrong one {more[0][1]:g}",
            )
    return None


def _column_changed(name: str, change: Callable[[Any], Any], row: Mapping[str, Any]) -> Any:
    return change(row[name])


def _shown(reward: RewardFunction, given: str) -> str:
    real = reward.arguments.rows[0][reward.column]
    return f"{given}: {reward.column} is {type(real).__name__} {str(real)[:40]!r}"


def _own_forms(function: Callable[..., Any], real: Any) -> list[Callable[[Any], str]]:
    """Return how the function's patterns write a reference: `match[0]` in place of `match[1]` is all of that."""
    forms = patterns.forms(function, next(iter(completions.readings(real)), ""))[:3]
    return [functools.partial(_written, write) for write in forms]


def _written(write: completions.Write, value: Any) -> str:
    return write(str(_first_reading(value)), "")


def _find_readable(reward: RewardFunction, column: str) -> Any:
    """Return a plain reference by which it tells right completions from wrong ones; None if by none."""
    for value in _PLAIN:
        rows = [{**row, column: value} for row in reward.arguments.rows]
        probes = completions.make(rows, column, [reward.function], reward.opened)
        given = reward.ask(probes, columns={column: lambda row, value=value: value}).values
        if reward.compare(probes, given)[0]:
            return value
    return None


def _reads_another_row(reward: RewardFunction) -> bool:
    rows = prompted(reward.seen, ROWS)
    probes = completions.make(rows, reward.column, [reward.function], reward.opened)
    return bool(reward.tells(probes, rows=rows))


def _slip(reward: RewardFunction, given: str) -> Finding | None:
    """An error in its code that it catches itself, for every completion."""
    written = sum(1 for probe in reward.probes if probe.text)
    slips = [slip for slip, count in reward.ask(slips=True).slips.items() if count >= written]
    if not slips:
        return None
    line, text = slips[0]
    evidence = f"{given}: in line {line} it raises {text}, and catches it, each time"
    if text.startswith(("ModuleNotFoundError", "ImportError")):
        return reward.not_checked(evidence)
    return reward.finding("F14", "swallowed", evidence, "Let that error come out, and mend its line.")


def _as_number(value: Any) -> Any:
    text = completions.bare(str(value)).replace(",", "")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return value


def _first_reading(value: Any) -> Any:
    return next(iter(completions.readings(value)), value)


# What a reference may have to be for a function to read it.
_OTHER_REFERENCES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("text", lambda value: value if isinstance(value, (list, dict)) else str(value)),
    ("a number", _as_number),
    ("the answer alone", _first_reading),
    ("the bare answer", lambda value: completions.bare(str(_first_reading(value)))),
    ("a number without commas", lambda value: str(value).replace(",", "")),
    ("text without blanks around it", lambda value: str(value).strip()),
    ("lower case", lambda value: str(value).lower()),
    ("upper case", lambda value: str(value).upper()),
    ("a box", lambda value: f"\\boxed{{{value}}}"),
    ("a list", lambda value: [value]),
    ("JSON", lambda value: json.dumps(value, default=str)),
)
