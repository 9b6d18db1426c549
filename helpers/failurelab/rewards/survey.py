"""All reward functions of a trainer, each examined alone, and what the trainer adds up: one table with flags."""

import dataclasses
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from failurelab.rewards import asides, figures, forms, patterns, relative, signature
from failurelab.rewards.examination import RAISES, Examination
from failurelab.rewards.forms import Completion
from failurelab.rewards.inputs import OWN, Inputs
from failurelab.rewards.judging import examine, is_known, judge, wrong_sign
from failurelab.rewards.table import Flag, Line, RewardTable, quote, scale_notes


@dataclasses.dataclass
class Survey:
    """What was asked of a trainer's reward functions.

    Attributes:
        table: what they paid, with flags.
        best: the shortest of the completions that get the most in all; empty where none is known, or none answers.
        reference: the column whose text alone gets more than a wrong one, as the dataset has it; empty where none does.
        unasked: the places of functions that could not be asked.
    """

    table: RewardTable
    best: str = ""
    reference: str = ""
    unasked: tuple[int, ...] = ()


def ask(
    functions: Any,
    *,
    prompt: Any = "What is 3 + 4?",
    answer: Any = None,
    columns: Mapping[str, Any] | None = None,
    weights: Sequence[float] | None = None,
) -> RewardTable:
    """Ask reward functions about some forty completions made up for a prompt; a notebook shows the table.

        from failurelab.rewards import ask
        ask(reward, prompt="What is 3 + 4?", answer="7")

    Each function is called in forks of this process, as a trainer calls it: `prompts`, `completions`, and the columns
    by their names. What it prints or remembers there is forgotten; it has 30 seconds for all.

    Args:
        functions: one function, or a list.
        prompt: a text, or a list of messages; completions have the same form.
        answer: the right one, handed over as the column `answer`; or name the column in `columns`.
        columns: of this row of the dataset, by name.
        weights: of the functions; all 1 by default.

    Returns:
        The table. `flags` has what is to be said of each function.
    """
    functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    row = {"prompt": prompt, **({} if answer is None else {"answer": answer}), **(columns or {})}
    inputs = Inputs([row], [name for name in row if name not in OWN])
    return survey(functions, inputs, weights=weights).table


def survey(
    functions: Sequence[Any],
    inputs: Inputs,
    *,
    weights: Sequence[float] | None = None,
    whole: bool = True,
    places: Sequence[int] = (),
    opened: str = "",
    drawn: Sequence[str] = (),
    clip: Sequence[float] = (),
    longest: int = 0,
    **options: Any,
) -> Survey:
    """Ask each function alone about made-up completions, and judge what the trainer adds up.

    Args:
        functions: all of the trainer's.
        inputs: what they are called with.
        weights: of each; all 1 by default.
        whole: whether nothing else, such as a reward model, adds to the sum.
        places: of the functions that are asked; all by default.
        opened: what the prompt has written of a completion already.
        drawn: completions of a model, to be asked about too.
        clip: the least and the most that the trainer lets a sum be; empty where it clips none.
        longest: tokens that a completion may have; 0 where that is unknown.
        options: of `Examination`.
    """
    weights = [1.0] * len(functions) if weights is None else list(weights)
    places = list(places) or list(range(len(functions)))
    own = [functions[place] for place in places]
    asked = [name for function in own for name in signature.asked_columns(function)]
    column = signature.reference_column(inputs.rows, asked) or ""
    completions = forms.make(inputs.rows, column, own, opened, drawn)
    keys = [signature.key_of(functions, place) for place in places]
    alone = len(functions) == 1
    examined = [
        Examination(functions[n], key, inputs, completions, column, opened, weights[n], alone, **options)
        for n, key in zip(places, keys)
    ]
    flags = [list(examine(x)) for x in examined]
    sums, notes = _totals(examined, completions), list[str]()
    for x, about in zip(examined, flags):
        if x.changed and x is not examined[-1]:
            what = (
                f"{x.key} changes {' and '.join(x.changed)} in place, and the functions after it are given what it left"
            )
            repair = "Work on a copy: write into no list or message that the function is given."
            about.append(x.suspected("in place", what, repair, "what the others pay for it was not asked"))
        if x.rewards:
            totals = [sums[each] for each in x.completions] if sums and whole else None
            about += filter(None, [judge(x, totals)])
            about += filter(None, [] if about else [relative.judge(x)])
        if not about:
            for aside in asides.look(x):
                if isinstance(aside, Flag):
                    about.append(aside)
                else:
                    notes.append(aside)
    said = [flag for about in flags for flag in about]
    said += _reads_no_reference(examined, said)
    best = ""
    kept = [each for each in completions if sums and all(x.paid[each] != RAISES for x in examined)]
    if kept and any(x.varies for x in examined):
        totals = [sums[each] for each in kept]
        clipped = list(_judge_clip(kept, totals, clip)) if whole and clip else []
        if whole and not clipped and longest and all(map(is_known, examined)):
            clipped = list(_judge_room(inputs, kept, totals, longest))
        said += clipped or _judge_sum(
            examined, kept, totals, weights, whole, any(f.verdict in ("FOUND", "SUSPECTED") for f in said)
        )
        # What a comparing function pays in one call for all is not what it pays in training.
        if len(examined) == 1 and any(flag.fault == "call" for flag in said):
            said = [flag for flag in said if (flag.failure, flag.verdict) != ("F10", "HELD")]
        if whole:
            top = [each for each, total in zip(kept, totals) if total > max(totals) - figures.SAME]
            shortest = min(top, key=lambda each: len(each.text))
            # A text that answers nothing is best for a reward of its length: what fits then gets less, and not nothing.
            best = shortest.text if shortest.worth != "none" else ""
    table = tabulate(examined, said)
    notes = [*notes, *scale_notes(table, [weights[place] for place in places]), *_unread(inputs, own)]
    notes += (
        [] if patterns.is_known() else ["hypothesis is not installed here, so no completion has a pattern's own form"]
    )
    unasked = tuple(place for place, x in zip(places, examined) if x.unasked)
    reference = next((x.column for x in examined if x.asks_reference and asides.pays_alone(x)), "")
    return Survey(dataclasses.replace(table, notes=notes), best, reference, unasked)


def tabulate(examined: Sequence[Examination], flags: Sequence[Flag] = ()) -> RewardTable:
    """Return what functions paid for the completions of the first prompt, as a table."""
    completions = dict.fromkeys(each for x in examined for each in x.paid if each.row == 0)
    lines = [Line(c.worth, c.form, c.text, [x.paid.get(c, "not asked") for x in examined]) for c in completions]
    return RewardTable([x.key for x in examined], lines, list(flags))


def _unread(inputs: Inputs, functions: Sequence[Any]) -> Iterator[str]:
    """Yield which columns of the dataset no function asks for."""
    asked = {name for function in functions for name in signature.asked_columns(function)}
    unread = [name for name in inputs.columns if name not in asked]
    if unread:
        yield f"no reward function reads the column{'s' * (len(unread) > 1)} {', '.join(unread)}"


_OF_RIGHT = re.compile(r"correct|accura|right|answer|solution|solve|match|exact", re.IGNORECASE)
_OF_FORM = re.compile(r"form|tag|struct|shape|xml|len|brev|short|style|think|thought|reason|count", re.IGNORECASE)


def _reads_no_reference(examined: Sequence[Examination], said: Sequence[Flag]) -> Iterator[Flag]:
    """Yield the functions that are called after right answers and read none, where the dataset has some."""
    there = [name for name in signature.REFERENCES if examined and name in examined[0].inputs.columns]
    if not there or any(x.asked or signature.hands_on_the_rest(x.function) for x in examined):
        return
    accused = {flag.about for flag in said if flag.verdict in ("FOUND", "SUSPECTED")}
    for x in examined:
        name = x.key.partition(" ")[2]
        if x.key in accused or not x.varies or not _OF_RIGHT.search(name) or _OF_FORM.search(name):
            continue
        if not signature.asks_for(x.function, "prompts"):
            columns = ", ".join(there)
            what = f"{x.key} reads no column, and no function reads {columns}: which answer is right is not known"
            repair = f"Compare with {there[0]}: take it as an argument, def {name}(completions, {there[0]}, **kwargs)."
            why = "only its name says what it is for"
            yield Flag(x.key, "F14", "SUSPECTED", what, repair, control=why, fault="unread")


def _totals(examined: Sequence[Examination], completions: Sequence[Completion]) -> dict[Completion, float]:
    """Return what the trainer adds up for each completion, as far as functions answer; empty where one paid nothing."""
    if not all(x.rewards for x in examined):
        return {}
    paid = [(x.weight, dict(zip(x.completions, x.rewards))) for x in examined]
    return {each: sum(weight * (its.get(each) or 0.0) for weight, its in paid) for each in completions}


def one_for_all(completions: list[Any], **_: Any) -> list[float]:
    """Pay 1 for every completion: planted, to see whether equal rewards would be seen."""
    return [1.0] * len(completions)


def _judge_clip(kept: list[Completion], totals: list[float], clip: Sequence[float]) -> Iterator[Flag]:
    """Tell a range to which rewards are clipped, where it takes away all that tells completions of a prompt apart."""
    low, high = clip
    clipped = [min(max(total, low), high) for total in totals]
    right, wrong, _ = figures.compare_pairs(kept, totals)
    known = bool(right or wrong)
    if figures.is_flat(kept, totals):
        return
    what = f"reward_clip_range is ({low:g}, {high:g}), and {len(totals)} made-up completions got {figures.span(totals)}"
    repair = f"Set a range that holds the rewards, here {min(totals):g} to {max(totals):g}, or none."
    if figures.is_flat(kept, clipped):
        what += f": clipped they are {figures.value(clipped)}, the same for all completions of a prompt"
        tried = f"unclipped the right answer got {right[0][0]:g} and a wrong one {right[0][1]:g}" if right else ""
        if known:
            fix = ("arguments", {"reward_clip_range": None})
            yield Flag("", "F10", "FOUND", what, repair, tried, fault="clip", fix=fix)
        else:
            why = "which completion is right is not known, and others than these may lie in the range"
            yield Flag("", "F10", "SUSPECTED", what, repair, control=why, fault="clip")
    elif known and not any(figures.compare_pairs(kept, clipped)):
        what += ": clipped, a right and a wrong one in the same words get the same in each form that was tried"
        yield Flag("", "F14", "SUSPECTED", what, repair, control="a form that was not tried may differ", fault="clip")


def _judge_room(inputs: Inputs, kept: list[Completion], totals: list[float], longest: int) -> Iterator[Flag]:
    """Tell a sum that is the same for all completions that a run has room for, and less beyond, as by a penalty."""
    ids = inputs.encode([each.text for each in kept]) if inputs.encode else None
    paid = list(zip(kept, totals, map(len, ids or ())))
    fits = [(each, total) for each, total, length in paid if length <= longest]
    within = {each.row: total for each, total in fits}
    few = len({each.text for each, _ in fits}) < 2 or within.keys() != {each.row for each in kept}
    if few or not figures.is_flat([each for each, _ in fits], [total for _, total in fits]):
        return
    apart = [(length, each, total) for each, total, length in paid if abs(total - within[each.row]) > figures.SAME]
    if not apart or any(total > within[each.row] for each, total, _ in paid):  # what is paid needs room, as F11 tells
        return
    length, shortest, total = min(apart, key=operator.itemgetter(0))
    said = (
        f"the sum of all functions is {figures.value([total for _, total in fits])} for all {len(fits)} made-up "
        f"completions of at most {longest} tokens, which is all that max_completion_length lets this run draw, and "
        f"less beyond alone: {quote(shortest.text)}, of {length} tokens, gets {total:g} in place of "
        f"{within[shortest.row]:g}"
    )
    repair = "Let a function score what the completion says, within the length that this run can draw."
    yield Flag("", "F10", "SUSPECTED", said, repair, control="another completion of that length may get more")


def _judge_sum(
    examined: Sequence[Examination],
    kept: list[Completion],
    totals: list[float],
    weights: Sequence[float],
    whole: bool,
    accused: bool,
) -> Iterator[Flag]:
    """Judge what the trainer adds up: whether it differs, and its sign against the reference."""
    ends = [
        f"{total:g} ({quote(each.text)})"
        for total, each in (min(zip(totals, kept), key=_first), max(zip(totals, kept), key=_first))
    ]
    said = f"{len(totals)} made-up completions are told apart: they got {' to '.join(ends)}"
    if figures.is_flat(kept, totals):
        what = f"{said}: with reward_weights {list(weights)} the sum is the same for all completions of a prompt"
        repair = "Give each function that is to teach a weight that the others do not cancel."
        yield Flag("", "F10", "FOUND", what, repair)
        return
    first = examined[0]
    planted = Examination(one_for_all, first.key, dataclasses.replace(first.inputs, more={}, usual={}), kept)
    list(examine(planted))
    if planted.rewards and not planted.varies:
        control = "a function that always gives 1 was seen as equal"
        yield Flag("", "F10", "HELD", said, control=control)
    else:
        yield Flag(
            "", "F10", "NOT CHECKED", f"{said}; but a function that gives 1 to all of them is not seen as equal here"
        )
    asking = [x for x in examined if x.asks_reference]
    if accused or not asking:
        return
    column = asking[0].column
    if not whole:
        yield Flag(
            "", "F14", "NOT CHECKED", "a reward model adds to the sum, so the sign against the reference is unknown"
        )
        return
    if not any(x.weight for x in asking):
        pairs = next(filter(None, (x.pairs[0] for x in asking)), None)
        what = f"{', '.join(x.key for x in asking)} alone asks for the reference (column {column}), and its entry in "
        what += "reward_weights is 0: being right is not rewarded"
        repair = "Give it a weight above 0; reward_weights are in the order of reward_funcs."
        tried = f"with a weight of 1 right gets {pairs[0][0]:g} and wrong {pairs[0][1]:g}" if pairs else ""
        yield Flag("", "F14", "FOUND", what, repair, tried)
        return
    more, less, rows_less = figures.compare_pairs(kept, totals)
    if more:
        rights = [(total, each.text) for each, total in zip(kept, totals) if each.worth == "right"]
        most, text = max(rights, key=operator.itemgetter(0))
        said = f"the right answer (column {column}) got {most:g} as {quote(text)}"
        if max(figures.lead(kept, totals)) <= figures.SAME:
            what = f"{said}, and a completion that answers nothing no less"
            if any(max(figures.lead(x.completions, x.rewards), default=1.0) <= figures.SAME for x in asking):
                why = (
                    "the function that asks for the answer pays it to a text without one, in the forms that were tried"
                )
                repair = "Let the function pay nothing for an empty answer and for a part of the right one."
                yield Flag("", "F14", "SUSPECTED", what, repair, control=why)
            else:
                yield Flag("", "F14", "NOT CHECKED", f"{what}: read what each adds")
            return
        control = f"a wrong one in the same words got {more[0][1]:g}, the right one {more[0][0]:g}"
        yield Flag("", "F14", "HELD", said, control=control)
    elif less and rows_less == {each.row for each in kept} and any(x.pairs[0] for x in asking):
        yield wrong_sign("", "the sum of all functions has", column, less)


def _first(pair: tuple[float, Completion]) -> float:
    return pair[0]
