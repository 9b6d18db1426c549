"""What a reward function that tells completions apart may still be blind to: line breaks, the prompts' form, a sign."""

import functools
import random
import re
import sys
from collections.abc import Iterator, Sequence

import torch

from failurelab.preflight.answer import Finding
from failurelab.preflight.judges import reward_figures as figures
from failurelab.preflight.judges.reward_causes import (
    by_line_breaks,
    by_place,
    find_missing_column,
    find_other_reference,
    match_line_breaks,
)
from failurelab.preflight.judges.reward_figures import SAME
from failurelab.preflight.judges.reward_function import RewardFunction
from failurelab.preflight.repairs import Repair
from failurelab.reward_functions import patterns
from failurelab.reward_functions import source as reward_source
from failurelab.reward_functions.completions import OTHERS, asks_for_one_line, is_shown, literals_beside, readings

_NO_ANSWER = OTHERS[1]
_FORMS = 3  # of one answer that get less: fewer are a penalty for these forms


def judge_telling(reward: RewardFunction, totals: list[float] | None) -> Iterator[Finding]:
    """Yield what is to be said of a function that gives different rewards to the completions of a prompt.

    Args:
        reward: the function.
        totals: what the trainer adds up for each completion; None where that is unknown.
    """
    if not reward_source.reads_completions(reward.function):
        yield reward.finding(
            "F14",
            "chance",
            f"{reward.name} never reads the completions, and gives them different rewards "
            f"({figures.span(reward.rewards)}): every advantage is chance",
            "Let the reward depend on the completion.",
        )
        return
    more, less, rows_less = reward.compare()
    given = f"{reward.name} gives {figures.span(reward.rewards)}"
    answer: Finding | None = _place(reward)
    if not answer and not more and not less and reward.asks_reference:
        answer = find_other_reference(reward, f"{given}, and right answers no more than wrong ones")
    answer = answer or _line_breaks(reward) or _shown_form(reward) or _last_line_break(reward)
    if not answer and less and reward.asks_reference:
        answer = _wrong_completion(reward)
    if not answer and not more:
        answer = find_missing_column(reward, given)
    if answer:
        yield answer
    elif more and reward.asks_reference:
        yield from _rows_not_told(reward)
    elif less and reward.asks_reference and rows_less == reward.judged_rows:
        yield from _less_for_right(reward, less, totals)
    elif reward.asks_reference:
        yield reward.not_checked(
            f"{reward.name} asks for the reference (column {reward.column}), and no form of it got more than a wrong "
            "answer; another form may",
        )
    elif not more and not _likes_shown_form(reward):
        yield _direction(reward)


def _less_for_right(
    reward: RewardFunction, less: list[tuple[float, float]], totals: list[float] | None
) -> Iterator[Finding]:
    """Yield the wrong sign; or a penalty, such as one for a few forms of the right answer, or an order among equals."""
    turned = reward.ask(reward.probes[::-1]).values[::-1]
    in_order = reward.compare(values=turned)[0]
    penalty = reward.weight < 0 or len(less) < _FORMS * len(reward.judged_rows)
    penalty &= len(reward.seen.trainer.reward_funcs) > 1
    why = _why_no_penalty(reward, totals) if penalty else ""
    gives = f"{reward.name} gives the right answer {less[0][0]:g} and a wrong one {less[0][1]:g}"
    if in_order or (penalty and not why):
        yield reward.not_checked(
            f"{gives}, for {len(less)} pairs" + f", and its weight is {reward.weight:g}" * (reward.weight < 0)
            + (", and the other way round where they stand in another order" if in_order else ": a penalty?")
        )  # fmt: skip
    elif reward.weight < 0:
        what = f"{gives}, and times its weight {reward.weight:g} it has"
        given = [(reward.weight * right + 0.0, reward.weight * wrong + 0.0) for right, wrong in less]
        yield wrong_sign(what, reward.column, given, reward.part, why, reward.turned_weight)
    elif reward.weight:
        yield wrong_sign(f"{reward.name} has", reward.column, less, reward.part, why)


def _why_no_penalty(reward: RewardFunction, totals: list[float] | None) -> str:
    """Return what shows that less for right answers is no penalty that other functions outweigh; empty if nothing."""
    if totals is None or figures.is_flat(reward.probes, totals):
        return ""
    without = [total - reward.weight * (value or 0.0) for total, value in zip(totals, reward.rewards)]
    lost = max(figures.lead(reward.probes, totals)) <= SAME < min(figures.lead(reward.probes, without))
    return f", and in the sum it takes the lead of right answers over '' or {_NO_ANSWER!r}" * lost


def wrong_sign(
    what: str,
    column: str | None,
    less: Sequence[tuple[float, float]],
    part: str = "",
    why: str = "",
    undo: Repair | None = None,
) -> Finding:
    """Return the finding of right answers that get less."""
    right, wrong = less[0]
    return Finding(
        "F14",
        f"{what} the wrong sign: in the same words the right answer (column {column}) gets {right:g} and a wrong one "
        f"{wrong:g}, for {len(less)} pairs and never the other way round{why}",
        "Turn the sign of the reward (or of its entry in reward_weights), so that right answers get more.",
        undo=undo,
        tried=f"with the sign turned the right answer gets {0 - right:g} and the wrong one {0 - wrong:g}",
        part=part,
        fault="sign",
    )


def _place(reward: RewardFunction) -> Finding | None:
    """Ask again in the reverse order: a list of the script's own is in the dataset's order, a batch is not."""
    name, column = reward_source.own_list(reward.function, reward.arguments.rows)
    if name is None:
        return None
    turned = reward.ask(reward.probes[::-1]).values[::-1]
    pairs = [pair for pair in zip(reward.rewards, turned) if None not in pair and pair[0] != pair[1]]
    if not pairs:
        return None
    said = f"the same completion of the same prompt got {pairs[0][0]:g} in one order and {pairs[0][1]:g} in another"
    return by_place(reward, f"{said}: {reward.name}", name, column)


def _wrong_completion(reward: RewardFunction) -> Finding | None:
    """Ask about single completions where a wrong answer got more: rewards may be handed to another completion."""
    if reward.ask(prepare=_draw_otherwise).values != reward.rewards:
        return None  # a part of it is chance
    given = {(probe.row, probe.form, probe.kind): (probe, value) for probe, value in zip(reward.probes, reward.rewards)}
    tried = 0
    for (row, form, kind), (probe, value) in given.items():
        wrong, its_value = given.get((row, form, "wrong"), (None, None))
        if kind != "right" or wrong is None or value is None or its_value is None or tried == 4:
            continue
        if value >= its_value - SAME:
            continue
        tried += 1
        alone = [(reward.ask([each]).values or [None])[0] for each in (probe, wrong)]
        if None not in alone and alone[0] > alone[1] + SAME:
            return reward.finding(
                "F14",
                "order",
                f"{reward.name} gives {value:g} to {figures.quote(probe.text)} and {its_value:g} to the wrong "
                f"{figures.quote(wrong.text)} in one batch: rewards are in another order than the completions",
                "Return the rewards in the order of the completions.",
                tried=f"asked one at a time, they get {alone[0]:g} and {alone[1]:g}",
            )
    return None


def _draw_otherwise() -> None:
    """Let everything that is drawn at random in this process be drawn otherwise."""
    random.seed(1)
    torch.manual_seed(1)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(1)


def _line_breaks(reward: RewardFunction) -> Finding | None:
    """Compare reasoning in one line with the same in several; with re.DOTALL they are to get the same."""
    single, several = (figures.largest(reward.probes, reward.rewards, lines=lines) for lines in (1, 3))
    floor = figures.largest(reward.probes, reward.rewards, text=_NO_ANSWER)
    if not single or any(several[row] >= single[row] - SAME or several[row] > floor[row] + SAME for row in single):
        return None
    row, best = next(iter(single.items()))
    given = zip(reward.probes, reward.rewards)
    example = next(probe.text for probe, value in given if (probe.row, probe.lines, value) == (row, 1, best))
    evidence = (
        f"{reward.name} gives {best:g} to {figures.quote(example)}, and {several[row]:g} to every completion whose "
        "reasoning has more than one line"
    )
    if any(asks_for_one_line(row["prompt"]) for row in reward.arguments.rows):
        return reward.not_checked(f"{evidence}: the prompts ask for one line")
    healed = reward.ask(prepare=functools.partial(match_line_breaks, reward.function)).values
    then = figures.largest(reward.probes, healed, lines=3)
    if any(then.get(row, 0.0) < single[row] - SAME for row in single):
        return reward.not_checked(evidence) if reward.asks_reference else None
    return by_line_breaks(reward, evidence, f"with re.DOTALL completions of several lines get {then[row]:g} too")


def _shown_form(reward: RewardFunction) -> Finding | None:
    """Look whether the form that the prompts show gets no more than a completion that answers nothing."""
    shown, floor, top = _of_shown_forms(reward)
    if not shown or reward.weight < 0 or not _is_about_shown_form(reward):  # a penalty need not see that form
        return None
    text = figures.quote(next(probe.text for probe in reward.probes if probe.shown and probe.kind != "wrong"))
    row = next(iter(shown))
    if not reward.asks_reference and all(shown[each] < floor[each] - SAME for each in shown):
        return reward.finding(
            "F14",
            "sign",
            f"the wrong sign: {reward.name} gives {shown[row]:g} at most to the form that the prompts show, {text}, "
            f"and {floor[row]:g} to {_NO_ANSWER!r}",
            "Turn the sign of the reward, so that the form that is asked for gets more.",
            tried=f"with the sign turned they get {-shown[row]:g} and {-floor[row]:g}",
        )
    if not all(shown[each] <= floor[each] + SAME < top[each] for each in shown) or _is_best_shown(reward, top):
        return None
    best = max(zip(reward.probes, reward.rewards), key=lambda pair: (pair[1] or 0.0, -len(pair[0].text)))
    return reward.finding(
        "F14",
        "form",
        f"{reward.name} gives {shown[row]:g} to the form that the prompts show, {text}, as to {_NO_ANSWER!r}",
        "Let the prompts show the form that the function reads, or the function read what they show.",
        tried=f"another form, {figures.quote(best[0].text)}, gets {best[1]:g}",
    )


def _is_best_shown(reward: RewardFunction, top: dict[int, float]) -> bool:
    """Whether a form with full marks has all of the prompts' words, more than were copied: markers beside tags, say.

    A form of the same words that is only laid out otherwise is not the one that is shown.
    """
    for probe, value in zip(reward.probes, reward.rewards):
        if probe.kind == "wrong" or value is None or value <= top[probe.row] - SAME:
            continue
        row = reward.arguments.rows[probe.row]
        answers = readings(row.get(reward.column))
        copied = [literals_beside(each.text, answers) for each in reward.probes if each.shown and each.row == probe.row]
        if is_shown(probe.text, row["prompt"], answers) and literals_beside(probe.text, answers) not in copied:
            return True
    return False


def _last_line_break(reward: RewardFunction) -> Finding | None:
    """Look whether a line break at the end of a completion is all that it pays for: few completions end with one."""
    floor, given = figures.largest(reward.probes, reward.rewards, text=_NO_ANSWER), {}
    for probe, value in zip(reward.probes, reward.rewards):
        if probe.kind != "wrong" and value is not None:
            given[probe.row, probe.text] = value
    paid = {key: value for key, value in given.items() if value > floor[key[0]] + SAME}
    without = {key: given.get((key[0], key[1].removesuffix("\n"))) for key in paid if key[1].endswith("\n")}
    if not paid or without.keys() != paid.keys():
        return None
    if any(value is None or value > floor[key[0]] + SAME for key, value in without.items()):
        return None
    key, best = max(paid.items(), key=lambda item: item[1])
    text = key[1].removesuffix("\n")
    return reward.finding(
        "F14",
        "last line break",
        f"{reward.name} pays only where a line break follows the last tag: {figures.quote(text)} gets {without[key]:g}",
        "Let the pattern end without a line break, or with \\s*$.",
        tried=f"with a line break behind it, it gets {best:g}",
    )


def _of_shown_forms(reward: RewardFunction) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Return of each row the most that a shown form got, what no answer got, and the most of all."""
    return (
        figures.largest(reward.probes, reward.rewards, shown=True),
        figures.largest(reward.probes, reward.rewards, text=_NO_ANSWER),
        figures.largest(reward.probes, reward.rewards),
    )


def _is_about_shown_form(reward: RewardFunction) -> bool:
    """Whether it asks for the answer, or names a tag of that form itself."""
    tags = {tag for probe in reward.probes if probe.shown for tag in re.findall(r"<(\w+)>", probe.text)}
    own = " ".join(patterns.texts(reward.function))
    return reward.asks_reference or any(tag in own for tag in tags)


def _likes_shown_form(reward: RewardFunction) -> bool:
    shown, floor, top = _of_shown_forms(reward)
    return bool(shown) and all(shown[row] > top[row] - SAME > floor[row] for row in shown)


def _rows_not_told(reward: RewardFunction) -> Iterator[Finding]:
    """Look at the rows whose right answer gets no more than a wrong one, while that of another row does."""
    judged = reward.judged_rows
    untold = [row for row in sorted(judged) if not _told(reward, row=row)]
    for row in untold:
        probes = [probe for probe in reward.probes if probe.row == row]
        alone, *_ = reward.compare(probes, reward.ask(probes).values)
        if alone:
            yield reward.finding(
                "F14",
                "row",
                f"{reward.name} tells the right answer from a wrong one for the first prompt of a batch, and not for "
                f"{len(untold)} of {len(judged)}: it compares them with another prompt's reference",
                f"Compare each completion with its own entry of {reward.column}.",
                tried=f"asked about that prompt alone, it gives {alone[0][0]:g} and {alone[0][1]:g}",
            )
            return
    reference = str(reward.arguments.rows[untold[0] if untold else 0][reward.column])[:40]
    if untold:
        yield reward.not_checked(
            f"{reward.name} gives the right answer and a wrong one the same for {len(untold)} of {len(judged)} rows, "
            f"such as {reward.column} {reference!r}, in all forms that were tried",
        )
    elif not _told(reward, variant=0):
        why = f"{reward.name} rewards another way to write the answer, and never that of the dataset, {reference!r}"
        yield reward.not_checked(why)


def _told(reward: RewardFunction, **wanted: int) -> bool:
    given = zip(reward.probes, reward.rewards)
    pairs = [pair for pair in given if all(getattr(pair[0], name) == each for name, each in wanted.items())]
    return bool(reward.compare([probe for probe, _ in pairs], [value for _, value in pairs])[0])


def _direction(reward: RewardFunction) -> Finding:
    """Return which completion gets the least and which the most: a line to read, and no verdict."""
    pairs = zip(reward.probes, reward.rewards)
    given = [
        (value, len(probe.text), probe.text) for probe, value in pairs if value is not None and probe in reward.answered
    ]
    least, most = min(given), max(given, key=lambda each: (each[0], -each[1]))
    ends = [f"{value:g} for {figures.quote(text)} ({size} characters)" for value, size, text in (least, most)]
    why = f"{reward.name} has no reference to be compared with, so read its direction: {', '.join(ends)}"
    return reward.not_checked(why)
