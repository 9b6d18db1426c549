"""One optimizer step of several processes: the evidence of all, and what only several of them can do wrong.

Rows of the ranks follow each other in the order of the ranks, as trainers gather rewards, so a group may lie on two.
Micro-batches of the ranks are micro-batches of their own: the gradient of all is their mean.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from failurelab.textbook.algorithms import group_size
from failurelab.textbook.definition import left_out
from failurelab.textbook.fields import Options
from failurelab.textbook.ranks import Ranks, fingerprint, is_spread, name_ranks
from failurelab.textbook.recorder import Evidence
from failurelab.textbook.rows import Row, group_in_order

DRIFTED = "weights apart between ranks"
OWN_GRADIENTS = "gradients not averaged over the ranks"
SAME_PROMPTS = "the same prompts on every rank"
SAME_NUMBERS = "the same random numbers on every rank"
SUMMED = "summed over the ranks, and not averaged"
DIVIDED = "divided by the number of ranks once too often"


def gather(trainer: Any, evidence: Evidence) -> Evidence:
    """Return the evidence of all ranks as one, and what is wrong with it; on each rank the same."""
    ranks, size = evidence.ranks, group_size(trainer)
    names = ("problems", "wrong", "texts", "temperature", "random", "unknown", "losses")
    told = {name: getattr(evidence, name) for name in names}
    every = ranks.share(told | {"rows": [_bare(row) for row in evidence.rows]})
    micros = 1 + max((row.micro for each in every for row in each["rows"] if row.micro is not None), default=0)
    rows: list[Row] = []
    for rank, each in enumerate(every):
        here = rank == ranks.number
        for row in evidence.rows if here else each["rows"]:
            micro = None if row.micro is None else rank * micros + row.micro
            rows.append(dataclasses.replace(row, micro=micro, rank=rank, here=here))
    rows, apart = _group(rows, size)
    empty = [f"rank {rank} trains on no completion" for rank, each in enumerate(every) if not each["rows"]]
    problems = _of_some([each["problems"] for each in every]) or empty or apart
    temperatures = {each["temperature"] for each in every}
    if len(temperatures) > 1:
        problems.append("the ranks drew their completions at several temperatures")
    wrong = [*_drifted(trainer, ranks), *_drawn_alike(rows, [each["random"] for each in every])]
    for name in dict.fromkeys(name for each in every for name, _ in each["wrong"]):
        lines = _of_some([[line for own, line in each["wrong"] if own == name] for each in every])
        wrong.append((name, "; ".join(lines)))
    texts, unknown = (_of_some([[each[name]] * bool(each[name]) for each in every]) for name in ("texts", "unknown"))
    said: dict[str, Any] = {"texts": (texts or [""])[0], "unknown": "; ".join(unknown)}
    if evidence.losses is not None:
        said["losses"] = [loss for each in every for loss in each["losses"] or ()]
    temperature = temperatures.pop()
    return dataclasses.replace(evidence, rows=rows, problems=problems, wrong=wrong, temperature=temperature, **said)


def _bare(row: Row) -> Row:
    """Return what other ranks have to know of a row: no images, and numbers on the CPU."""
    old, rounded = ((value.cpu() if value is not None else None) for value in (row.old_logps, row.old_rounded))
    inputs = {name: value.new_zeros(0).cpu() for name, value in row.inputs.items()}
    return dataclasses.replace(row, old_logps=old, old_rounded=rounded, inputs=inputs)


def _of_some(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of the ranks, each once, with the ranks that it is of where it is not of all."""
    told = []
    for line in dict.fromkeys(line for own in lines for line in own):
        ranks = [rank for rank, own in enumerate(lines) if line in own]
        told.append(line if len(ranks) == len(lines) else f"{name_ranks(ranks)}: {line}")
    return told


def _group(rows: Sequence[Row], size: int) -> tuple[list[Row], list[str]]:
    """Return the rows with their groups, in the order of the ranks; and what speaks against these."""
    groups, problems = dict[int, int](), list[str]()
    for batch in dict.fromkeys(row.batch for row in rows):
        places = [place for place, row in enumerate(rows) if row.batch == batch]
        own, problem = group_in_order([rows[place].prompt for place in places], size)
        groups.update(zip(places, own))
        problems += [f"{problem}, in the ranks' order"] * bool(problem)
    return [dataclasses.replace(row, group=groups[place]) for place, row in enumerate(rows)], problems


def _drifted(trainer: Any, ranks: Ranks) -> list[tuple[str, str]]:
    """Return whether the weights of some ranks are others than rank 0's; those that are spread have no copies."""
    if is_spread(trainer.model):
        return []
    names = [name for name, _ in trainer.model.named_parameters()]
    every = ranks.share(fingerprint(list(trainer.model.parameters())))
    other = {
        rank: [name for name, one, two in zip(names, own, every[0]) if one != two] for rank, own in enumerate(every)
    }
    apart = [rank for rank, differing in other.items() if differing]
    if not apart:
        return []
    differing = other[apart[0]]
    said = f"{name_ranks(apart)} trains other weights than rank 0: {len(differing)} of {len(names)} tensors differ"
    return [(DRIFTED, f"{said}, {differing[0]} first")]


def _drawn_alike(rows: Sequence[Row], random: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """Return whether ranks got the same prompts, or drew with the same random numbers."""
    wrong, count = [], len(random)
    own = [[(row.batch, row.prompt) for row in rows if row.rank == rank] for rank in range(count)]
    groups = [{(row.batch, row.group) for row in rows if row.rank == rank} for rank in range(count)]
    drew = all(numbers == random[0] and all(numbers) for numbers in random) and bool(random[0])
    if drew and any(
        set(own[0]) & set(other) for other in own[1:]
    ):  # of other prompts they are other draws all the same
        said = "the generators of all ranks were in the same state as their completions were drawn"
        wrong.append((SAME_NUMBERS, f"{said}, so that ranks with the same prompt draw the same"))
    apart = not any(groups[0] & other for other in groups[1:])
    if apart and all(each == own[0] for each in own) and len(set(own[0])) > 2:
        said = f"all {count} ranks got the same {len(set(own[0]))} prompts, in groups of their own"
        wrong.append((SAME_PROMPTS, f"{said}: the sampler does not know of the others"))
    return wrong


def tokens_of(rows: Sequence[Row], options: Options) -> list[int]:
    """Return how many tokens each rank trains on in this step."""
    trained = [row for row in rows if row.micro is not None and not left_out(row, options)]
    return [
        sum(row.length() for row in trained if row.rank == rank) for rank in range(1 + max(row.rank for row in rows))
    ]
