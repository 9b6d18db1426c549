"""One reward function judged alone: what it takes and returns, and whether it pays for what it should.

A form that was not thought of is no failure, so without a cause that was undone a function is NOT CHECKED.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

from failurelab_preflight.finding import Finding
from failurelab_preflight.reward_table import quote
from failurelab_preflight.rewards import asking, figures, forms
from failurelab_preflight.rewards.asking import Reply
from failurelab_preflight.rewards.causes import cause_of, never_arrives
from failurelab_preflight.rewards.examination import RAISES, Examination
from failurelab_preflight.rewards.figures import SAME
from failurelab_preflight.rewards.forms import NO_ANSWER
from failurelab_preflight.rewards.inputs import Untouchable

_ALONE = {"none": 3, "right": 16, "other": 8, "wrong": 2}  # completions that are asked about alone
_NOISE = 0.05  # of what all functions pay together: chance against ties is no larger
_LET_IT_DEPEND = "Let the reward depend on the completion."


def examine(x: Examination) -> Iterator[Finding]:
    """Call a function as the trainer does; keep its rewards, and yield what is wrong before any is compared."""
    lacking, extra = x.inputs.misfit(x.function)
    if lacking:
        said = f"{x.key} asks for {', '.join(lacking)}, which never arrives: it is given {', '.join(x.inputs.names())}"
        yield never_arrives(x, lacking[0], f"{said}. A TypeError ends the run", only=len(lacking) == 1, ends=True)
        return
    if extra:
        said = f"{x.key} takes no {', '.join(extra)}, which this trainer hands to it: a TypeError ends the run"
        values = x.ask(without=extra).values
        tried = f"called without, it gives {figures.span(values)}" if values else ""
        yield x.found("keywords", said, "Add **kwargs to the function's arguments.", tried, ends=True)
        return
    reply = x.ask()
    if reply.unasked:
        yield x.not_checked(f"{x.key} could not be asked: {reply.unasked}")
        return
    if reply.error:
        x.paid = {x.completions[place]: RAISES for place in reply.raised or range(len(x.completions))}
        lacks = reply.key in x.asked and reply.key not in x.inputs.columns
        yield _raises(x, reply, lacks)
        if lacks or not reply.raised:
            return
    x.changed = reply.changed
    answered = [place for place in range(len(x.completions)) if place not in reply.raised]
    if problem := _no_numbers(x, reply, len(answered)):
        yield problem
        return
    x.paid = {each: RAISES if n in reply.raised else reply.values[n] for n, each in enumerate(x.completions)}
    x.completions, values = [x.completions[n] for n in answered], [reply.values[n] for n in answered]
    odd = ["None" if v is None else "inf" if math.isinf(v) else "NaN" * math.isnan(v) for v in values]
    what = next((name for name in (("inf",) if x.masked else ("inf", "NaN", "None")) if name in odd), "")
    if what:
        does = "an error in this trl" if what == "None" else "its group's advantages NaN, and then the weights"
        said = f"{x.key} gives {what} for {odd.count(what)} of {len(odd)} completions, which makes {does}"
        yield x.found("no number", said, "Return a finite number for every completion.", ends=what == "None")
    elif problem := _second_call(x, values):
        yield problem
    else:
        x.rewards = [None if value is None or math.isnan(value) else value for value in values]


def _raises(x: Examination, reply: Reply, lacks: bool) -> Finding:
    """Return the flag of a function that raises, for some completions or for all."""
    said, repair = f"{x.key} raises {reply.error}, for", "Let it give its lowest reward to what it cannot read."
    if lacks:
        said = f"{x.key} reads the column {reply.key!r}, which never arrives: a KeyError ends the run"
        return never_arrives(x, reply.key or "", said, ends=True)
    if not reply.raised:
        if cause := cause_of(x, f"{said} this dataset's completions", ["form"]):
            return dataclasses.replace(cause, ends=True)
        return x.found("raises", f"{said} completions in plain words", repair, ends=True)
    raised = [x.completions[place] for place in reply.raised]
    example = next((each for each in raised if each.text and each.worth == "none"), raised[0])
    row = x.inputs.rows[example.row]
    held = ", ".join(f"{name}={quote(str(row[name]), 40)}" for name in x.asked if name in row)
    said += f" {len(raised)} of {len(x.completions)} completions, such as {quote(example.text)}"
    said += f" with {held}" * bool(held)
    tried = f"without those it gives {figures.span(reply.values) if reply.values else reply.returned}"
    return x.found("raises", said, repair, tried, ends=True)


def _no_numbers(x: Examination, reply: Reply, count: int) -> Finding | None:
    """Return what is wrong with rewards that are no list with one for each completion."""
    repair = "Return a list with one reward for each completion, also for those that it cannot read."
    if reply.returned == asking.ONE_NUMBER or len(reply.values) == 1 < count:
        said = f"{x.key} gives one number for {count} completions: a trl that takes it gives it to all of them, so "
        said += "every advantage is 0, and later releases refuse it"
        return x.found("one number", said, repair, _one_at_a_time(x), "F10")
    if len(reply.values) == len(x.completions):
        return None
    what = f"gives {len(reply.values)} rewards for {count} completions"
    if reply.returned:
        what = f"returns {reply.returned}, which is no list of numbers"
    return x.found("count", f"{x.key} {what}", repair, ends=True)


def _second_call(x: Examination, values: figures.Rewards) -> Finding | None:
    """Ask about the same completions again, in a process in which they were asked about for other references."""
    rows = x.inputs.rows
    after = {id(row): rows[(place + 1) % len(rows)] for place, row in enumerate(rows)}
    others = {x.column: lambda row: after[id(row)].get(x.column)} if x.asks_reference else {}
    first = x.inputs.make(x.completions, columns=others, wanted=x.wanted)

    def prepare() -> None:
        with contextlib.suppress(Exception):  # it may refuse another question's reference
            asking.call(x.function, first)

    again = x.ask(prepare=prepare)
    repair = "Begin each call anew: keep no list, set, cache or iterator outside of the function."
    if again.unasked:
        return None
    if again.error or len(again.values) != len(values):
        what = f"raises {again.error}" if again.error else f"gives {len(again.values)} rewards"
        said = f"{x.key} {what} at its second call, for {len(values)} completions as at the first"
        return x.found("second call", said, repair, "a first call gives one reward for each", ends=True)
    if x.compare(values)[0] and not x.compare(again.values)[0]:
        said = f"{x.key} pays right answers more at its first call, and no more than wrong ones at its second, for the "
        said += "same completions: it keeps what it was asked, and the next steps are judged by that"
        return x.suspected("memory", said, repair, "it may be meant, as for new answers alone")
    return None


def _one_at_a_time(x: Examination) -> str:
    """Ask about single completions of the first prompt; return what they get, if that differs."""
    first = [each for each in x.completions if each.row == x.completions[0].row]
    chosen = [each for worth, most in _ALONE.items() for each in [c for c in first if c.worth == worth][:most]]
    paid: dict[float, str] = {}
    for each in chosen:
        values = x.ask([each]).values
        if len(values) == 1 and values[0] is not None:
            paid.setdefault(values[0], each.text)
        if len(paid) > 1:
            (low, one), (high, another) = sorted(paid.items())
            return f"asked one at a time, {quote(one)} gets {low:g} and {quote(another)} {high:g}"
    return ""


def judge(x: Examination, totals: list[float] | None) -> Finding | None:
    """Return what is to be said of a function that has paid; None where nothing is.

    Args:
        x: the function.
        totals: what the trainer adds up for each of its completions; None where that is unknown.
    """
    if not x.varies:
        return _why_equal(x)
    more, less = x.compare(x.rewards)
    if (less or not more) and (flag := _chance(x, totals)):
        return flag
    said = f"{x.key} gives {figures.span(x.rewards)}, and right answers no more than wrong ones"
    if x.asks_reference and not more:
        if not less and (flag := cause_of(x, said, ["column", "reference"])):
            return flag
        rows = {each.row for each, value in zip(x.completions, x.rewards) if value is not None}
        if less and {row for *_, row in less} == rows:
            return _less_for_right(x, less, totals)
    if flag := _line_breaks(x) or _shown_form(x):
        return flag
    if x.asks_reference:
        said = f"{x.key} asks for the reference (column {x.column}), and no form of it got more than a wrong answer"
        return None if more else x.not_checked(f"{said}; another form may")
    if not (more or less) and (flag := cause_of(x, said, ["column"])):
        return flag
    return None if more else _direction(x)


def _why_equal(x: Examination) -> Finding:
    """Return why a function pays the same for all completions of each prompt, as far as one thing changed tells."""
    said = f"{x.key} gives {figures.value(x.rewards)} for all {len(x.rewards)} made-up completions"
    if flag := cause_of(x, said):
        return flag
    touched = x.ask(form="plain text", change=lambda text: Untouchable())
    if len(touched.values) == len(x.rewards) and not touched.raised:
        said += ", and for what no function can read: every advantage is 0"
        if not x.alone:
            return x.not_checked(f"{said}, but for the others", "F10")
        return x.suspected("unread", said, _LET_IT_DEPEND, "it may catch its own errors", "F10")
    own_row = [each for each in x.completions if each.row == x.completions[0].row]
    if tells := x.tells(own_row, is_right=True):
        said += ", and tells those of one row apart where it is asked about them alone: it pairs completions with the "
        said += "columns of other rows"
        return x.found("pairs", said, "Read each column at the completion's own place.", tells)
    if tried := _one_at_a_time(x):
        said += ": it gives one number for a whole batch, or a whole prompt, so every advantage is 0"
        return x.found("batch", said, "Return each completion's own reward.", tried, "F10")
    pays = any(value and value > 0 for value in x.rewards)  # what finds nothing that it looks for pays nothing
    if pays and x.alone:
        said += ", also where they answer nothing: every advantage is 0"
        return x.suspected("", said, _LET_IT_DEPEND, "another form may get another reward", "F10")
    if pays:
        return x.not_checked(f"{said}, so it adds nothing to any advantage", "F10")
    return x.not_checked(f"{said}: none may have its form. Call it by hand with a completion that deserves more")


def _best(x: Examination, **wanted: object) -> dict[int, float]:
    """Return the most that each row's completions with these attributes got, those with a wrong answer left out."""
    return figures.largest(x.completions, x.rewards, **wanted)


def _floor(x: Examination) -> dict[int, float]:
    """Return what a completion that answers nothing gets, of each row."""
    return dict.fromkeys({each.row for each in x.completions}, 0.0) | _best(x, text=NO_ANSWER)


def _chance(x: Examination, totals: list[float] | None) -> Finding | None:
    """Look whether one and the same completion is paid as differently as the made-up ones are, within a prompt."""
    values = x.ask(change=lambda text: NO_ANSWER).values
    of_row: dict[int, list[float | None]] = {}
    for each, value in zip(x.completions, values):
        of_row.setdefault(each.row, []).append(value)
    apart = max(map(figures.width, of_row.values()), default=0.0)
    if apart < 0.5 * figures.width(x.rewards):
        return None
    said = f"{x.key} gives one completion, asked again and again, rewards that are {apart:.2g} apart"
    if abs(x.weight) * figures.width(x.rewards) < _NOISE * figures.width(totals or ()):
        return x.not_checked(f"{said}: chance, small beside what all functions pay ({figures.span(totals or ())})")
    return x.found("chance", f"{said}: every advantage is chance", _LET_IT_DEPEND)


def _line_breaks(x: Examination) -> Finding | None:
    """Compare reasoning in one line with the same in several, and these with their line breaks taken out."""
    single, several, floor = _best(x, lines=1), _best(x, lines=3), _floor(x)
    if not single or any(several[row] > floor[row] + SAME or single[row] <= floor[row] + SAME for row in single):
        return None
    row, best = next(iter(single.items()))
    paid = zip(x.completions, x.rewards)
    example = quote(next(each.text for each, value in paid if (each.row, each.lines, value) == (row, 1, best)))
    said = f"{x.key} gives {best:g} to {example}, and {several[row]:g} to all whose reasoning has more than one line"
    if any(forms.asks_for_one_line(each["prompt"]) for each in x.inputs.rows):
        return x.not_checked(f"{said}: the prompts ask for one line")
    joined = x.ask(change=lambda text: text.replace("\n", " ")).values
    then = figures.largest(x.completions, joined, lines=3)
    if any(then.get(each, 0.0) < single[each] - SAME for each in single):
        return x.not_checked(said) if x.asks_reference else None
    tried = f"with blanks in the place of line breaks they get {then[row]:g} too"
    repair = "Let its patterns match line breaks (re.DOTALL), or read the text without them."
    return x.found("line breaks", said, repair, tried)


def _shown_form(x: Examination) -> Finding | None:
    """Look whether the form that the prompts show gets no more than a completion that answers nothing."""
    shown, floor, top = _best(x, shown=True), _floor(x), _best(x)
    if not (shown and x.asks_reference) or x.weight < 0:  # a penalty need not see that form
        return None
    if not all(shown[each] <= floor[each] + SAME < top[each] for each in shown):
        return None
    row, text = next(iter(shown)), quote(next(each.text for each in x.completions if each.shown))
    said = f"{x.key} gives {shown[row]:g} to the form that the prompts show, {text}, and {floor[row]:g} to "
    best = max(zip(x.completions, x.rewards), key=lambda pair: (pair[1] or 0.0, -len(pair[0].text)))
    repair = "Let the prompts show the form that the function reads, or the function read what they show."
    return x.found("form", f"{said}{NO_ANSWER!r}", repair, f"another form, {quote(best[0].text)}, gets {best[1]:g}")


def _less_for_right(x: Examination, less: list[figures.Pair], totals: list[float] | None) -> Finding | None:
    """Return the wrong sign; beside other functions, only if right answers lose their lead in the sum by it."""
    said, loses = f"{x.key} gives the right answer {less[0][0]:g} and a wrong one {less[0][1]:g}", ""
    if totals is not None and not figures.is_flat(x.completions, totals):
        without = [total - x.weight * (value or 0.0) for total, value in zip(totals, x.rewards)]
        if max(figures.lead(x.completions, totals)) <= SAME < min(figures.lead(x.completions, without)):
            loses = f", and in the sum it takes the lead of right answers over '' or {NO_ANSWER!r}"
    if x.compare(x.ask(x.completions[::-1]).values[::-1])[0]:
        return x.not_checked(f"{said}, and the other way round where they stand in another order")
    if not x.weight or not (x.alone or loses):
        return x.not_checked(f"{said}, for {len(less)} pairs, and its weight is {x.weight:g}: a penalty?")
    if x.weight > 0:
        return wrong_sign(x.place, f"{x.key} has", x.column, less, loses)
    paid = [(x.weight * right + 0.0, x.weight * wrong + 0.0, row) for right, wrong, row in less]
    what = f"{said}, and times its weight {x.weight:g} it has"
    return dataclasses.replace(wrong_sign(x.place, what, x.column, paid, loses), undo=x.turned)


def wrong_sign(part: str, what: str, column: str, less: Sequence[figures.Pair], why: str = "") -> Finding:
    """Return the flag of right answers that get less."""
    right, wrong, _ = less[0]
    said = f"{what} the wrong sign: in the same words the right answer (column {column}) gets {right:g} and a wrong "
    said += f"one {wrong:g}, for {len(less)} pairs and never the other way round{why}"
    repair = "Turn the sign of the reward (or of its entry in reward_weights), so that right answers get more."
    tried = f"with the sign turned the right answer gets {0 - right:g} and the wrong one {0 - wrong:g}"
    return Finding("F14", said, repair, tried=tried, part=part, fault="sign")


def _direction(x: Examination) -> Finding:
    """Return which completion gets the least and which the most: a line to read, and no verdict."""
    paid = [(value, len(c.text), c.text) for c, value in zip(x.completions, x.rewards) if value is not None]
    least, most = min(paid), max(paid, key=lambda each: (each[0], -each[1]))
    ends = [f"{value:g} for {quote(text)} ({size} characters)" for value, size, text in (least, most)]
    return x.not_checked(f"{x.key} has no reference to be compared with, so read its direction: {', '.join(ends)}")
