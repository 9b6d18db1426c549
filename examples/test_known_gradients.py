"""Known gradients as a test of your own loss: copy this file, and the folder `cases` of failurelab/known_gradients.

Write `my_loss`. It needs torch and pytest alone. A case whose options you do not have is skipped by `NotOffered`; name
in EXPECTED_TO_DIFFER what differs by your own choice.
"""

import json
import pathlib

import pytest
import torch

CASES = pathlib.Path(__file__).parent / "cases"
EXPECTED_TO_DIFFER: set[str] = set()  # ids, each with the reason in a comment
DEFAULTS = {"objective": "clip", "ratio": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "reduce": "token_mean"}


class NotOffered(Exception):
    """Your loss has no such option."""


def my_loss(logps, batch, options, cut):
    """Return the loss of a step, from log-probabilities (rows, places); replace this with yours.

    Args:
        logps: of the policy; the gradient is taken by them.
        batch: `old`, `reference`, `engine`, `mask`, (rows, places), `advantages`, `rewards`, `group`, (rows,).
        options: what the case asks for, where it is not the default.
        cut: the rows of each micro-batch of each rank.
    """
    asked = DEFAULTS | options
    if set(asked) - set(DEFAULTS) or (asked["objective"], asked["ratio"]) != ("clip", "token"):
        raise NotOffered
    total = 0.0
    for rows in (rows for rank in cut for rows in rank):
        mask, worth = batch["mask"][rows], batch["advantages"][rows][:, None]
        ratio = (logps[rows] - batch["old"][rows]).exp()
        bounded = ratio.clamp(1 - asked["epsilon_low"], 1 + asked["epsilon_high"])
        terms = -torch.minimum(ratio * worth, bounded * worth) * mask
        if asked["reduce"] == "token_mean":
            total += terms.sum() / batch["mask"].sum()
        elif asked["reduce"] == "sequence_mean":
            total += (terms.sum(1) / mask.sum(1).clamp(min=1)).sum() / len(batch["mask"])
        else:
            raise NotOffered
    return total


def read_cases():
    """Yield the cases that ask for a gradient by log-probabilities."""
    for path in sorted(CASES.glob("*.json")):
        content = json.loads(path.read_text())
        for case in content["cases"]:
            if case["kind"] == "gradient":
                yield pytest.param(case, content["batches"][case["batch"]], id=case["id"])


@pytest.mark.parametrize(("case", "batch"), list(read_cases()))
def test_gradient_is_the_known_one(case, batch):
    """Hold one case."""
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in batch.items()}
    logps = tensors.pop("logps").requires_grad_()
    try:
        my_loss(logps, tensors, case["options"], case["cut"]).backward()
    except NotOffered:
        pytest.skip(f"no {case['options']}")
    known = torch.tensor(case["expected"]["gradient"], dtype=torch.float64)
    apart = (logps.grad - known).norm() / known.norm()
    assert (apart < 1e-4) != (case["id"] in EXPECTED_TO_DIFFER), f"{case['about']}: {apart:.2g} of the norm away"
