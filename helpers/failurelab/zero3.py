"""ZeRO-3 generation: which object is the DeepSpeed engine, and a model that can generate.

Under DeepSpeed a trainer holds two objects that look alike: `trainer.model`, the bare model, and the engine around it,
`trainer.model_wrapped`. With ZeRO-3 the bare model's parameters are partitioned: each has the shape (0,), and hooks on
every submodule gather its parameters before its forward pass and release them after it. To generate well, code must
gather all of them once and take the hooks out meanwhile. Only the engine knows its hooks. TRL's main branch handed over
the bare model in February 2025, and so does a callback that uses `trainer.model`:

    AttributeError: 'Qwen2ForCausalLM' object has no attribute 'optimizer'

(https://github.com/huggingface/trl/issues/2782). The first repair (#2776, trl 0.15) returned early if the object has no
optimizer: the error was gone, the hooks stayed on, and every token gathered every layer again. Handing over the engine
repaired the cause (#2871, trl 0.16). Here:

    with zero3.generation_model(trainer) as model:    # without DeepSpeed, and at any stage, too
        model.generate(**batch)
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from failurelab.failures.predicates import Value
from failurelab.handles import Handle, wrap_method

_gathered: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class ZeroError(RuntimeError):
    """A trainer's model cannot be made ready to generate; the message says what was found and the next step."""


def is_engine(value: Any) -> bool:
    """Whether `value` is a DeepSpeed engine; by the names of its classes, so that DeepSpeed need not be installed."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(value).__mro__)


def engine_of(trainer: Any) -> Any | None:
    """Return the DeepSpeed engine around the trainer's model, or None if there is none.

    There is none without DeepSpeed, and before `train()` or `evaluate()` has made it: in `on_train_begin` it is there.
    It is looked for in the trainer's `model_wrapped`, then in `deepspeed`, then in its accelerator.

    Args:
        trainer: a transformers Trainer, such as GRPOTrainer.
    """
    wrapper = getattr(getattr(trainer, "accelerator", None), "deepspeed_engine_wrapped", None)
    candidates = [getattr(trainer, name, None) for name in ("model_wrapped", "deepspeed")]
    return next(filter(is_engine, [*candidates, getattr(wrapper, "engine", None)]), None)


def partitioned(model: nn.Module) -> list[Any]:
    """Return the parameters that ZeRO-3 has partitioned, each with `ds_` attributes: all, or none at stages 0 to 2."""
    return [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]


def hooks(model: nn.Module) -> int:
    """Return how many hooks ZeRO-3 has on the model's submodules now, those that gather and partition.

    0 without ZeRO-3, inside `generation_model`, and after TRL has taken them out. The model itself carries one more,
    which TRL leaves in place.
    """
    inner = (module for module in model.modules() if module is not model)
    return sum(_is_zeros(hook) for module in inner for hooks in _hook_dicts(module) for hook in hooks.values())


def figures(model: nn.Module) -> dict[str, Value]:
    """Return what the registry's F4 is about, at the moment at which a model generates."""
    return {"zero_stage": 3 if partitioned(model) else -1, "generates_without_hooks": not hooks(model)}


@contextlib.contextmanager
def generation_model(trainer: Any) -> Iterator[nn.Module]:
    """Yield the trainer's model, able to generate at full speed: parameters gathered, ZeRO-3's hooks out.

    Works without DeepSpeed and at the stages 0 to 3, with an adapter, before the first step, in evaluation and in a
    callback; without partitioned parameters it yields `trainer.model` and does nothing. After the block, however it
    ends, the same hooks are back in the same order, and the parameters are partitioned again. Nested blocks act as one.
    All processes must enter it together, because gathering needs all. Inside nothing is gathered, but transformers'
    `generate` still asks all processes after each token under ZeRO-3 whether one goes on: so all must generate, or one
    alone with `synced_gpus=False`.
    Changes to the parameters inside are lost. Gathering holds the whole model on each device: for a model that does not
    fit, generation must run through the engine with the hooks on, or elsewhere (vLLM).

    Checkpointing is another failure of generation, with a repair of its own: `rollouts.safe_generation`.

    Args:
        trainer: a transformers Trainer; one that has not started is fine.

    Raises:
        ZeroError: the parameters are sharded by FSDP, which this does not gather.
    """
    if getattr(trainer, "is_fsdp_enabled", False):
        raise ZeroError(
            "the trainer uses FSDP, and generation_model gathers what DeepSpeed has partitioned only. "
            "Next: trl.models.unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator)"
        )
    model = trainer.model
    shards = partitioned(model)
    # Parameters that are there already are not ours to partition again: TRL gathered them, or they are small.
    absent = [parameter for parameter in shards if parameter.ds_status.name != "AVAILABLE"]
    if model in _gathered or not (absent or hooks(model)):
        yield model  # ready as it is: not partitioned, or made ready by an outer block or by TRL
        return
    import deepspeed

    for parameter in shards:
        parameter.ds_active_sub_modules.clear()  # no submodule runs now; a leftover would forbid partitioning again
    _gathered.add(model)
    try:
        with deepspeed.zero.GatheredParameters(absent), _without_hooks(model):
            yield model
    finally:
        _gathered.discard(model)


def repair(trainer: Any) -> Handle:
    """Run every `generate` of the trainer's model inside `generation_model`, until the handle is removed.

    For code that cannot be changed: trl 0.15, whose GRPOTrainer hands over the bare model and leaves the hooks on, or
    another package's callback that calls `model.generate`. All processes must call `generate` together.
    """

    def around(generate: Any, *args: Any, **kwargs: Any) -> Any:
        with generation_model(trainer):
            return generate(*args, **kwargs)

    return wrap_method(trainer.model, "generate", around, "generation under ZeRO-3 gathers once, without hooks")


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Take ZeRO-3's hooks out of every submodule, and put each dictionary of hooks back as it was.

    TRL removes the hooks and registers new ones by a private method that DeepSpeed renamed in 0.16.4. It leaves in
    place the hook that begins a new trace of the model at each forward pass, so the next training step finds a trace of
    no submodules ("Invalidate trace cache"). Here the same hooks are there before and after.
    """
    saved = [(hooks, dict(hooks)) for module in model.modules() for hooks in _hook_dicts(module)]
    _drop_hooks(model)
    try:
        yield
    finally:
        for hooks, before in saved:
            current = dict(hooks)  # other code may have added or removed a hook of its own meanwhile
            kept = {key: hook for key, hook in before.items() if key in current or _is_zeros(hook)}
            hooks.clear()
            hooks.update(kept | current)


def _drop_hooks(model: nn.Module) -> None:
    for module in model.modules():
        for hooks in _hook_dicts(module):
            for key in [key for key, hook in hooks.items() if _is_zeros(hook)]:
                del hooks[key]


def _hook_dicts(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks


def _is_zeros(hook: Any) -> bool:
    """Whether a hook is ZeRO-3's, also one wrapped for a profiler (deepspeed.utils.nvtx), but not the engine's own."""
    return (getattr(hook, "__module__", None) or "").startswith(("deepspeed.runtime.zero.", "deepspeed.utils.nvtx"))


def release_evaluation_engine(trainer: Any) -> bool:
    """Make the trainer forget an engine that `evaluate()` made before training; return whether there was one.

    `evaluate()` before `train()` makes an engine without an optimizer. `train()` then takes it for its own, though
    accelerate has already released it, and fails in the first backward pass: `'NoneType' object has no attribute
    'backward'` (trl 1.16, transformers 5.24, accelerate 1.15; lab 39 is it). Call this between the
    two, and `train()` makes its own engine.
    """
    engine = engine_of(trainer)
    if engine is None or _trains(engine):
        return False
    # DeepSpeed's optimizer hooks belong to the old engine; a new one would add its own on top.
    trainer.accelerator.free_memory()
    _drop_hooks(trainer.model)  # DeepSpeed before 0.18 leaves one
    trainer.model_wrapped, trainer.deepspeed = trainer.model, None
    return True


def _trains(engine: Any) -> bool:
    """Whether an engine has an optimizer; one for inference has ZeRO-3's offload object in its place, or nothing."""
    return callable(getattr(getattr(engine, "optimizer", None), "step", None))
