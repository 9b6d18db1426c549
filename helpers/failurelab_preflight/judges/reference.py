"""F19: a reference model that is not the policy at the start, or one that is needed and does not exist.

The KL term holds the policy near its reference. Where an adapter was merged into the policy, the reference that a
trainer loads by the checkpoint's name lacks it; where the policy has a trained adapter, a reference made by switching
adapters off lacks it too. Then KL is above 0 before the first step, and training pulls the policy back to what it was
before. With LoRA there is no reference model, so `sync_ref_model` has nothing to write to: releases before 0.28 say
nothing, and later ones refuse it. The cut leaves the option out, so that what the release does is the registry's.

Upstream: TRL #3194, #3108, PR #4912 (refused from 0.28 on).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from failurelab import handles
from failurelab._unwrap import has_adapter
from failurelab.textbook.scores import plain
from failurelab_preflight.finding import Finding
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.repairs import Arguments, Keyword, Statement
from failurelab_preflight.stage.models import adapters_off, probe
from failurelab_preflight.training import Training

_MERGE = "Merge the adapter, save the model, and give the trainer that folder with a new peft_config."
_SAVE = "Save the changed policy, and give the trainer that folder: its reference is made of what was loaded."


def judge_reference(training: Training) -> Iterator[Finding]:
    """Compare the reference with the policy before training; and ask whether there is one to be synced."""
    trainer, arguments = training.trainer, training.arguments
    reference = getattr(trainer, "ref_model", None)
    if not hasattr(trainer, "ref_model"):
        return
    if arguments.get("sync_ref_model") and reference is None:
        yield Finding(
            "F19",
            "sync_ref_model is asked for, and there is no reference model: some releases refuse that, and in others "
            "nothing is ever synced, without a word",
            "Leave sync_ref_model out, or train without an adapter and with beta above 0.",
            undo=Arguments({"sync_ref_model": False}),
        )
    elif arguments.get("beta") != 0 and not arguments.get("ref_adapter_name"):
        model = _bare(trainer.model)
        if reference is not None:
            reference = _bare(reference)
            yield _judge_model(training, model, reference) or _compare(training, model, reference)
        elif hasattr(model, "disable_adapter") and hasattr(model, "peft_config"):
            yield _compare(training, model, "ref" if "ref" in model.peft_config else None)


def _judge_model(training: Training, model: Any, reference: torch.nn.Module) -> Finding | None:
    """Tell a reference model of another checkpoint, and one that has the policy's own tensors."""
    own, other = (getattr(getattr(policy, "config", None), "_name_or_path", "") for policy in (model, reference))
    if own and other and own != other and (training.small or _share_changed(model, reference)):
        return Finding(
            "F19",
            f"the policy is {own} and its reference is {other}: KL is above 0 before the first step",
            "Load the reference from the policy's checkpoint, or leave ref_model out.",
            undo=Keyword("trainer", "ref_model") if training.keywords.get("ref_model") is not None else None,
        )
    if any(parameter.requires_grad for parameter in set(model.parameters()) & set(reference.parameters())):
        return Finding(
            "F19",
            "the reference model has tensors of the policy that are trained: it moves with it, and holds nothing",
            "Make it a copy: trainer.ref_model = copy.deepcopy(trainer.model).eval()",
            undo=Statement("{trainer}.ref_model = copy.deepcopy({trainer}.model).eval()", imports="import copy"),
        )
    return None


def _compare(training: Training, model: Any, reference: Any) -> Finding:
    """Compare a policy with its reference: a model, "ref" for an adapter of that name, or None: without its adapter.

    The largest difference in a log-probability is a bound of the KL divergence.
    """
    apart = isinstance(reference, torch.nn.Module)
    what = "its reference model" if apart else "its reference, an adapter of its own or the policy without one,"
    gap, changed = _gap(model, reference), _gap_if_changed(model, reference)
    figures = {"beta": 1.0, "adapter_effect": changed, "kl_at_first_step": gap}  # of any penalty, and of any change
    said = f"the policy and {what} are apart by {gap:.2g} in a log-probability before the first step"
    controls = {"the base model as the reference": {"kl_at_first_step": changed}}
    if settled := settle("F19", [figures], controls, said):
        return settled
    lost = reference is None or (apart and has_adapter(model) and not has_adapter(reference) and _gap(model, None) > 0)
    if apart and not lost and training.small and _share_changed(model, reference) == 1:
        why = "policy and reference were both built small, and differ by how they were loaded"
        return Finding.not_checked("F19", why)
    copied = Statement("{trainer}.ref_model.load_state_dict({trainer}.model.state_dict())")
    return Finding("F19", said, _MERGE if lost else _SAVE, undo=copied if apart and not lost else None)


def _gap_if_changed(model: Any, reference: Any) -> float:
    """Return the gap of a policy of which one matrix is changed, for as long as it is measured."""
    weights = [weight for weight in model.parameters() if weight.ndim > 1 and weight.is_floating_point()]
    adapter = [weight for name, weight in model.named_parameters() if "lora_B" in name and ".ref." not in name]
    changed = weights[-1] if isinstance(reference, torch.nn.Module) else (adapter or weights)[-1]
    before = changed.detach().clone()
    noise = torch.randn(changed.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(changed)
    with torch.no_grad():
        try:
            changed.add_(noise, alpha=0.1)
            return _gap(model, reference)
        finally:
            changed.copy_(before)


def _bare(model: Any) -> Any:
    """Return a model without the wrappers of torch and accelerate; an adapter's stays."""
    while hasattr(model, "_orig_mod") or isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def _gap(policy: Any, reference: Any) -> float:
    """Return the largest difference in log-probability over eight tokens; 0 of a model that differs by its dtype alone.

    The reference is a model, "ref" for the adapter of that name, or None for the policy without its adapter.
    """
    if isinstance(reference, torch.nn.Module) and not _share_changed(policy, reference):
        return 0.0
    before = _score(policy)
    with contextlib.ExitStack() as stack:
        if reference == "ref":
            stack.enter_context(handles.keep_requires_grad(policy))
            stack.callback(policy.set_adapter, policy.active_adapter)
            policy.set_adapter("ref")
        elif reference is None:
            stack.enter_context(adapters_off(policy))
        after = _score(reference if isinstance(reference, torch.nn.Module) else policy)
    width = min(before.shape[-1], after.shape[-1])  # one of them may have tokens added
    return float((before[..., :width] - after[..., :width]).abs().max())


def _score(model: Any) -> torch.Tensor:
    with plain(model):  # a copy of the policy may have its patched forward, which asks the policy
        return probe(model).log_softmax(-1)


def _share_changed(model: Any, reference: Any) -> float:
    """Return the share of matrices that differ by more than their dtypes; one that only one model has is left out."""
    own = dict(reference.named_parameters())
    pairs = [(weight, own[name]) for name, weight in model.named_parameters() if weight.ndim > 1 and name in own]
    return sum(_differ(a.detach().cpu(), b.detach().cpu()) for a, b in pairs) / max(len(pairs), 1)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    rows = min(one.shape[0], other.shape[0])
    dtype = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return one.shape[1:] != other.shape[1:] or not torch.equal(one[:rows].to(dtype), other[:rows].to(dtype))
