"""F9: weights in bfloat16 that an optimizer steps in bfloat16, with steps too small to change them.

The cut model is trained in float32, so what the real run would do is told from the load: the dtype that this stack
gives, the optimizer, and the highest learning rate. Where the weights are here (a local checkpoint, or the real model)
the share of elements that a step changes is computed on them; else on numbers spread as the configuration's
initializer_range says, and the evidence says so.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from packaging.version import Version

from failurelab import updates
from failurelab._unwrap import has_adapter, unwrap
from failurelab_preflight.finding import Finding
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.repairs import Arguments, Keyword, Repair, Statement
from failurelab_preflight.training import Load, Training

_LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_STEPPED = ("adam", "paged_adam", "lion", "ademamix")  # whose first step is the learning rate, whatever the gradient
_COPIES = ("apex", "anyprecision")  # in whose names: they step float32 copies of the weights
_ELEMENTS = 1 << 21  # of a checkpoint that are read, spread over its tensors
_SLOWED = "the run is slowed, not lost: runs of large models with shares of 2 to 8 % are known to learn"
_KEEPS = "updates.to_float32(trainer.model) after the trainer is made keeps them in float32."


def judge_updates(training: Training) -> Iterator[Finding]:
    """Tell a load in 16 bits whose weights a step of this learning rate leaves as they are."""
    load, model = policy_load(training), training.trainer.model
    optimizer, rate, known = _optimizer(training)
    if load is None or not rate:
        return
    low = next((each.dtype for each in model.parameters() if each.requires_grad and each.dtype.itemsize < 4), None)
    if has_adapter(model):
        yield _judge_adapter(training, load, rate, low)
        return
    dtype = _LOW.get(load.dtype, low or torch.float32)
    evidence = f"{load.name} is loaded in {_name(dtype)}{' by the trainer' * load.by_trainer}, and {optimizer}"
    if dtype.itemsize < 4 and (training.zero_stage or any(name in optimizer for name in _COPIES)):
        yield Finding.not_applicable("F9", f"{evidence} steps float32 copies of the weights")
    elif known is None or (dtype.itemsize < 4 and (training.lacks or training.arguments.get("fsdp") or not known)):
        lacking = f", for DeepSpeed's configuration {training.lacks} is not there" * bool(training.lacks)
        yield Finding.not_checked("F9", f"{evidence} makes steps of a size, and on weights, not known here{lacking}")
    else:
        share, of = _share(training, load, rate, dtype)
        evidence += f": a step of {rate:g} changes {share:.1%} of {of}"
        planted = _share(training, load, rate / 1000, torch.bfloat16)[0]
        yield _judge_share(share, planted, evidence, *_in_float32(training, load))


def _judge_share(share: float, planted: float, evidence: str, repair: str, undo: Repair | None) -> Finding:
    """Tell which share of elements a step changes; where a part does, the run is slowed, and that is noted."""
    measured = {"tensors_trainable": 1, "elements_moved": share}
    controls = {"a step a thousandth as long": {"elements_moved": planted}}
    if (settled := settle("F9", [measured], controls, evidence)) is None and undo is not None:
        return Finding("F9", f"{evidence}; in float32 it changes all", repair, undo=undo)
    if settled is None or share < updates.WHOLE:
        return Finding.noted("F9", f"{evidence}; {_SLOWED}", repair, mild=True)
    return settled


def _judge_adapter(training: Training, load: Load, rate: float, dtype: torch.dtype | None) -> Finding:
    """Tell an adapter that is trained in 16 bits, as trl makes those of a quantized model; in `dtype`, if not None.

    What a step changes is told of A; of B, which begins at zero, a step changes fewer numbers as they grow.
    """
    named = training.trainer.model.named_parameters()
    copies = sum(tensor.requires_grad for name, tensor in named if ".modules_to_save." in name)
    if dtype is None and copies and not training.zero_stage and load.dtype in _LOW:
        why = f"modules_to_save trains {copies} tensor(s) of the base in full, in {load.dtype}, not looked at"
        return Finding.not_checked("F9", why)
    if dtype is None:
        return Finding.not_applicable("F9", f"the adapter is trained in float32, whatever the base's {load.dtype}")
    width = int(getattr(load.config, "hidden_size", None) or 1024)
    a = (2 * torch.rand(1 << 16, generator=torch.Generator().manual_seed(0), device="cpu") - 1) / width**0.5
    share = updates.expected_share(a, rate, dtype=dtype)
    evidence = f"the adapter is trained in {_name(dtype)}, where a step of {rate:g} changes {share:.1%} of A's numbers"
    return _judge_share(share, updates.expected_share(a, rate / 1000, dtype=torch.bfloat16), evidence, _KEEPS, None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def optimizer_name(training: Training) -> str:
    """Return the name of the optimizer that the arguments ask for."""
    optimizer = training.arguments.get("optim") or "adamw_torch"
    return str(getattr(optimizer, "value", optimizer))


def _optimizer(training: Training) -> tuple[str, float, bool | None]:
    """Return what steps the weights, its highest rate, and whether a first step of it is known to be that large.

    None: nothing of its steps is known, for its class is none of a library's: it may round float32 weights itself.
    """
    rate, optimizer = training.arguments.get("learning_rate"), (training.keywords.get("optimizers") or (None,))[0]
    given: tuple[Any, dict[str, Any]] = training.keywords.get("optimizer_cls_and_kwargs") or (None, {})
    kind, options = given
    if optimizer is not None:
        rates = [group.get("initial_lr", group["lr"]) for group in getattr(optimizer, "param_groups", ())]
        kind, options = type(optimizer), {"lr": max(rates, default=rate)}
    if kind is None:
        name = optimizer_name(training)
        return name, float(rate or 0), name.lower().startswith(_STEPPED)
    own = getattr(kind, "__name__", str(kind))
    theirs = getattr(kind, "__module__", "").startswith(("torch.", "bitsandbytes."))  # another may keep what is lost
    return f"{own} of the script", float(options.get("lr") or 0), own.lower().startswith(_STEPPED) if theirs else None


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
        tensors = list(_parts((name, each) for name, each in model.named_parameters() if each.requires_grad))
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
    how = f"Load the model with {name}=torch.float32"
    undo: Repair = Statement("{trainer}.model.float()")
    if load.by_trainer:
        how = f'Set model_init_kwargs={{"{name}": "float32"}}'
        options = training.arguments.get("model_init_kwargs") or {}
        options = json.loads(options) if isinstance(options, str) else options
        undo = Arguments({"model_init_kwargs": {**options, name: "float32"}})
    elif load.dtype in _LOW:
        index = next(at for at, each in enumerate(training.loads) if each is load)
        undo = Keyword("load", name, '"float32"', index=index)
    return f"{how}; bf16=True computes in bfloat16 all the same.", undo
