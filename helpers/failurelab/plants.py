"""Controls: each mechanism of the registry planted on the object at hand, and measured as it is measured there.

A measurement that does not see a failure proves nothing until it has seen one. The model may be too small, the tokens
too much alike, the batch too short. So before a failure is HELD, its mechanism is planted on the same model, batch or
rewards, and the same measurement is asked. What it says goes to `verdicts.judge` under the control's name:

    judged = verdicts.judge(failure, [figures], {"equal rewards": plants.equal_rewards(groups)})

What is planted is taken back, also where the measurement raises. A measurement may plant its own controls: `rollouts`,
`textbook.balance`, `textbook.suspects`.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from failurelab import gradients, mismatch, placement, updates
from failurelab.failures.verdicts import Figures
from failurelab.handles import keep_random_state, unseen
from failurelab.measure import counts
from failurelab.measure.scores import ScoredRows, read_scored_rows, scoring_temperature

_PLACES = 8  # modules, spread over the model, of which one is cut off until a tensor without a gradient is seen


# Gradients and the optimizer: F1, F2, F23
def cut_off(model: nn.Module) -> Figures:
    """Detach the output of one module after another, until a trainable tensor gets no gradient."""
    owners = [each for each in model.modules() if any(p.requires_grad for p in each.parameters(recurse=False))]
    ids = _ids(model)
    missing = 0
    with _gradients_kept(model), keep_random_state(), unseen(), torch.enable_grad():
        for module in owners[:: max(1, len(owners) // _PLACES)]:
            with module.register_forward_hook(_detach), gradients.watch(model) as watched:
                rows = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
                if rows.requires_grad:
                    rows.float().logsumexp(-1).sum().backward()
            missing = len(watched.report().without_gradient)
            if missing:
                break
    return {"tensors_without_gradient": missing}


def no_graph() -> Figures:
    """Go backward from a loss that nothing trainable leads to."""
    error = ""
    with torch.enable_grad():
        try:
            torch.zeros(()).backward()
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"error": error}


def empty_optimizer(model: nn.Module) -> Figures:
    """Count the tensors beside an optimizer that holds none."""
    return _beside(model, [])


def taken_out(model: nn.Module, optimizer: Any) -> Figures:
    """Count the tensors beside an optimizer that lacks the first one that is trained."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    return _beside(model, [parameter for parameter in held if parameter is not first])


def _beside(model: nn.Module, held: Sequence[torch.Tensor]) -> Figures:
    return gradients.count(model, types.SimpleNamespace(param_groups=[{"params": held}]))


# Scores: F3b, F15
def rows_moved(gradient: torch.Tensor, ids: torch.Tensor) -> Figures:
    """Read a gradient of logits, (batch, rows, vocabulary), as if each token stood one place further on."""
    return (read_scored_rows(gradient, ids.roll(1, 1)) or ScoredRows()).figures


def scored_at(logits: torch.Tensor, gradient: torch.Tensor, drawn: float) -> Figures:
    """Score the same tokens, by the same weights, at temperature 1."""
    token = gradient.abs().argmax(-1, keepdim=True)  # the scored token's entry is minus the sum of all others
    weight = gradient.gather(-1, token)
    other = -logits.float().softmax(-1)
    other = (other + torch.zeros_like(other).scatter(-1, token, 1.0)) * weight
    return mismatch.temperature_figures(scoring_temperature(logits, other), drawn)


# Placement: F5, F6
def first_gpu(model: nn.Module, device: Any) -> Figures:
    """Compare the model's tensors with a device that none of them is on."""
    return placement.check(model, "meta" if torch.device(device).type != "meta" else "cpu").figures


def scales_moved(model: nn.Module, device: Any) -> Figures:
    """Move the scales of one 4-bit weight to another device."""
    weights = (weight for weight in model.parameters() if getattr(weight, "quant_state", None) is not None)
    state = next(weights).quant_state  # type: ignore[attr-defined]  # bitsandbytes' own
    with mock.patch.object(state, "absmax", state.absmax.to("meta")):
        return placement.check(model, device).figures


# Updates: F9
def shorter_step(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """Take the same step a thousandth as long, of weights in bfloat16; both tensors in the dtype that is trained."""
    return updates.moved(before, before.double() + (after.double() - before.double()) / 1000, torch.bfloat16)


# Rewards: F10
def equal_rewards(groups: Sequence[Sequence[float | None]]) -> Figures:
    """Pay all completions of a group what its first one gets."""
    return counts.of_rewards([[group[0]] * len(group) for group in groups])


def equal_completions(groups: Sequence[Sequence[Any]]) -> Figures:
    """Let all completions of a group be its first one."""
    return counts.of_draws([[group[0]] * len(group) for group in groups])


# Prompts and ends: F12, F13
def plain_text(prompts: Sequence[str], mark: str) -> Figures:
    """Take the mark of the chat template out of one prompt."""
    return counts.of_texts([prompts[0].replace(mark, ""), *prompts[1:]], mark)


def another_end(completions: counts.Ids, ends: set[int], limit: int) -> Figures:
    """Let the trainer know another end than the policy draws."""
    return counts.of_completions(completions, ends, {max(ends) + 1}, limit)


# The engine: F16
def first_weights(
    model: nn.Module, first: Mapping[str, torch.Tensor], score: Callable[[], torch.Tensor], policy: torch.Tensor
) -> Figures:
    """Let the engine draw with the weights of the start; `score` gives the model's log-probabilities, as `policy`."""
    with mismatch.other_weights(model, first):
        engine = score()
    return {"policy_gap": float((policy - engine).abs().mean())}


# Groups: F22
def one_more(prompts: Sequence[Any], size: int) -> Figures:
    """Put one completion more into the batch."""
    return counts.of_groups([*prompts, prompts[-1]], size)


def one_each(prompts: Sequence[Any]) -> Figures:
    """Draw one completion for each prompt."""
    return counts.of_groups(list(dict.fromkeys(map(repr, prompts))), 1)


def not_repeated(prompts: Sequence[Any], size: int) -> Figures:
    """Let every completion of the batch be of another prompt."""
    return counts.of_groups(list(range(len(prompts))), size)


def _ids(model: nn.Module) -> torch.Tensor:
    return torch.arange(1, 9, device=next(model.parameters()).device)[None]  # (1, 8)


def _detach(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_detach(module, args, part) for part in output)
    return output.detach() if isinstance(output, torch.Tensor) else output


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """After the block, every parameter has the gradient that it had before, or none."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
