"""The kind `log_probs`: a script's own `log_probs(model, input_ids, attention_mask, completion_length)`.

A function that scores completions is right, or it trains something else without an error. So it is asked about sums of
different lengths, with prompts padded on the left and completions on the right, and compared with a float64 copy of the
model: all logits, no cleverness. Compared are the scores, their gradients, and where the scores come from if they are
others; counted are the rows of logits that the model's head made for them.
"""

import copy
import types
from typing import Any

import torch

from failurelab import logits
from failurelab_course.labs.checker.base import CheckRun, Refused
from failurelab_course.labs.checker.kinds.products import Products

SUMS = ("3+4=7", "12+19=31", "5+13=18", "17+2=19", "8+8=16", "10+9=19")
_SAME = 1e-4  # nats


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Ask the script's function, and fill in `run.metrics`.

    Raises:
        Refused: there is no such function, or what it returned is no log-probability for each completion token, or is
            on another device.
    """
    log_probs = run.function(script, "log_probs(model, input_ids, attention_mask, completion_length)")
    metrics = run.metrics
    ids, mask, length = _batch(run.tokenizer)
    counts = mask[:, -length:].bool()
    model, exact = copy.deepcopy(run.clean).to(run.device), copy.deepcopy(run.clean).double()
    rows = exact(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    truth = _scored(rows, ids, length, 0)
    returned: list[int] = []

    def note(output: torch.Tensor) -> None:
        returned.append(output.shape[1] if output.dim() == 3 else len(output) // len(ids))

    run.stage = "measure"
    with Products(rows.shape[-1], note):
        got = log_probs(model, ids.to(run.device), mask.to(run.device), length)
    if not isinstance(got, torch.Tensor) or got.shape != truth.shape:
        shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
        raise Refused(f"log_probs returned {shape}, not one number for each completion token: {tuple(truth.shape)}")
    run.must_be_there("what log_probs returned", [got])
    got = got.cpu()
    metrics |= {
        "rows_made": max(returned, default=0),
        "rows_needed": length + 1,
        "log_prob_error": _distance(got, truth, counts),
        "scores_from": "",
    }
    shifts = sorted(range(-1, ids.shape[1] - length), key=abs)
    off = (shift for shift in shifts if _distance(got, _scored(rows, ids, length, shift), counts) < _SAME)
    metrics["positions_off"] = next(off, None)
    metrics["gradient_error"] = _gradient_error(model, got, exact, truth, counts)
    try:
        logits.check_alignment(log_probs, run.clean.to(run.device))
    except logits.MisalignedLogProbs as error:
        metrics["scores_from"] = error.found or "none of the mistakes that the probe knows"


def _batch(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return ids and mask, (sums, sequence), and the completions' length: padded on both sides, ends included."""
    pairs = [text.partition("=") for text in SUMS]
    prompts = [tokenizer.encode(left + "=") for left, _, _ in pairs]
    completions = [[*tokenizer.encode(right), tokenizer.eos_token_id] for _, _, right in pairs]
    widest, length = (max(map(len, part)) for part in (prompts, completions))
    ids = torch.full((len(pairs), widest + length), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        start = widest - len(prompt)
        end = widest + len(completion)
        ids[row, start:end] = torch.tensor([*prompt, *completion])
        mask[row, start:end] = 1
    return ids, mask, length


def _scored(rows: torch.Tensor, ids: torch.Tensor, length: int, off: int) -> torch.Tensor:
    """Score the completion by the rows that lie `off` positions before those that predict it."""
    first = ids.shape[1] - length - 1 - off
    return rows[:, first : first + length].gather(-1, ids[:, -length:, None])[..., 0]


def _distance(got: torch.Tensor, other: torch.Tensor, counts: torch.Tensor) -> float:
    return (got.double() - other).abs()[counts].nan_to_num(nan=torch.inf).max().item()


def _gradient_error(model: Any, got: Any, exact: Any, truth: Any, counts: torch.Tensor) -> float | None:
    """Return the largest difference of a gradient, as a share of its largest entry; None without a graph."""
    if not got.requires_grad:
        return None
    got[counts].sum().backward()
    truth[counts].sum().backward()
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), exact.parameters())]
    if any(a is None for a, _ in pairs):
        return None
    return max(((a.cpu().double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
