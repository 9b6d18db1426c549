"""F14 of a pairwise judge: which of two completions the judge of Online DPO takes, asked in both orders.

A judge is handed texts alone: no column of the dataset, and of messages not the messages, but `User: ...`. One that
looks the right answer up by the prompt may find nothing, and then takes the first of each pair: training goes on, for
or against half of what the model does well. So it is asked about a right and a wrong completion of each prompt, in
both orders, and twice. What is right is read in the dataset, or in the tables that the judge holds itself.

Upstream: TRL #2532; trl's `OnlineDPOTrainer.training_step`, which reads `rank == 0` as "the first is better".
"""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from failurelab._text import first_line
from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.rows import prompted
from failurelab.preflight.training import Training
from failurelab.rewards import asking, forms, signature
from failurelab.rewards.references import is_conversation
from failurelab.rewards.table import quote

FAILURE, PART = "F14", "judge"
ROWS, PAIRS = 4, 24  # rows asked about, and pairs at most
SECONDS = 30.0
_REFERENCE = "what the judge holds"


class AskedTable(dict):
    """A dict of the judge's that notes by which texts it is asked; told so, it answers for a text that holds a key."""

    def __init__(self, values: Mapping[str, Any], inside: bool = False):
        super().__init__(values)
        self.missed: list[str] = []
        self.hits, self.inside = 0, inside

    def _key(self, asked: Any) -> Any:
        if not isinstance(asked, str) or super().__contains__(asked):
            self.hits += 1
            return asked
        self.missed.append(asked)
        return _key_in(asked, self) or asked if self.inside else asked

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value, as a dict does."""
        return super().get(self._key(key), default)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._key(key))

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._key(key))


@dataclasses.dataclass(frozen=True)
class Preferences:
    """What a judge said of the same pairs in three orders: as they are, the other way round, and again.

    Attributes:
        ranks: of each order, a rank for each pair: 0 for the first, 1 for the second, -1 where it failed.
        odd: what it returned in place of such a list, in words; empty if nothing.
        missed: the table that it asked in vain and never else, and the first text that it asked by; empty if none.
    """

    ranks: tuple[tuple[Any, ...], ...] = ()
    odd: str = ""
    missed: tuple[str, str] = ("", "")

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
    rows, column = _with_references(rows, _tables(judge))
    completions = forms.make(rows, column, [judge.judge])
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
    yield _verdict(judge, said, prompts, asked, known)


def _verdict(judge: Any, said: Preferences, prompts: list[str], pairs: list[Any], known: bool) -> Finding:
    name, count = type(judge).__name__, len(pairs)
    if said.odd:
        repair = "Return a list with 0 for each pair whose first completion is better, and 1 for the others."
        read = "the trainer reads 0 as the first, and all else as the second"
        return Finding(FAILURE, f"{name}.judge returned {said.odd} for {count} pairs: {read}", repair, part=PART)
    shown = " and ".join(quote(text, 40) for text in min(pairs, key=lambda pair: len("".join(pair))))
    ranks = {rank for order in said.ranks for rank in order}
    if ranks == {-1}:
        evidence = f"{name}.judge fails (-1) for each of {count} pairs: the trainer reads that as the second is better"
        why = "what it asks may be out of reach from here"
        return Finding.suspected(FAILURE, evidence, why, "Look why it fails, and raise an error there.", part=PART)
    unsteady = sum(one != again for one, again in zip(said.ranks[0], said.ranks[2]))
    if 4 * unsteady > count:
        evidence = f"{name}.judge takes another one of the same pair when it is asked again, in {unsteady} of {count}"
        why = "it may be meant to draw by chance"
        return Finding.suspected(FAILURE, evidence, why, "Let it give the same answer twice.", part=PART)
    taken = [said.taken(place) for place in range(count)]
    right, wrong = taken.count(0), taken.count(1)
    what = "a right and a wrong completion" if known else "two completions"
    if not right and not wrong:
        place = "first" if ranks == {0} else "second" if ranks == {1} else "one by its place"
        evidence = (
            f"{name}.judge was asked about {count} pairs of {what}, as {shown}, in both orders: it takes the {place} "
            "each time, whatever stands there"
        )
        table, text = said.missed
        if table:
            evidence += f". It looks {quote(text, 40)} up in {table}, which has no such key"
            repair = "Look up what stands there: the trainer hands a judge texts, and of messages 'User: ...' as one."
            inside = _ask(judge, prompts, pairs, inside=True)
            better = 0 if isinstance(inside, str) or inside.odd else [*map(inside.taken, range(count))].count(0)
            tried = f"with the key that stands in it, it takes the right one of {better} in both orders" * bool(better)
            return Finding(FAILURE, evidence, repair, tried=tried, part=PART, fault="look-up")
        repair = "Ask it about a right and a wrong completion in both orders, and look what it reads."
        why = "for other texts than these it may see a difference"
        return Finding.suspected(FAILURE, evidence, why, repair, part=PART, fault="order")
    if known and wrong > right:
        evidence = f"{name}.judge takes the wrong one of {wrong} of {count} pairs in both orders, the right of {right}"
        repair = "Return 0 where the first completion is better, and 1 where the second is."
        turned = f"with its ranks turned it takes the right one of {wrong}"
        return Finding(FAILURE, evidence, repair, tried=turned, part=PART, fault="sign")
    of = f"takes the right one of {right}, the wrong one of {wrong}" if known else f"takes the same of {right + wrong}"
    control = f"one that goes by the order would take the same one of 0 of {count}"
    return Finding.held(FAILURE, f"asked about {count} pairs in both orders, {name}.judge {of}", control, part=PART)


def _ask(judge: Any, prompts: Sequence[str], pairs: Sequence[Any], inside: bool = False) -> "Preferences | str":
    """Return what a judge says of pairs, asked in a fork; why it could not be asked, as text."""

    def call() -> Preferences | str:
        held = _tables(judge)
        tables = {name: AskedTable(table, inside) for name, (_, _, table) in held.items()}
        for name, (holder, key, _) in held.items():
            holder[key] = tables[name]
        orders = (pairs, [tuple(reversed(pair)) for pair in pairs], pairs)
        try:
            answers = [judge.judge(list(prompts), list(order)) for order in orders]
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
        missed = ((name, table.missed[0]) for name, table in tables.items() if table.missed and not table.hits)
        return _read(answers, len(pairs), next(missed, ("", "")))

    reply = asking.in_fork(call, SECONDS)
    return reply if isinstance(reply, Preferences) else str(reply)


def _read(answers: Sequence[Any], count: int, missed: tuple[str, str]) -> Preferences:
    ranks = []
    for answer in answers:
        answer = answer.tolist() if hasattr(answer, "tolist") else answer
        if not isinstance(answer, (list, tuple)) or len(answer) != count:
            size = f" of {len(answer)}" if hasattr(answer, "__len__") else ""
            return Preferences(odd=f"a {type(answer).__name__}{size}")
        if other := [rank for rank in answer if rank not in (0, 1, -1)]:
            return Preferences(odd=f"{other[0]!r} among its ranks")
        ranks.append(tuple(map(int, answer)))
    return Preferences(tuple(ranks), "", missed)


def _tables(judge: Any) -> dict[str, tuple[dict[str, Any], str, dict[str, Any]]]:
    """Return the dicts that a judge may look texts up in, by how its code calls them: each with where it stands."""
    code = getattr(inspect.unwrap(getattr(judge.judge, "__func__", judge.judge)), "__code__", None)
    around = getattr(getattr(judge.judge, "__func__", judge.judge), "__globals__", {})
    held = {f"self.{name}": (vars(judge), name) for name in getattr(judge, "__dict__", {})}
    held |= {name: (around, name) for name in (code.co_names if code else ()) if name in around}
    known = ((name, holder, key, holder[key]) for name, (holder, key) in held.items())
    return {
        name: (holder, key, table)
        for name, holder, key, table in known
        if type(table) is dict and table and all(isinstance(each, str) for each in table)
    }


def _with_references(rows: Sequence[dict[str, Any]], tables: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the rows, and the column with the right answers: of the dataset, or what a table of the judge's has."""
    if column := signature.reference_column(rows):
        return list(rows), column
    for _, _, table in tables.values():
        values = [table.get(_key_in(_said(row["prompt"]), table)) for row in rows]
        if all(isinstance(value, (str, int, float)) for value in values):
            return [row | {_REFERENCE: value} for row, value in zip(rows, values)], _REFERENCE
    return list(rows), None


def _key_in(text: str, table: Mapping[str, Any]) -> str:
    """Return the longest key of a table that stands in a text; empty if none does."""
    return max((key for key in table if key in text), key=len, default="")


def _said(prompt: Any) -> str:
    return str(prompt[-1].get("content", "")) if is_conversation(prompt) else str(prompt)


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _as_handed(prompt: Any) -> str:
    """Return a prompt or a completion as the trainer hands it to a judge: messages by trl's own simple template."""
    if not is_conversation(prompt):
        return str(prompt)
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in prompt)
