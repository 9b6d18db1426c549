"""F14 of a pairwise judge: which of two completions the judge of Online DPO takes, asked in both orders.

A judge is handed texts alone: no column of the dataset, and of messages not the messages, but `User: ...`. One that
looks the right answer up by the prompt may find nothing, and then takes the first of each pair: training goes on, for
or against half of what the model does well. So it is asked about a right and a wrong completion of each prompt, in
both orders.

Upstream: TRL #2532; trl's `OnlineDPOTrainer.training_step`, which reads `rank == 0` as "the first is better".
"""

from collections.abc import Iterator, Sequence
from typing import Any

from failurelab._text import first_line
from failurelab.failures.verdicts import Figures
from failurelab_preflight.finding import Finding
from failurelab_preflight.judges.rows import prompted
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.rewards import asking, forms, signature
from failurelab_preflight.rewards.references import is_conversation
from failurelab_preflight.training import Training

FAILURE, PART = "F14", "judge"
ROWS, PAIRS = 4, 24  # rows asked about, and pairs at most
SECONDS = 30.0
# Of the pairs, that a judge has to decide alike in both orders and well: one that tosses a coin decides a quarter so.
_MOST = 0.75


def judge_preferences(training: Training) -> Iterator[Finding]:
    """Ask a trainer's pairwise judge about a right and a wrong completion of some prompts, in both orders."""
    judge: Any = getattr(training.trainer, "judge", None)
    rows = prompted(training, ROWS)
    if not callable(getattr(judge, "judge", None)) or not rows:
        return
    completions = forms.make(rows, signature.reference_column(rows))
    of_form = {(each.row, each.form, each.worth): each.text for each in completions}
    pairs = [
        (row, text, of_form[row, form, "wrong"])
        for (row, form, worth), text in of_form.items()
        if worth == "right" and (row, form, "wrong") in of_form
    ]
    if not pairs:
        yield Finding.not_checked(FAILURE, "no column has answers, of which right and wrong pairs are made", part=PART)
        return
    pairs = pairs[:: -(-len(pairs) // PAIRS)]
    prompts = [_as_handed(rows[row]["prompt"]) for row, _, _ in pairs]
    spoken = is_conversation(rows[0]["prompt"])
    asked = [tuple(_as_handed([_answer(text)]) if spoken else text for text in texts) for _, *texts in pairs]
    said = asking.in_fork(lambda: _ask(judge, prompts, asked), SECONDS)
    yield _verdict(type(judge).__name__, said, len(pairs))


def _verdict(name: str, said: Any, count: int) -> Finding:
    """Return what a judge's ranks say: for each order a rank of each pair, or why there are none, as text."""
    if isinstance(said, str):
        return Finding.not_checked(FAILURE, f"the judge {name} could not be asked: {said}", part=PART)
    ranks, swapped = said
    if len(ranks) != count or len(swapped) != count or {*ranks, *swapped} - {0, 1, -1}:
        repair = "Return a list with 0 for each pair whose first completion is better, and 1 for the others."
        read = f"{str(ranks)[:60]}: the trainer reads 0 as the first, and all else as the second"
        return Finding(FAILURE, f"{name}.judge returned for {count} pairs {read}", repair, part=PART)
    both = list(zip(ranks, swapped))
    right, wrong, failed = both.count((0, 1)), both.count((1, 0)), [*ranks, *swapped].count(-1)
    evidence = f"asked about {count} right and wrong completions in both orders, {name}.judge "
    if not right and not wrong:
        evidence += f"ranks {ranks[0]} whatever stands there" if len({*ranks, *swapped}) == 1 else "goes by their order"
        repair = "Ask it about a right and a wrong completion in both orders, and look what it reads."
        why = "for other texts than these it may see a difference"
        return Finding.suspected(FAILURE, evidence, why, repair, part=PART, fault="order")
    evidence += f"takes the right one of {right}, the wrong one of {wrong}"
    if max(right, wrong) < _MOST * count:
        why = f"{evidence}, and the others by their order; it has to take the right one of {_MOST:.0%}"
        return Finding.not_checked(FAILURE, why, part=PART)
    margin = (right - wrong) / count
    measured = {"rewards_asked": 2 * count, "margin": margin, "margin_if_given": abs(margin)}
    measured |= {"rewards_paid": 2 * count, "rewards_invalid": failed, "completions_paid": 0}  # it gets no columns
    by_order: dict[str, Figures] = {"what it needs taken away": {"margin": 0.0}}
    controls = by_order | {"a reward that is no number": {"rewards_invalid": 1}}
    if settled := settle(FAILURE, [measured], controls, evidence, part=PART):
        return settled
    repair = "Return 0 where the first completion is better, and 1 where the second is; raise an error where it fails."
    turned = f"with its ranks turned it takes the right one of {wrong}"
    return Finding(FAILURE, evidence, repair, tried=turned, part=PART, fault="sign")


def _ask(judge: Any, prompts: Sequence[str], pairs: Sequence[Any]) -> Any:
    """Return a judge's ranks of pairs, as they are and the other way round; why it could not be asked, as text."""
    try:
        orders = (pairs, [tuple(reversed(pair)) for pair in pairs])
        ranks = [judge.judge(list(prompts), list(order)) for order in orders]
        return [list(each.tolist() if hasattr(each, "tolist") else each) for each in ranks]
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _as_handed(prompt: Any) -> str:
    """Return a prompt or a completion as the trainer hands it to a judge: messages by trl's own simple template."""
    if not is_conversation(prompt):
        return str(prompt)
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in prompt)
