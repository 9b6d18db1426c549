"""F23: trainable tensors that the optimizer does not hold, so that no step changes the model; and steps without effect.

Each step of the optimizer is looked at: its learning rate, whether there is any gradient, how far it moves the weights,
and whether they are still there at the end. A callback that sets the rate or the weights shows in no argument. Where
the weights are the real ones, it is measured how far a step moves the policy; a random model hardly shows that.

Upstream: the registry's F23.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from failurelab._unwrap import has_adapter
from failurelab.handles import unseen
from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.judges.plan import LARGE, LOW_SUM, planned_rates, policy_size
from failurelab.preflight.repairs import Keyword
from failurelab.preflight.stage import models
from failurelab.preflight.training import Training

_SAMPLED = 4096  # elements of a tensor
_SHARE, _EPSILON, _CLIP = 0.05, 1e-6, 1e-4  # of the rate, which an element is moved by; of Adam; of a gradient's norm
# Published runs of GRPO train whole models at 1e-7 to 1e-5, and no healthy script of the corpora has more than 5e-3. A
# step of the cut run moved the small policy that ships by at most 0.04 nats a token at 1e-3, by 0.6 at 3e-3, 2.3 at
# 5e-3, 7.1 at 1e-2, and 12 at 2e-2, where real training was lost in its first step.
_BEYOND = 1e-2  # a learning rate of AdamW's
_COLLAPSE = (5.0, 1.0)  # divergences of a step in nats a token: at any rate, and at one beyond
_LEFT = 0.02  # of the longest step: what is left of three at the end, where something takes them back


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of the optimizer.

    Attributes:
        rate: its largest learning rate.
        gradient: whether any is not 0.
        moved: its largest move of an element.
        diverged: the divergence of the policy after it from the policy before, in nats a token; NaN if not measured.
    """

    rate: float
    gradient: bool
    moved: float
    diverged: float = float("nan")


class OptimizerJudge(TrainerCallback):
    """Looks at the tensors that the optimizer holds, and at what its steps make of them."""

    def __init__(self, training: Training):
        self._training, self._hooks = training, contextlib.ExitStack()
        self._steps: list[_Step] = []
        self._start: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._logps: torch.Tensor | None = None
        self._left = float("nan")  # how far an element is from where it began, at the end

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the steps are looked at."""
        self._training.trainer.add_callback(self)
        with self._hooks:
            yield
        self._training.trainer.remove_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Listen to the optimizer, which is made by now."""
        bare = getattr(optimizer, "optimizer", optimizer)
        if isinstance(bare, torch.optim.Optimizer):
            self._start = _sample(bare)
            for hook in (bare.register_step_pre_hook(self._begin), bare.register_step_post_hook(self._end)):
                self._hooks.callback(hook.remove)
            self._hooks.callback(lambda: setattr(self, "_left", _apart(self._start, _sample(bare))))

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._before, self._logps = _sample(optimizer), self._probe()

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rate = max(group["lr"] for group in optimizer.param_groups)
        gradients = (tensor.grad for group in optimizer.param_groups for tensor in group["params"])
        some = any(gradient is not None and bool(gradient.count_nonzero()) for gradient in gradients)
        diverged, after = float("nan"), self._probe()
        if self._logps is not None and after is not None:
            diverged = float((self._logps.exp() * (self._logps - after)).sum(-1).mean())
        self._steps.append(_Step(float(rate), some, _apart(self._before, _sample(optimizer)), diverged))

    def _probe(self) -> torch.Tensor | None:
        """Return the policy's log-probabilities of every token at a few places; None of a model that was cut."""
        with contextlib.suppress(Exception), unseen():  # a model that needs more than ids
            return None if self._training.small else models.probe(self._training.trainer.model).log_softmax(-1)
        return None

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen, after training."""
        yield from _judge_tensors(self._training)
        if self._training.finished and len(self._steps) > 1:
            yield from self._judge_steps(len(self._steps))
            yield from self._judge_height()

    def _judge_height(self) -> Iterator[Finding]:
        """Yield a rate at which a step makes another policy: measured, else by what whole models are trained at."""
        farthest = max(self._steps, key=lambda step: step.diverged)
        rate = max(planned_rates(self._training), default=0.0)
        kind = type(getattr(self._training.trainer.optimizer, "optimizer", self._training.trainer.optimizer)).__name__
        tensors = list(self._training.trainer.model.parameters())
        trained = sum(tensor.numel() for tensor in tensors if tensor.requires_grad)
        whole = 2 * trained > sum(tensor.numel() for tensor in tensors)
        beyond = rate > _BEYOND and whole and kind.startswith("Adam")
        reached = not self._training.small and any(2 * step.rate >= rate for step in self._steps)
        repair = "Look for where the rate comes from: a default that was not meant. Begin with 1e-6 to 1e-5, a small "
        repair += "model with 1e-4 to 1e-3, adapters with 1e-5 to 1e-4."
        more: dict[str, Any] = {"part": "high"}
        if farthest.diverged >= _COLLAPSE[beyond]:
            said = f"at a learning rate of {farthest.rate:.2g} one step of the cut run moves the policy by "
            said += f"{farthest.diverged:.2g} nats a token (KL), where a step of GRPO mostly moves it by less than 0.1"
            why = "the rewards of the cut run are its own; whether a run comes back from that, its first steps show"
            more["figures"] = (Quantity("divergence of a step", farthest.diverged, "nats a token"),)
            yield Finding.suspected("rate", f"{said}: it is another policy then", why, repair, **more)
        elif beyond and not reached and policy_size(self._training) < LARGE:  # of large ones the plan is told
            said = f"a whole model is trained with {kind} at a learning rate of {rate:g}, and a step moves an element "
            said += "by about the rate: runs of GRPO have 1e-7 to 1e-5, and small models up to 5e-3"
            why = "what a step makes of this policy takes its real weights to see (--real-model)"
            yield Finding.suspected("rate", said, why, repair, **more)

    def _judge_steps(self, count: int) -> Iterator[Finding]:
        longest, rates = max(step.moved for step in self._steps), planned_rates(self._training)
        optimizer = getattr(self._training.trainer.optimizer, "optimizer", self._training.trainer.optimizer)
        three, why = f"each of the {count} steps of the cut run", "a longer run may do otherwise; look for what sets it"
        reference = getattr(self._training.trainer, "ref_model", None)
        if isinstance(reference, torch.nn.Module) and self._left and _same(self._training.trainer.model, reference):
            said = f"after {count} steps the reference model has the policy's weights, which have left where they began"
            repair = "Leave the reference as it is, or let it follow after many steps, and in part (sync_ref_model)."
            yield Finding.suspected("F19", f"{said}: a penalty holds it near to nothing", why, repair, part="follows")
        kind, epsilon = type(optimizer).__name__, optimizer.defaults.get("eps") or 0.0
        clip = self._training.arguments.get("max_grad_norm") or 1.0
        share = max((step.moved / step.rate for step in self._steps if step.rate), default=1.0)
        if not any(step.rate for step in self._steps) and max(rates[1:count], default=0):
            said = f"the optimizer's learning rate is 0 in {three}, and by the schedule it is {max(rates[:count]):.2g}"
            repair = "Look for what sets it: a callback that writes param_groups, or a learning rate of its groups."
            yield Finding.suspected("rate", f"{said}: something else sets it", why, repair)
        elif not any(step.gradient for step in self._steps) and (cause := _dead_adapter(self._training.trainer.model)):
            said, repair = cause
            yield Finding.suspected("F23", f"{said}: every gradient is exactly 0 in {three}", why, repair)
        elif longest and self._left <= _LEFT * longest:
            said = f"a step moves an element by up to {longest:.2g}, and after {count} steps none is further than"
            said += f" {self._left:.2g} from where it began: something takes the steps back"
            repair = "Look for what writes the weights between steps: a callback that restores or averages them."
            yield Finding.suspected("callback", said, why, repair, part="weights")
        elif longest and "Adam" in kind and share <= _SHARE and (epsilon > _EPSILON or clip < _CLIP):
            said = f"{kind} moves an element by {share:.1g} of its learning rate at most in {three}: its epsilon is"
            said += f" {epsilon:g} and max_grad_norm {clip:g}, and a gradient is small beside the first, or is made so"
            repair = "Leave adam_epsilon at 1e-8, and max_grad_norm at 0.1 to 1."
            yield Finding.suspected("rate", said, why, repair)
        elif "SGD" in kind and 0 < len(rates) * longest <= LOW_SUM:
            said = f"{kind} moves an element by the rate times its gradient, {longest:.1g} at most in {three}; about"
            said += f" {len(rates)} planned steps in one direction bring it to {len(rates) * longest:.1g}"
            why = "what that is worth for learning depends on model and task, and takes a whole run to see"
            repair = "Use AdamW, whose step is about the rate, or a rate that is larger by orders of magnitude."
            yield Finding.suspected("rate", said, why, repair)


def _sample(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [tensor.detach().reshape(-1) for group in optimizer.param_groups for tensor in group["params"]]
    return [tensor[:: max(1, len(tensor) // _SAMPLED)].clone() for tensor in tensors]


def _apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the largest difference of two samples; NaN where there is one."""
    return max((float((a - b).abs().max()) for a, b in zip(one, other) if a.shape == b.shape and len(a)), default=0.0)


def _same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether two models have the same weights, and each its own."""
    pairs = [(a, b) for a, b in zip(model.parameters(), other.parameters()) if a.shape == b.shape]
    return bool(pairs) and all(a is not b and torch.equal(a, b) for a, b in pairs)


def _dead_adapter(model: Any) -> tuple[str, str] | None:
    """Return why a low-rank adapter can get no gradient, and what to do; None where it can."""
    scales = [scale for module in model.modules() for scale in _values(getattr(module, "scaling", None))]
    if scales and not any(scales):
        return "lora_alpha / r is 0, and the adapter's output is multiplied by it", "Give lora_alpha, r or twice r."
    b = [tensor for name, tensor in model.named_parameters() if "lora_B" in name]
    if b and not any(tensor.requires_grad or tensor.count_nonzero() for tensor in b):
        return "lora_B is 0 and frozen, and lora_A's gradient is multiplied by it", "Train lora_B too."
    return None


def _values(scaling: Any) -> list[float]:
    return list(scaling.values()) if isinstance(scaling, dict) else []


def _judge_tensors(training: Training) -> Iterator[Finding]:
    """Compare the tensors that are trained with those that the optimizer holds, after training."""
    model, optimizer = training.trainer.model, getattr(training.trainer, "optimizer", None)
    if optimizer is None:
        yield Finding.not_checked("F23", "training ended before there was an optimizer")
        return
    groups = [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]
    kept = set().union(*groups)
    named = list(model.named_parameters()) if has_adapter(model) else []
    adapters = [id(parameter) for name, parameter in named if _is_adapter(name, model)]  # none of a learned prompt
    wanted = adapters or [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    count, what = len(kept.intersection(wanted)), "tensors of the adapters" if adapters else "trainable tensors"
    evidence = f"the optimizer holds {count} of {len(wanted)} {what}"
    figures = (Quantity("tensors that the optimizer holds", count, "tensors", len(wanted)),)
    stepped = [tensor for tensor in model.parameters() if id(tensor) in kept.intersection(wanted)]
    without = set(wanted) - kept
    left = [tensor for tensor in model.parameters() if id(tensor) in without]
    if count and any(tensor.ndim > 1 for tensor in left) and all(tensor.ndim < 2 for tensor in stepped):
        evidence += ", biases and the weights of norms, and not one matrix"
        repair = "Let its groups hold the matrices too: look at the names that divide the groups."
        why = "a script may train these alone, and mostly freezes the others then"
        yield Finding.suspected("F23", evidence, why, repair, figures=figures)
        return
    if count:
        largest = max(groups, key=len)
        fewer = len(kept.difference(largest).intersection(wanted))
        yield Finding.held("F23", evidence, f"without its largest group it would hold {fewer}", figures=figures)
        return
    evidence += ": no step changes the model"
    if adapters and not any(tensor.requires_grad for tensor in model.parameters() if id(tensor) in adapters):
        off = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
        evidence += f"; they are {'switched off (disable_adapter_layers)' if off else 'frozen (inference_mode, say)'}"
    repair = "Make the optimizer of the parameters that the trainer's model has when training begins."
    undo = Keyword("trainer", "optimizers") if "optimizers" in training.keywords else None
    if training.adapters and not training.adapters[-1].trainable:
        evidence += f"; {training.adapters[-1].name} was loaded without is_trainable=True"
        repair = "PeftModel.from_pretrained(model, adapter, is_trainable=True)"
        undo = Keyword("adapter", "is_trainable", "True")
    yield Finding("F23", evidence, repair, undo=undo, figures=figures)


def _is_adapter(name: str, model: Any) -> bool:
    """Whether a tensor is of the adapter in use: a low-rank matrix, or a module that is trained as a whole."""
    active = getattr(model, "active_adapter", None)
    return ("lora_" in name or "modules_to_save" in name) and (
        not isinstance(active, str) or f".{active}" in name or "lora_" not in name
    )
