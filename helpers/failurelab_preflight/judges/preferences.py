"""F14 of a pairwise judge: which of two completions the judge of Online DPO takes, asked in both orders.

A judge is handed texts alone: no column of the dataset, and of messages not the messages, but `User: ...`. One that
looks the right answer up by the prompt may find nothing, and then takes the first of each pair: training goes on, for
or against half of what the model does well. So it is asked about a right and a wrong completion of each prompt, in
both orders.

Upstream: TRL #2532; trl's `OnlineDPOTrainer.training_step`, which reads `rank == 0` as "the first is better".
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from failurelab._text import first_line
from failurelab.failures.verdicts import Figures
from failurelab_preflight.answer import Finding
from failurelab_preflight.judges.rows import prompted
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.rewards import asking, forms, signature
from failurelab_preflight.rewards.references import is_conversation
from failurelab_preflight.rewards.table import quote
from failurelab_preflight.training import Training

FAILURE, PART = "F14", "judge"
ROWS, PAIRS = 4, 24  # rows asked about, and pairs at most
SECONDS = 30.0
# Of the pairs, that a judge has to decide alike in both orders, and to decide well where that is known: one that tosses
# a coin decides half of them so, and half of those well, so this lies half-way between chance and all of them.
_MOST = 0.75


@dataclasses.dataclass(frozen=True)
class Preferences:
    """What a judge said of the same pairs, as they are and the other way round.

    Attributes:
        ranks: of each order, a rank for each pair: 0 for the first, 1 for the second, -1 where it failed.
        odd: what it returned in place of such a list, in words; empty if nothing.
    """

    ranks: tuple[tuple[Any, ...], ...] = ()
    odd: str = ""

    def taken(self, place: int) -> int | None:
        """Return which of a pair it takes in both orders, 0 or 1; None where the order decides."""
        first, swapped = self.ranks[0][place], self.ranks[1][place]
        return first if {first, swapped} == {0, 1} else None


def judge_preferences(training: Training) -> Iterator[Finding]:
    """Ask a trainer's pairwise judge about a right and a wrong completion of some prompts, in both orders."""
    judge: Any = getattr(training.trainer, "judge", None)
    rows = prompted(training, ROWS)
    if not callable(getattr(judge, "judge", None)) or not rows:
        return
    completions = forms.make(rows, signature.reference_column(rows), [judge.judge])
    of_form = {(each.row, each.form, each.worth): each.text for each in completions}
    pairs = [
        (row, text, of_form[row, form, "wrong"])
        for (row, form, worth), text in of_form.items()
        if worth == "right" and (row, form, "wrong") in of_form
    ]
    known = bool(pairs)
    if not known:  # texts that differ: which is better nobody knows, but not which of them stands first
        texts = [each for each in completions if each.worth in ("other", "none")]
        pairs = [(one.row, one.text, two.text) for one, two in itertools.pairwise(texts) if one.row == two.row]
    pairs = pairs[:: -(-len(pairs) // PAIRS)]
    prompts = [_as_handed(rows[row]["prompt"]) for row, _, _ in pairs]
    spoken = is_conversation(rows[0]["prompt"])
    asked = [tuple(_as_handed([_answer(text)]) if spoken else text for text in texts) for _, *texts in pairs]
    said = _ask(judge, prompts, asked)
    if isinstance(said, str):
        yield Finding.not_checked(FAILURE, f"the judge {type(judge).__name__} could not be asked: {said}", part=PART)
        return
    yield _verdict(judge, said, asked, known)


def _verdict(judge: Any, said: Preferences, pairs: list[Any], known: bool) -> Finding:
    name, count = type(judge).__name__, len(pairs)
    if said.odd:
        repair = "Return a list with 0 for each pair whose first completion is better, and 1 for the others."
        read = "the trainer reads 0 as the first, and all else as the second"
        return Finding(FAILURE, f"{name}.judge returned {said.odd} for {count} pairs: {read}", repair, part=PART)
    shown = " and ".join(quote(text, 40) for text in min(pairs, key=lambda pair: len("".join(pair))))
    ranks = {rank for order in said.ranks for rank in order}
    taken = [said.taken(place) for place in range(count)]
    right, wrong = taken.count(0), taken.count(1)
    what = "a right and a wrong completion" if known else "two completions"
    if not right and not wrong:
        takes = {frozenset({0}): "takes the first", frozenset({1}): "takes the second", frozenset({-1}): "fails"}
        does = takes.get(frozenset(ranks), "takes one by its place")
        evidence = (
            f"{name}.judge was asked about {count} pairs of {what}, as {shown}, in both orders: it {does} each time, "
            "whatever stands there"
        )
        repair = "Ask it about a right and a wrong completion in both orders, and look what it reads."
        why = "for other texts than these it may see a difference"
        return Finding.suspected(FAILURE, evidence, why, repair, part=PART, fault="order")
    decided = right if known else right + wrong
    of = f"takes the right one of {right}, the wrong one of {wrong}" if known else f"takes the same of {right + wrong}"
    evidence = f"asked about {count} pairs in both orders, {name}.judge {of}"
    if max(decided, wrong) < _MOST * count:
        left = f"{count - right - wrong} it decides by their order"
        why = f"{evidence}, and {left}; it has to take {'the right one' if known else 'the same'} of {_MOST:.0%}"
        return Finding.not_checked(FAILURE, why, part=PART)
    margin = (right - wrong if known else decided) / count
    failed = sum(rank == -1 for order in said.ranks for rank in order)
    measured = {"rewards_asked": 2 * count, "margin": margin, "margin_if_given": abs(margin)}
    measured |= {"rewards_paid": 2 * count, "rewards_invalid": failed, "completions_paid": 0}  # it gets no columns
    by_order: dict[str, Figures] = {"what it needs taken away": {"margin": 0.0}}
    controls = by_order | {"a reward that is no number": {"rewards_invalid": 1}}
    if settled := settle(FAILURE, [measured], controls, evidence, part=PART):
        return settled
    repair = "Return 0 where the first completion is better, and 1 where the second is; raise an error where it fails."
    turned = f"with its ranks turned it takes the right one of {wrong}"
    return Finding(FAILURE, evidence, repair, tried=turned, part=PART, fault="sign")


def _ask(judge: Any, prompts: Sequence[str], pairs: Sequence[Any]) -> "Preferences | str":
    """Return what a judge says of pairs, asked in a fork; why it could not be asked, as text."""

    def call() -> Preferences | str:
        orders = (pairs, [tuple(reversed(pair)) for pair in pairs])
        try:
            return _read([judge.judge(list(prompts), list(order)) for order in orders], len(pairs))
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"

    reply = asking.in_fork(call, SECONDS)
    return reply if isinstance(reply, Preferences) else str(reply)


def _read(answers: Sequence[Any], count: int) -> Preferences:
    ranks = []
    for answer in answers:
        answer = answer.tolist() if hasattr(answer, "tolist") else answer
        if not isinstance(answer, (list, tuple)) or len(answer) != count:
            size = f" of {len(answer)}" if hasattr(answer, "__len__") else ""
            return Preferences(odd=f"a {type(answer).__name__}{size}")
        if other := [rank for rank in answer if rank not in (0, 1, -1)]:
            return Preferences(odd=f"{other[0]!r} among its ranks")
        ranks.append(tuple(map(int, answer)))
    return Preferences(tuple(ranks))


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _as_handed(prompt: Any) -> str:
    """Return a prompt or a completion as the trainer hands it to a judge: messages by trl's own simple template."""
    if not is_conversation(prompt):
        return str(prompt)
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in prompt)
