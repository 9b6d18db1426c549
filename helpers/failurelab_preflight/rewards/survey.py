"""All reward functions of a trainer, each examined alone, and what the trainer adds up: one table with flags."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from failurelab.guards.reward import key_of
from failurelab.measure import counts
from failurelab_preflight.finding import Finding
from failurelab_preflight.repairs import Arguments
from failurelab_preflight.reward_table import Line, RewardTable, quote
from failurelab_preflight.rewards import figures, forms, signature
from failurelab_preflight.rewards.examination import RAISES, Examination
from failurelab_preflight.rewards.forms import Completion
from failurelab_preflight.rewards.inputs import OWN, Inputs
from failurelab_preflight.rewards.judging import examine, judge, wrong_sign


def ask(
    functions: Any,
    *,
    prompt: Any = "What is 3 + 4?",
    answer: Any = None,
    columns: Mapping[str, Any] | None = None,
    weights: Sequence[float] | None = None,
) -> RewardTable:
    """Ask reward functions about some forty completions made up for a prompt; a notebook shows the table.

        from failurelab_preflight.rewards import ask
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
    return survey(functions, inputs, weights=weights)


def survey(
    functions: Sequence[Any],
    inputs: Inputs,
    *,
    weights: Sequence[float] | None = None,
    whole: bool = True,
    places: Sequence[int] = (),
    opened: str = "",
    drawn: Sequence[str] = (),
    group: int = 4,
    **options: Any,
) -> RewardTable:
    """Ask each function alone about made-up completions, and judge what the trainer adds up.

    Args:
        functions: all of the trainer's.
        inputs: what they are called with.
        weights: of each; all 1 by default.
        whole: whether nothing else, such as a reward model, adds to the sum.
        places: of the functions that are asked; all by default.
        opened: what the prompt has written of a completion already.
        drawn: completions of a model, to be asked about too.
        group: completions of one prompt that stand together in the run.
        options: of `Examination`.
    """
    weights = [1.0] * len(functions) if weights is None else list(weights)
    places = list(places) or list(range(len(functions)))
    asked = [name for place in places for name in signature.asked_columns(functions[place])]
    column = signature.reference_column(inputs.rows, asked) or ""
    completions = forms.make(inputs.rows, column, opened, drawn)
    examined = []
    for n in places:
        turned = Arguments({"reward_weights": [-weight if m == n else weight for m, weight in enumerate(weights)]})
        given = (functions[n], key_of(functions, n), inputs, completions, column, opened, weights[n])
        examined.append(Examination(*given, alone=len(functions) == 1, turned=turned, **options))
    flags = [list(examine(x)) for x in examined]
    sums = _totals(examined, completions)
    for x, about in zip(examined, flags):
        if x.changed and x is not examined[-1]:
            what = f"{x.key} changes {' and '.join(x.changed)} in place, and those after it are given what it left"
            repair = "Work on a copy: write into no list or message that the function is given."
            about.append(x.suspected("in place", what, repair, "what the others pay for it was not asked"))
        if x.rewards:
            totals = [sums[each] for each in x.completions] if sums and whole else None
            about += filter(None, [judge(x, totals)])
    said = [flag for about in flags for flag in about]
    kept = [each for each in completions if sums and all(x.paid[each] != RAISES for x in examined)]
    if kept and any(x.varies for x in examined):
        totals = [sums[each] for each in kept]
        accused = any(flag.accuses for flag in said)
        said += _judge_sum(examined, kept, totals, weights, whole, accused, group)
    first = dict.fromkeys(each for x in examined for each in x.paid if each.row == 0)
    lines = [Line(c.worth, c.form, c.text, [x.paid.get(c, "not asked") for x in examined]) for c in first]
    part = options.get("part")
    notes = [f"the functions were called with {part} completions at a time, as each process calls them"] * bool(part)
    return RewardTable([x.key for x in examined], lines, said, notes)


def _totals(examined: Sequence[Examination], completions: Sequence[Completion]) -> dict[Completion, float]:
    """Return what the trainer adds up for each completion, as far as functions answer; empty where one paid nothing."""
    if not all(x.rewards for x in examined):
        return {}
    paid = [(x.weight, dict(zip(x.completions, x.rewards))) for x in examined]
    return {each: sum(weight * (its.get(each) or 0.0) for weight, its in paid) for each in completions}


def one_for_all(completions: list[Any], **_: Any) -> list[float]:
    """Pay 1 for every completion: planted, to see whether equal rewards would be seen."""
    return [1.0] * len(completions)


def _judge_sum(
    examined: Sequence[Examination],
    kept: list[Completion],
    totals: list[float],
    weights: Sequence[float],
    whole: bool,
    accused: bool,
    group: int,
) -> Iterator[Finding]:
    """Judge what the trainer adds up: whether it differs, and its sign against the reference."""
    by_total = sorted(zip(totals, kept), key=operator.itemgetter(0))
    ends = [f"{total:g} ({quote(each.text)})" for total, each in (by_total[0], by_total[-1])]
    said = f"{len(totals)} made-up completions are told apart: they got {' to '.join(ends)}"
    if figures.is_flat(kept, totals):
        what = f"{said}: with reward_weights {list(weights)} the sum is the same for all completions of a prompt"
        repair = "Give each function that is to teach a weight that the others do not cancel."
        yield Finding("F10", what, repair)
        return
    if flag := _judge_groups(examined, kept, totals, said, group):
        yield flag
        return
    first = examined[0]
    planted = Examination(one_for_all, first.key, dataclasses.replace(first.inputs, more={}, usual={}), kept)
    list(examine(planted))
    if planted.rewards and not planted.varies:
        control = "a function that always gives 1 was seen as equal"
        yield Finding.held("F10", said, control)
    else:
        why = f"{said}; but a function that gives 1 to all of them is not seen as equal here"
        yield Finding.not_checked("F10", why)
    asking = [x for x in examined if x.asks_reference]
    if accused or not asking:
        return
    column = asking[0].column
    if not whole:
        yield Finding.not_checked("F14", "a reward model adds to the sum, so the sign against the reference is unknown")
        return
    if not any(x.weight for x in asking):
        what = f"{', '.join(x.key for x in asking)} alone asks for the reference (column {column}), and its entry in "
        what += "reward_weights is 0: being right is not rewarded"
        repair = "Give it a weight above 0; reward_weights are in the order of reward_funcs."
        paid = next(filter(None, (x.compare(x.rewards)[0] for x in asking)), None)
        tried = f"with a weight of 1 right gets {paid[0][0]:g} and wrong {paid[0][1]:g}" if paid else ""
        yield Finding("F14", what, repair, tried=tried)
        return
    more, less = figures.compare_pairs(kept, totals)
    if more:
        rights = [(total, each.text) for each, total in zip(kept, totals) if each.worth == "right"]
        most, text = max(rights, key=operator.itemgetter(0))
        said = f"the right answer (column {column}) got {most:g} as {quote(text)}"
        if max(figures.lead(kept, totals)) <= figures.SAME:
            what = f"{said}, and a completion that answers nothing no less"
            if any(max(figures.lead(x.completions, x.rewards), default=1.0) <= figures.SAME for x in asking):
                why = "the function that asks for the answer pays a text without one, in the forms that were tried"
                repair = "Let the function pay nothing for an empty answer and for a part of the right one."
                yield Finding.suspected("F14", what, why, repair)
            else:
                yield Finding.not_checked("F14", f"{what}: read what each adds")
            return
        rows = {each.row for each in kept if each.worth == "right"}
        if untold := rows - {row for *_, row in more}:
            what = f"for {len(untold)} of {len(rows)} rows no form of the answer got more than a wrong one in it"
            yield Finding.not_checked("F14", f"{said}; {what}")
            return
        control = f"a wrong one in the same words got {more[0][1]:g}, the right one {more[0][0]:g}"
        yield Finding.held("F14", said, control)
    elif {row for *_, row in less} == {each.row for each in kept} and any(x.compare(x.rewards)[0] for x in asking):
        yield wrong_sign("", "the sum of all functions has", column, less)


def _judge_groups(
    examined: Sequence[Examination], kept: list[Completion], totals: list[float], said: str, size: int
) -> Finding | None:
    """Ask once more in the layout of the run: a function may pay each completion what its whole group is worth.

    A group is `size` completions of one prompt, the best and the worst in turn, and one group is behind the other.
    """
    asked: list[Completion] = []
    for row in sorted({each.row for each in kept}):
        own = sorted([pair for pair in zip(kept, totals) if pair[0].row == row], key=operator.itemgetter(1))
        if own[-1][1] - own[0][1] > figures.SAME:
            turns = [own[-1 - at // 2 if at % 2 else at // 2][0] for at in range(len(own))]
            asked += itertools.islice(itertools.cycle(turns), size)
    paid = [0.0] * len(asked)
    for x in examined:
        reply = x.ask(asked)
        if reply.error or len(reply.values) != len(asked):
            why = reply.unasked or reply.error or reply.returned or f"{len(reply.values)} rewards"
            what = f"{said}; in groups of {size}, as the run has them, {x.key} could not be asked: {why}"
            return Finding.not_checked("F10", what)
        numbers = (0.0 if value is None or math.isnan(value) else value for value in reply.values)
        paid = [total + x.weight * value for total, value in zip(paid, numbers)]
    counted = counts.of_rewards([[round(each, 9) for each in paid[at : at + size]] for at in range(0, len(paid), size)])
    if counted["flat_groups"] < counted["groups"]:
        return None
    what = f"{said}; but in groups of {size}, as the run has them, all completions of each of {counted['groups']} "
    what += "groups get the same, right and wrong ones together, so every advantage is 0"
    return Finding("F10", what, "Pay each completion its own worth, not that of its group.", fault="groups")
