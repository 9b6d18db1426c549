"""The GRPO step of notebook 00, on one screen, and a failure as one changed line of it.

The cell of notebook 00 that is tagged `step` defines `grpo_step`. It stands there alone: `step` reads it, changes a
line, shows the change, and returns the function; `beside` compares what two of them do to the same model.
"""

import copy
import difflib
import json
from collections.abc import Callable
from typing import Any

import torch

from failurelab.errors import FailureLabError
from failurelab_course import eras

Step = Callable[..., tuple[float, float]]


class NoSuchLine(FailureLabError):
    """The line that is to be changed does not stand in the step exactly once."""


def source() -> str:
    """Return the source of notebook 00's step."""
    path = eras.root() / "notebooks" / "00_start_here.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (cell,) = [cell for cell in cells if "step" in cell["metadata"].get("tags", [])]
    return "".join(cell["source"])


def step(names: dict[str, Any], old: str = "", new: str = "") -> Step:
    """Return notebook 00's `grpo_step`, with a line changed if there is one, which is printed as a diff.

    Args:
        names: of the notebook, `globals()`: the step uses `tokenizer` and `correct` of its script.
        old: what stands in the step once.
        new: what stands there instead.

    Raises:
        NoSuchLine: `old` does not stand there once.
    """
    plain = source()
    if old and plain.count(old) != 1:
        raise NoSuchLine(f"{old!r} stands {plain.count(old)} times in notebook 00's step. Next: copy a line of it")
    changed = plain.replace(old, new) if old else plain
    lines = difflib.unified_diff(plain.splitlines(), changed.splitlines(), n=1, lineterm="")
    for line in list(lines)[3:]:
        print(line)
    scope = dict(names)
    exec(compile(changed, "the step", "exec"), scope)
    return scope["grpo_step"]


def beside(
    other: Step, plain: Step, policy: torch.nn.Module, prompts: list[str], answers: list[str], *drawn: torch.Tensor
) -> Any:
    """Return how two steps on copies of a policy compare: the cosine of their gradients, and both mean rewards.

    Plain SGD with a learning rate of 1 moves each weight by minus its gradient. Both draw from the same seed, or take
    the tokens that were `drawn`.
    """
    moves, rewards = [], []
    for take in (other, plain):
        copied = copy.deepcopy(policy)
        copied.__dict__.pop("forward", None)  # accelerate's, which is bound to the policy
        before = [weight.detach().clone() for weight in copied.parameters()]
        torch.manual_seed(0)
        reward, _ = take(copied, torch.optim.SGD(copied.parameters(), lr=1.0), prompts, answers, *drawn)
        moves.append(torch.cat([(old - new).flatten() for old, new in zip(before, copied.parameters())]).detach())
        rewards.append(reward)
    return torch.cosine_similarity(*moves, dim=0).item(), *rewards
