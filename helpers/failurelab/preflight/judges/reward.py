"""F10 and F14: the script's own reward functions, each asked alone about completions whose worth is known.

`completions` makes them up, `reward_arguments` hands them over as the trainer does, `asking` calls the function in a
process of its own, `reward_function` takes what it gives. `reward_causes` says why one gives the same to all, and
`reward_telling` what another is blind to. Here the functions are asked in turn, and what the trainer adds up is judged.

F10 is a reward that is the same for all completions of a prompt, F14 one that never sees what it needs. A form that was
not thought of is no failure, so without a cause that was undone a function is NOT CHECKED.

Upstream: TRL #3452, #3857 (equal rewards), #4501, #2771, #6966, PR #5775, #5902, open-r1 #237, unsloth #1761 (rewards
that never see what they need).
"""

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from failurelab.guards.reward import reward_weights
from failurelab.preflight.answer import Finding, Verdict
from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges import reward_figures as figures
from failurelab.preflight.judges.reward_arguments import Arguments
from failurelab.preflight.judges.reward_causes import explain_equal
from failurelab.preflight.judges.reward_function import RewardFunction
from failurelab.preflight.judges.reward_telling import judge_telling, wrong_sign
from failurelab.preflight.judges.rows import prompted
from failurelab.reward_functions import completions
from failurelab.reward_functions import source as reward_source

ROWS = 4  # asked of
_LOOKED_AT = 48  # rows among which they are chosen
_DRAWN = 4  # completions of this run that are asked about too
_COLD = 0.05  # a temperature under which the likeliest token is drawn nearly always


def judge_rewards(seen: Seen) -> Iterator[Finding]:
    """Call the trainer's reward functions on made-up completions; tell what they can never reward."""
    functions = getattr(seen.trainer, "reward_funcs", None)
    if not isinstance(functions, list) or not functions:
        if any(getattr(seen.trainer, name, None) is not None for name in ("reward_model", "judge")):
            yield Finding.not_checked("F10", "rewards come from a reward model or a judge, which is not asked")
        return
    own = [function for function in functions if callable(function) and not isinstance(function, torch.nn.Module)]
    rows = _choose_rows(seen, own)
    if not rows:
        yield Finding.not_checked("F10", "the dataset has no column `prompt` that could be read")
        return
    if getattr(seen.trainer, "environment_factories", None):
        yield Finding.not_checked("F10", "rewards come from environments, which are not entered")
        return
    if len(own) < len(functions):
        yield Finding.not_checked("F10", f"{len(functions) - len(own)} reward model(s) are not asked")
    greedy = _find_greedy_sampling(seen)
    if greedy:
        yield Finding(
            "F10",
            f"{greedy}: the completions of a prompt are all the same, and so are their rewards",
            "Sample: temperature=1.0, and neither top_k=1 nor do_sample=False.",
        )
    if own:
        yield from _ask_each(seen, rows, own)


def _choose_rows(seen: Seen, functions: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a few rows with a prompt, with each value of a column that functions ask for, where those are few."""
    rows = prompted(seen, _LOOKED_AT)
    chosen = rows[:: max(1, len(rows) // ROWS)][:ROWS]
    for name in sorted({name for function in functions for name in reward_source.asked_columns(function)}):
        kinds = {row[name]: row for row in reversed(rows) if isinstance(row.get(name), str)}
        if len(kinds) <= ROWS:
            chosen += [row for value, row in kinds.items() if all(value != other.get(name) for other in chosen)]
    return chosen


def _find_greedy_sampling(seen: Seen) -> str:
    """Return what in the arguments makes all completions of a prompt the same; empty if nothing does."""
    asked = {**seen.asked, **(seen.asked.get("generation_kwargs") or {})}
    temperature, top_p = asked.get("temperature"), asked.get("top_p")
    if isinstance(temperature, (int, float)) and temperature <= _COLD:
        return f"temperature is {temperature:g}"
    if isinstance(top_p, (int, float)) and top_p <= _COLD:
        return f"top_p is {top_p:g}"
    return "top_k is 1" if asked.get("top_k") == 1 else "do_sample is False" if asked.get("do_sample") is False else ""


def _ask_each(seen: Seen, rows: list[dict[str, Any]], functions: list[Any]) -> Iterator[Finding]:
    arguments = Arguments(seen, rows)
    asked = [name for function in functions for name in reward_source.asked_columns(function)]
    column, opened = reward_source.reference_column(rows, asked), arguments.opened()
    probes = completions.make(rows, column, functions, opened, _drawn(seen))
    every = seen.trainer.reward_funcs
    rewards = [
        RewardFunction(function, seen, arguments, probes, column or "", opened, weight, place)
        for place, (function, weight) in enumerate(zip(every, reward_weights(seen.trainer, len(every))))
        if any(function is each for each in functions)
    ]
    problems = [reward.examine() for reward in rewards]
    totals = None  # what the trainer adds up for each completion
    if all(reward.rewards for reward in rewards):
        given = zip(*(reward.rewards for reward in rewards))
        totals = [
            sum(reward.weight * value for reward, value in zip(rewards, row) if value is not None) for row in given
        ]
    known, accused = totals if len(rewards) == len(every) else None, False
    for reward, problem in zip(rewards, problems):
        answers = [problem] if problem else judge_telling(reward, known) if reward.varies else [explain_equal(reward)]
        for answer in (*([reward.raises] if reward.raises else ()), *answers):
            accused |= answer.verdict is Verdict.FOUND
            yield answer
    if totals is not None and any(reward.varies for reward in rewards):
        yield from _judge_sum(seen, rewards, totals, accused)


def _drawn(seen: Seen) -> list[str]:
    """Return completions that this run's small model has drawn: no text is too odd to be judged."""
    given = (seen.handed or {}).get("completions") or []
    texts = [each if isinstance(each, str) else each[-1].get("content") for each in given if each]
    return [text for text in texts if isinstance(text, str)][:_DRAWN]


def _one_for_all(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def _judge_sum(seen: Seen, rewards: list[RewardFunction], totals: list[float], accused: bool) -> Iterator[Finding]:
    """Judge what the trainer adds up: whether it differs, and its sign against the reference."""
    probes, functions = rewards[0].probes, seen.trainer.reward_funcs
    low, high = min(range(len(totals)), key=totals.__getitem__), max(range(len(totals)), key=totals.__getitem__)
    ends = (f"{totals[place]:g} ({figures.quote(probes[place].text)})" for place in (low, high))
    evidence = f"{len(totals)} made-up completions got {' to '.join(ends)}"
    if figures.is_flat(probes, totals):
        yield Finding(
            "F10",
            f"{evidence}: with reward_weights {reward_weights(seen.trainer, len(functions))} the sum is the same for "
            "all completions of a prompt",
            "Give each function that is to teach a weight that the others do not cancel.",
        )
        return
    whole = len(rewards) == len(functions)
    if whole:
        best = [probe for probe, total in zip(probes, totals) if total > totals[high] - figures.SAME]
        shortest = min(best, key=lambda probe: len(probe.text))
        # A text that answers nothing is best for a reward of its length: what fits then gets less, and not nothing.
        seen.best = shortest.text if shortest.form >= 0 else ""
    planted = dataclasses.replace(rewards[0], function=_one_for_all, rewards=[])
    planted.examine()
    if planted.rewards and not planted.varies:
        yield Finding.held(
            "F10", evidence, "a function that gives 1 to all of them, asked in the same way, is seen as equal"
        )
    else:
        yield Finding.not_checked(
            "F10", f"{evidence}; but a function that gives 1 to all of them is not seen as equal here"
        )
    asking = [reward for reward in rewards if reward.asks_reference]
    if accused or not asking:
        return
    if not whole:
        yield Finding.not_checked("F14", "a reward model adds to the sum, so the sign against the reference is unknown")
        return
    column = asking[0].column
    if not any(reward.weight for reward in asking):
        pairs = next(filter(None, (figures.compare_pairs(probes, reward.rewards)[0] for reward in asking)), None)
        yield Finding(
            "F14",
            f"{', '.join(reward.name for reward in asking)} alone asks for the reference (column {column}), and its "
            "entry in reward_weights is 0: being right is not rewarded",
            "Give it a weight above 0; reward_weights are in the order of reward_funcs.",
            tried=f"with a weight of 1 right gets {pairs[0][0]:g} and wrong {pairs[0][1]:g}" if pairs else "",
        )
        return
    more, less, rows_less = figures.compare_pairs(probes, totals)
    if more:
        rights = [(total, probe.text) for probe, total in zip(probes, totals) if probe.kind == "right"]
        most, text = max(rights, key=operator.itemgetter(0))
        evidence = f"the right answer (column {column}) got {most:g} as {figures.quote(text)}"
        if max(figures.lead(probes, totals)) <= figures.SAME:
            yield Finding.not_checked(
                "F14", f"{evidence}, and a completion that answers nothing no less: read what each adds"
            )
            return
        yield Finding.held(
            "F14", evidence, f"a wrong one in the same words got {more[0][1]:g}, the right one {more[0][0]:g}"
        )
    elif less and rows_less == {probe.row for probe in probes} and any(reward.compare()[0] for reward in rewards):
        yield wrong_sign("the sum of all functions has", column, less)
