"""F9: weights in bfloat16 that an optimizer steps in bfloat16, with steps too small to change them.

The cut model is trained in float32, so what the real run would do is told from the load: the dtype that this stack
gives, the optimizer, and the highest learning rate. Where the weights are here (a local checkpoint, or the real model)
the share of elements that a step changes is computed on them; else on numbers spread as the configuration's
initializer_range says, and the evidence says so.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from packaging.version import Version

from failurelab import updates
from failurelab._unwrap import has_adapter, unwrap
from failurelab.failures import figures
from failurelab_preflight.finding import RELEASE, Finding
from failurelab_preflight.judges.settled import forgiven, settle
from failurelab_preflight.repairs import Arguments, Keyword, Repair, Statement
from failurelab_preflight.training import Load, Training

_LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_STEPPED = ("adam", "paged_adam", "lion", "ademamix")  # whose first step is the learning rate, whatever the gradient
_COPIES = ("apex", "anyprecision", "fused_apex")
_ELEMENTS = 1 << 21  # of a checkpoint that are read, spread over its tensors


def judge_updates(training: Training) -> Iterator[Finding]:
    """Tell a load in 16 bits whose weights a step of this learning rate leaves as they are."""
    load, own = policy_load(training), own_optimizer(training)
    trainer, rate = training.trainer, own[1].get("lr") if own else training.arguments.get("learning_rate")
    if load is None or not rate:
        return
    rate = float(rate)
    low = next((p.dtype for p in trainer.model.parameters() if p.requires_grad and p.dtype.itemsize < 4), None)
    if has_adapter(trainer.model):
        yield _judge_adapter(training, load, rate, low)
        return
    if load.dtype not in _LOW and low is not None:
        load = dataclasses.replace(load, dtype=str(low).removeprefix("torch."))
    if load.dtype not in _LOW:
        yield from _by_share(training, load, rate, torch.float32, f"{load.name} is loaded in {load.dtype}")
        return
    optimizer = optimizer_name(training)
    optimizer = f"{getattr(own[0], '__name__', own[0])} of the script" if own else optimizer
    known, copies = optimizer.lower().startswith(_STEPPED), any(name in optimizer for name in _COPIES)
    if own:  # one of another library may keep what the weights cannot
        known = known and getattr(own[0], "__module__", "").startswith(("torch.", "bitsandbytes."))
    if training.lacks:
        why = (
            f"loaded in {load.dtype}; DeepSpeed's configuration {training.lacks} is not there: with ZeRO the optimizer"
        )
        yield Finding.not_checked("F9", f"{why} would step float32 copies of the weights")
        return
    if training.zero_stage or copies:
        yield Finding.not_applicable(
            "F9", f"loaded in {load.dtype}, and {optimizer} steps float32 copies of the weights"
        )
        return
    if training.arguments.get("fsdp") or not known:
        yield Finding.not_checked(
            "F9", f"loaded in {load.dtype}; how large a step of {optimizer} is, and on what, is not known"
        )
        return
    evidence = f"{load.name} is loaded in {load.dtype}{' by the trainer' if load.by_trainer else ''}, and {optimizer}"
    yield from _by_share(training, load, rate, _LOW[load.dtype], f"{evidence} steps these weights")


def _by_share(training: Training, load: Load, rate: float, dtype: torch.dtype, loaded: str) -> Iterator[Finding]:
    """Tell which share of the weights a step changes; where a part does, the run is slowed, and that is noted."""
    share, of = _share(training, load, rate, dtype)
    evidence = f"{loaded}: a step of {rate:g} changes {share:.1%} of {of}"
    evidence += "; in float32 it changes all" * (dtype.itemsize < 4)
    repair, undo = _in_float32(training, load)
    if settled := settle_share(share, _share(training, load, rate / 1000, torch.bfloat16)[0], evidence):
        if in_band(share):
            yield settled
        else:
            why = "the run is slowed, not lost: runs of large models with shares of 2 to 8 % are known to learn"
            yield Finding.noted("F9", f"{evidence}; {why}", repair, mild=True)
    else:
        yield Finding("F9", evidence, repair, undo=undo)


def in_band(share: float) -> bool:
    """Return whether a share of elements that a step changes is a healthy one."""
    healthy = figures.table()["elements_moved"].healthy
    return healthy is not None and healthy.holds({"elements_moved": share}) is True


def settle_share(share: float, planted: float, evidence: str) -> Finding | None:
    """Return what is to be said of a share that a step changes, and of a step a thousandth as long in bfloat16."""
    measured = {"tensors_trainable": 1, "elements_moved": share}
    return settle("F9", [measured], {"a step a thousandth as long": {"elements_moved": planted}}, evidence)


def optimizer_name(training: Training) -> str:
    """Return the name of the optimizer that the arguments ask for."""
    optimizer = training.arguments.get("optim") or "adamw_torch"
    return str(getattr(optimizer, "value", optimizer))


def own_optimizer(training: Training) -> tuple[Any, dict[str, Any]] | None:
    """Return the class of an optimizer that the script gives the trainer, and its options; None where it gives none."""
    optimizer = (training.keywords.get("optimizers") or (None,))[0]
    if optimizer is None:
        return training.keywords.get("optimizer_cls_and_kwargs")
    rates = [group.get("initial_lr", group["lr"]) for group in getattr(optimizer, "param_groups", ())]
    rate = max(rates, default=training.arguments.get("learning_rate"))
    return type(optimizer), {**getattr(optimizer, "defaults", {}), "lr": rate}


def _judge_adapter(training: Training, load: Load, rate: float, dtype: torch.dtype | None) -> Finding:
    """Tell an adapter in 16 bits, as trl makes those of a quantized model: how much it is slowed, a run tells.

    `dtype` is of what is trained in less than float32; None where nothing is.
    """
    copies = sum(tensor.requires_grad for _, tensor in _copies(training.trainer.model))
    if dtype is None and copies and not training.zero_stage and load.dtype in _LOW:
        why = f"modules_to_save trains {copies} tensor(s) of the base in full, in {load.dtype}, not looked at"
        return Finding.not_checked("F9", why)
    if dtype is None:
        return Finding.not_applicable("F9", f"the adapter is trained in float32, whatever the base's {load.dtype}")
    width = int(getattr(load.config, "hidden_size", None) or 1024)
    a = (2 * torch.rand(1 << 16, generator=torch.Generator().manual_seed(0), device="cpu") - 1) / width**0.5
    share = updates.expected_share(a, rate, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    evidence = f"the adapter is trained in {name}, where a step of {rate:g} changes {share:.1%} of A's numbers"
    settled = settle_share(share, updates.expected_share(a, rate / 1000, dtype=torch.bfloat16), evidence)
    if settled and in_band(share):
        return settled
    repair = "updates.to_float32(trainer.model) after the trainer is made keeps them in float32"
    slows = f"{evidence}, and of B's, which begin at zero, fewer as they grow"
    release = {"origin": RELEASE, "mild": True} if load.bits and forgiven("F9") else {}  # as trl makes them
    if settled is None:
        why = "B's first steps arrive; when they no longer do, a run tells"
        return Finding.suspected("F9", slows, why, repair, **release)
    return Finding.not_checked("F9", f"{slows}. A long run slows down; how much, a run tells. {repair}")


def _copies(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that PEFT trains as full copies beside an adapter, by `modules_to_save`."""
    return ((name, tensor) for name, tensor in model.named_parameters() if ".modules_to_save." in name)


def policy_load(training: Training) -> Load | None:
    """Return the load of the model that is trained: its own, else one of its name, else the first."""
    model = unwrap(training.trainer.model)
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    own = (load for load in training.loads if load.model is not None and load.model() is model)
    named = (load for load in training.loads if load.name == name)
    return next(iter((*own, *named, *training.loads)), None)


def _share(training: Training, load: Load, rate: float, dtype: torch.dtype) -> tuple[float, str]:
    """Return the share of elements that a first step changes, and of which elements."""
    model, what = training.trainer.model, "the checkpoint's elements"
    if load.small:
        tensors, what = list(_parts(_stored(load.name))), f"a sample of {what}"
    else:
        named = _copies(model) if has_adapter(model) else model.named_parameters()
        tensors = list(_parts((name, weight) for name, weight in named if weight.requires_grad))
    if not tensors:
        spread = float(getattr(load.config, "initializer_range", None) or 0.02)
        numbers = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0), device="cpu") * spread
        tensors, what = [("", numbers)], f"numbers spread by {spread:g} (initializer_range)"
    return updates.shares(tensors, rate, dtype=dtype).share, what


def _stored(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a local checkpoint, one at a time; none where it is not a folder of safetensors."""
    files = sorted(pathlib.Path(name).glob("*.safetensors")) if pathlib.Path(name).is_dir() else []
    if not files:
        return
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as checkpoint:
            for key in checkpoint.keys():  # noqa: SIM118 - it is no mapping
                rows = checkpoint.get_slice(key)
                yield key, rows[: max(1, rows.get_shape()[0] // 8)] if rows.get_shape() else checkpoint.get_tensor(key)


def _parts(named: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parts of large tensors, and stop when enough was seen."""
    left = _ELEMENTS
    for name, tensor in named:
        if left <= 0:
            return
        part = tensor.detach().reshape(-1)[: 1 << 16]
        left -= part.numel()
        if part.is_floating_point():
            yield name, part


def _in_float32(training: Training, load: Load) -> tuple[str, Repair]:
    """Return how the load is told to be in float32; a cast that came after the load is undone before training."""
    new = Version(transformers.__version__) >= Version("4.56") and "torch_dtype" not in load.options
    name = "dtype" if new else "torch_dtype"
    at = next((index for index, candidate in enumerate(training.loads) if candidate is load), None)
    how = f"Load the model with {name}=torch.float32"
    undo: Repair = Keyword("load", name, '"float32"', index=at or 0)
    if load.by_trainer:
        how = f'Set model_init_kwargs={{"{name}": "float32"}}'
        options = training.arguments.get("model_init_kwargs") or {}
        options = json.loads(options) if isinstance(options, str) else options
        undo = Arguments({"model_init_kwargs": {**options, name: "float32"}})
    if at is None:
        undo = Statement("{trainer}.model.float()")
    return f"{how}; bf16=True computes in bfloat16 all the same.", undo
