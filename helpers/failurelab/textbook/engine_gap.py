"""What an engine says of the tokens that it drew, beside what the policy says: one line, with what explains the gap.

It is no part of the verdict: the definition weighs the loss by what the engine said, whatever that is.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from failurelab import mismatch
from failurelab.textbook.fields import Options
from failurelab.textbook.gradient import EXACT, OutOfMemory, Precision, Tally, score_rows
from failurelab.textbook.rows import Row

LEFT = 0.5  # of a mean gap: what is left of it where its cause is undone
CAUSES = {
    "temperature": "the engine's log-probabilities are those at another temperature (F15)",
    "tokens": "the engine's log-probabilities are those of the tokens beside (F18)",
    "dtype": "the engine computes in another dtype (F16, F17)",
    "": "what explains it was not looked for, because these tokens are not of this step and process alone",
    "stale": "the engine has other weights than the policy that drew by the trainer's count, such as older ones (F16)",
}


def told_by_engine(model: nn.Module, rows: Sequence[Row], tally: Tally, options: Options, pad: int) -> str:
    """Return how far an engine's log-probabilities lie from those of the policy at the time, and what explains it.

    Args:
        model: the policy.
        rows: that are trained on, in their order.
        tally: of the definition's pass, which has the scores of this policy.
        options: of the definition.
        pad: token id of the padding.
    """
    scores = {
        number: own for part in tally.slopes for number, own in zip(part.part, part.scores[0].detach().cpu().float())
    }
    told = [(number, row) for number, row in enumerate(rows) if row.engine_logps is not None and number in scores]
    if not told:
        return ""
    own = [
        (scores[number] if row.old_logps is None else row.old_logps.cpu())[: len(row.completion)]
        for number, row in told
    ]
    engine = pad_sequence([row.engine_logps for _, row in told if row.engine_logps is not None], batch_first=True)
    mask = pad_sequence(
        [torch.tensor([float(place not in row.given) for place in range(len(row.completion))]) for _, row in told],
        batch_first=True,
    )
    mask, engine = mask * ~engine.isnan(), engine.nan_to_num(0.0)
    policy = pad_sequence(own, batch_first=True)
    gap = mismatch.compare(policy, engine, mask)
    if gap.mean <= mismatch.LARGEST_MEAN:
        return f"engine and policy agree on its tokens: {gap}"
    cause = _cause(model, [row for _, row in told], policy, engine, mask.bool(), gap.mean, options, pad)
    return f"engine and policy differ on its tokens: {gap}; {CAUSES[cause]}"


def _cause(
    model: nn.Module,
    rows: Sequence[Row],
    policy: torch.Tensor,
    engine: torch.Tensor,
    mask: torch.Tensor,
    mean: float,
    options: Options,
    pad: int,
) -> str:
    def left(scores: torch.Tensor) -> float:
        return float((scores - engine).abs()[mask].mean())

    both = mask[:, 1:] & mask[:, :-1]
    pairs = (policy[:, 1:] - engine[:, :-1], policy[:, :-1] - engine[:, 1:])
    now = all(row.old_logps is None and row.here for row in rows)  # else this is no longer the policy that drew
    undone = {"tokens": min((float(pair.abs()[both].mean()) for pair in pairs), default=mean) if both.any() else mean}
    if now:

        def scored(temperature: float, precision: Precision) -> torch.Tensor:
            scores = score_rows(model, rows, temperature, pad, precision)
            return pad_sequence([one[: len(row.completion)].cpu() for one, row in zip(scores, rows)], batch_first=True)

        try:
            other = {1.0, options.asked_temperature} - {options.temperature}
            undone["temperature"] = min((left(scored(each, EXACT)) for each in other), default=mean)
            undone["dtype"] = left(scored(options.temperature, Precision(False, torch.bfloat16)))
        except OutOfMemory:
            pass
    cause = min(undone, key=undone.__getitem__)
    return cause if undone[cause] <= LEFT * mean else "stale" * now
