"""What is in force in a training, read from its live objects after its steps, and what was given where that differs."""

import collections
import math
from collections.abc import Iterator
from typing import Any

from failurelab import gradients
from failurelab._unwrap import has_adapter, unwrap
from failurelab_preflight.answer import Setting
from failurelab_preflight.judges.batch import read_step
from failurelab_preflight.judges.optimizer import is_adapter
from failurelab_preflight.judges.updates import optimizer_name, policy_load
from failurelab_preflight.training import Training


def read_settings(training: Training) -> Iterator[Setting]:
    """Yield what is in force, a line each; what the trainer does not have is left out."""
    trainer, arguments = training.trainer, training.arguments
    model, load = unwrap(trainer.model), policy_load(training)
    kinds = collections.Counter(kind for kind, _ in gradients.checkpointed(model))
    asked, default = (values.get("gradient_checkpointing") for values in (arguments, _defaults(trainer.args)))
    by = "the script's model" if not asked else "this release's default" if default == asked else "the arguments"
    on = f"{', '.join(f'{kind} ({count} modules)' for kind, count in kinds.items())}, by {by}" if kinds else "off"
    yield Setting("checkpointing", on, "asked for" if asked and not kinds else "")
    trained = _dtypes(tensor for tensor in model.parameters() if tensor.requires_grad)
    states = getattr(trainer.optimizer, "state", {}).values()
    kept = _dtypes(value for state in states for value in state.values() if getattr(value, "ndim", 0))
    real = load.dtype if load and load.small else trained
    cut = f" (here {trained}, as the cut model is)" * (real != trained)
    yield Setting("weights", f"{real}{cut}; {optimizer_name(training)} {f'keeps {kept}' if kept else 'made no step'}")
    if has_adapter(model):
        names = sorted({type(config).__name__ for config in getattr(model, "peft_config", {}).values()})
        count = sum(is_adapter(name, model) for name, _ in model.named_parameters())
        yield Setting("adapters", f"{', '.join(names) or 'yes'}, {count} tensors")
    else:
        yield Setting("adapters", "none")
    yield Setting("quantization", f"{load.bits} bits, as loaded" if load and load.bits else "none")
    drawn = getattr(getattr(trainer, "generation_config", None), "temperature", None)
    if drawn is not None:
        asked = arguments.get("temperature")
        own = ", ".join(f"{name}={value!r}" for name, (value, _) in training.model_defaults.items())
        own = f"; {own} of the model's generation_config, which the loss does not know" * bool(own)
        given = f"{asked:g}" if asked not in (None, drawn) else ""
        yield Setting("temperature", f"{drawn:g} in generation{own}", given)
    if step := read_step(training):
        prompts = step.completions / step.generations
        yield Setting("one step", f"{prompts:g} prompts, {step.completions} completions, {step.generations} a prompt")
    yield Setting("reference", _reference(trainer, model))
    engine = next((name for name in ("use_vllm", "use_transformers_paged") if arguments.get(name)), "")
    yield Setting("engine", "generate() of transformers", engine)


def _defaults(args: Any) -> dict[str, Any]:
    fields = getattr(type(args), "__dataclass_fields__", {})
    return {name: field.default for name, field in fields.items()}


def _dtypes(tensors: Any) -> str:
    count = collections.Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return " and ".join(name for name, _ in count.most_common())


def _reference(trainer: Any, model: Any) -> str:
    if getattr(trainer, "ref_model", None) is not None:
        return "a second model"
    if not getattr(trainer, "beta", getattr(trainer.args, "beta", None)):
        return "none (beta is 0)"
    return "the policy without its adapter" if has_adapter(model) else "none"


def measure(training: Training) -> dict[str, float]:
    """Return the figures of the run itself, by their names in the table of figures; what is unknown is absent."""
    trainer = training.trainer
    model, log = unwrap(trainer.model), trainer.state.log_history
    named = list(model.named_parameters())
    groups = getattr(trainer.optimizer, "param_groups", ())
    held = {id(tensor) for group in groups for tensor in group["params"]}
    trainable = [tensor for _, tensor in named if tensor.requires_grad]
    losses = [float(entry["loss"]) for entry in log if "loss" in entry]
    rates = [float(entry["learning_rate"]) for entry in log if "learning_rate" in entry]
    last = losses[-max(1, len(losses) // 4) :]
    whole = all(bool(tensor.isfinite().all()) for tensor in trainable)
    known = {
        "steps_done": trainer.state.global_step,
        "finite": whole and all(map(math.isfinite, losses)),
        "tensors_total": len(named),
        "tensors_trainable": sum(id(tensor) in held for tensor in trainable),
        "tensors_frozen": len(named) - len(trainable),
        "tensors_not_optimized": sum(id(tensor) not in held for tensor in trainable),
        "adapter_tensors": sum(is_adapter(name, model) for name, _ in named) if has_adapter(model) else 0,
        "beta": getattr(trainer, "beta", getattr(trainer.args, "beta", None)),
        "learning_rate": max(rates, default=None),
        "loss_first": losses[0] if losses else None,
        "loss_last": sum(last) / len(last) if last else None,
        "completions_a_group": training.arguments.get("num_generations"),
    }
    return {name: float(value) for name, value in known.items() if isinstance(value, (int, float))}
