"""Controls: each mechanism of the registry planted on the object at hand, and measured as it is measured there.

A measurement that does not see a failure proves nothing until it has seen one. The model may be too small, the tokens
too much alike, the batch too short. So before a failure is HELD, its mechanism is planted on the same model, batch or
rewards, and the same measurement is asked. What it says goes to `verdicts.judge` under the control's name:

    judged = verdicts.judge(failure, [figures], {"equal rewards": plants.equal_rewards(groups)})

`PLANTS` has them all by the names that the registry's `[[mechanism]]` rows write. What is planted is taken back, also
where the measurement raises.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn

from failurelab import gradients, mismatch, placement, rollouts, updates, zero3
from failurelab.failures.predicates import Value
from failurelab.handles import keep_random_state, keep_requires_grad, unseen
from failurelab.measure import counts, differences
from failurelab.measure.scores import ScoredRows, read_scored_rows, scoring_temperature
from failurelab.textbook import suspects
from failurelab.textbook.apart import Floor, measure_apart

Figures = Mapping[str, Value]
Plant = TypeVar("Plant", bound=Callable[..., Mapping[str, Any]])
PLANTS: dict[str, Callable[..., Figures]] = {}
_PLACES = 8  # modules, spread over the model, of which one is cut off until a tensor without a gradient is seen


def _plant(control: str) -> Callable[[Plant], Plant]:
    """Put a function into the table, by the name of the control that it plants."""

    def register(plant: Plant) -> Plant:
        PLANTS[control] = plant
        return plant

    return register


# Gradients and the optimizer: F1, F2, F23
@_plant("a module cut off from the loss")
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


@_plant("a loss without a graph")
def no_graph() -> Figures:
    """Go backward from a loss that nothing trainable leads to."""
    error = ""
    with torch.enable_grad():
        try:
            torch.zeros(()).backward()
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"error": error}


@_plant("an empty optimizer")
def empty_optimizer(model: nn.Module) -> Figures:
    """Count the tensors beside an optimizer that holds none."""
    return _beside(model, [])


@_plant("a tensor taken out of the optimizer")
def taken_out(model: nn.Module, optimizer: Any) -> Figures:
    """Count the tensors beside an optimizer that lacks the first one that is trained."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    return _beside(model, [parameter for parameter in held if parameter is not first])


def _beside(model: nn.Module, held: Sequence[torch.Tensor]) -> Figures:
    return gradients.count(model, types.SimpleNamespace(param_groups=[{"params": held}]))


# Scores: F3a, F3b, F15
@_plant("logits of the whole sequence")
def whole_sequence(model: nn.Module, ids: torch.Tensor) -> Figures:
    """Ask a model for logits as somebody does whose argument for fewer is swallowed; `ids` are (batch, tokens)."""
    with torch.no_grad(), keep_random_state(), unseen():
        return {"rows_made": model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape[1]}


@_plant("rows moved by one")
def rows_moved(gradient: torch.Tensor, ids: torch.Tensor) -> Figures:
    """Read a gradient of logits, (batch, rows, vocabulary), as if each token stood one place further on."""
    return (read_scored_rows(gradient, ids.roll(1, 1)) or ScoredRows()).figures


@_plant("the nearest known mistake")
def nearest_mistake(contrast: float) -> Figures:
    """Return what the known-answer probe gets with the nearest known mistake, in nats."""
    return {"log_prob_error": contrast}


@_plant("scores at temperature 1")
def scored_at(logits: torch.Tensor, gradient: torch.Tensor, drawn: float, scored: float = 1.0) -> Figures:
    """Score the same tokens, by the same weights, at another temperature than they are drawn at."""
    token = gradient.abs().argmax(-1, keepdim=True)  # the scored token's entry is minus the sum of all others
    weight = gradient.gather(-1, token)
    other = -(logits.float() / scored).softmax(-1)
    other = (other + torch.zeros_like(other).scatter(-1, token, 1.0)) * weight
    return mismatch.temperature_figures(scoring_temperature(logits, other), drawn)


# ZeRO-3: F4
@_plant("the bare model handed over")
def bare_model(model: nn.Module) -> Figures:
    """Look at the model as it lies there, outside of generation: ZeRO-3's hooks are on it."""
    return zero3.figures(model)


# Placement: F5, F6
@_plant("tensors on another device")
def first_gpu(model: nn.Module, device: Any) -> Figures:
    """Compare the model's tensors with a device that none of them is on."""
    return placement.check(model, "meta" if torch.device(device).type != "meta" else "cpu").figures


@_plant("a device map that names GPU 0")
def refused(model: Any, accelerator: Any) -> Figures:
    """Hand accelerate the model with what a load in 4 bit with `device_map={"": "cuda:0"}` leaves on it."""
    loaded: dict[str, Any] = {"is_loaded_in_4bit": True, "hf_device_map": {"": "cuda:0"}}
    loaded |= {"_is_accelerate_prepared": False}
    device = mock.patch.object(accelerator.state, "device", torch.device("cuda", 1))
    with device, mock.patch.multiple(model, create=True, **loaded):
        return placement.refusal(model, accelerator)


@_plant("scales moved to another device")
def scales_moved(model: nn.Module, device: Any) -> Figures:
    """Move the scales of one 4-bit weight to another device."""
    weights = (weight for weight in model.parameters() if getattr(weight, "quant_state", None) is not None)
    state = next(weights).quant_state  # type: ignore[attr-defined]  # bitsandbytes' own
    with mock.patch.object(state, "absmax", state.absmax.to("meta")):
        return placement.check(model, device).figures


# Rollouts: F7
def of_rollouts(mistake: str, model: nn.Module, prompt: torch.Tensor, completion: list[int]) -> Figures:
    """Let earlier tokens read later ones, or predict each token from the one before it."""
    with torch.no_grad(), unseen():
        return dict(rollouts.plant(model, prompt, completion).get(mistake, {}))


PLANTS |= {
    name: functools.partial(of_rollouts, name) for name in ("no causal mask", "predicted from the last token alone")
}


# Adapters and the reference: F8, F19
@_plant("a new adapter")
def new_adapter(model: nn.Module, measure: Callable[[], Figures]) -> Figures:
    """Give the adapter in use the zeros that a new one begins with."""
    kept = [(p, p.detach().clone()) for name, p in model.named_parameters() if "lora_B" in name]
    try:
        for parameter, _ in kept:
            parameter.data.zero_()
        return measure()
    finally:
        for parameter, values in kept:
            parameter.data.copy_(values)


@_plant("the base model as the reference")
def base_as_reference(model: Any, ids: torch.Tensor) -> Figures:
    """Take the policy without its adapter for the reference; `ids` are (batch, tokens)."""
    with torch.no_grad(), keep_random_state(), unseen():
        policy = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        with keep_requires_grad(model), model.disable_adapter():
            base = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return differences.of_reference(policy, base)


# Updates: F9
@_plant("a step a thousandth as long")
def shorter_step(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """Take the same step a thousandth as long, of weights in bfloat16; both tensors in the dtype that is trained."""
    return updates.moved(before, before.double() + (after.double() - before.double()) / 1000, torch.bfloat16)


# Rewards: F10, F14
@_plant("equal rewards")
def equal_rewards(groups: Sequence[Sequence[float | None]]) -> Figures:
    """Pay all completions of a group what its first one gets."""
    return counts.of_rewards([[group[0]] * len(group) for group in groups])


@_plant("equal completions")
def equal_completions(groups: Sequence[Sequence[Any]]) -> Figures:
    """Let all completions of a group be its first one."""
    return counts.of_draws([[group[0]] * len(group) for group in groups])


@_plant("a reward that is no number")
def no_number(groups: Sequence[Sequence[float | None]]) -> Figures:
    """Pay one completion a reward that is no number."""
    return counts.of_rewards([[*group[:-1], float("nan")] for group in groups])


@_plant("what it needs taken away")
def text_taken_away(pay: Callable[[list[str]], Sequence[float | None]], texts: list[str], right: list[bool]) -> Figures:
    """Ask a reward function about completions without their text; `pay` calls it as the run does."""
    lacking, given = (counts.of_worth(pay(each), right) for each in ([""] * len(texts), texts))
    return lacking | {"margin_if_given": given["margin"]}


# Prompts, ends and lengths: F11, F12, F13
@_plant("a smaller limit")
def smaller_limit(completions: counts.Ids, ends: set[int], prompts: counts.Ids = ()) -> Figures:
    """Cut completions behind their first token, and prompts before their last one."""
    figures = counts.of_completions([row[:1] for row in completions], ends, ends, 1)
    return figures | counts.of_prompts(prompts, limit=max(map(len, prompts), default=1) - 1)


@_plant("a prompt as plain text")
def plain_text(prompts: Sequence[str], mark: str) -> Figures:
    """Take the mark of the chat template out of one prompt."""
    return counts.of_texts([prompts[0].replace(mark, ""), *prompts[1:]], mark)


@_plant("an end of another token")
def another_end(completions: counts.Ids, ends: set[int], limit: int) -> Figures:
    """Let the trainer know another end than the policy draws."""
    return counts.of_completions(completions, ends, {max(ends) + 1}, limit)


# The engine: F16, F17, F18
@_plant("the first weights")
def first_weights(
    model: nn.Module, first: Mapping[str, torch.Tensor], score: Callable[[], torch.Tensor], policy: torch.Tensor
) -> Figures:
    """Let the engine draw with the weights of the start; `score` gives the model's log-probabilities, as `policy`."""
    with mismatch.other_weights(model, first):
        engine = score()
    return {"policy_gap": float((policy - engine).abs().mean())}


@_plant("the sum of all log-ratios")
def summed_ratios(policy: torch.Tensor, mask: torch.Tensor) -> Figures:
    """Weigh each sequence by the sum of all its log-ratios with an engine that rounds by 0.1 nats; (batch, tokens)."""
    noise = torch.randn(policy.shape, generator=torch.Generator().manual_seed(0)).to(policy) * 0.1
    weights = mismatch.importance_weights(policy, policy + noise, mask, cap=None)
    effective = mismatch.effective_sample_size(weights)
    return {"effective_share": effective, "effective_batch": effective}


# A step: F20, F21
@_plant("the loss scaled by the way that the batch is cut")
def scaled(gradient: Mapping[str, torch.Tensor], floor: Floor, factor: float) -> Figures:
    """Scale a right gradient."""
    return floor.figures(measure_apart({name: grad * factor for name, grad in gradient.items()}, gradient))


PLANTS |= {
    "half the loss": functools.partial(scaled, factor=0.5),
    "opposite sign": functools.partial(scaled, factor=-1),
}


def in_textbook(mistake: str, search: suspects.Search, right: Mapping[str, torch.Tensor]) -> Figures:
    """Plant a mistake in the textbook of a step."""
    return search.floor.figures(search.plant(dict(right))[mistake])


PLANTS |= {
    name: functools.partial(in_textbook, name) for name in (suspects.OTHER_ROWS, suspects.NO_MASK, *suspects.LEFT_OUT)
}


# Groups: F22
@_plant("one completion more")
def one_more(prompts: Sequence[Any], size: int) -> Figures:
    """Put one completion more into the batch."""
    return counts.of_groups([*prompts, prompts[-1]], size)


@_plant("one completion a prompt")
def one_each(prompts: Sequence[Any]) -> Figures:
    """Draw one completion for each prompt."""
    return counts.of_groups(list(dict.fromkeys(map(repr, prompts))), 1)


@_plant("prompts that are not repeated")
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
