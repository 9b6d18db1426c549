"""The peak memory of the run at full size, simulated, against the memory of one device.

A training step of the full model on fake tensors (`failurelab.simulate`) gives what weights, gradients, activations and
logits take at once; nothing is computed. The optimizer's states, a reference model and the cache of generation are
counted from shapes. Simulated devices hold for a process, so the step has one of its own:

    python child.py memory < step.json

Not in the figure, so that a run needs more: fragmentation, the CUDA context, what other processes and vLLM take.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from failurelab._checkpointing import enable_checkpointing, option_name
from failurelab.preflight.answers import Answer, Finding, Held, NotChecked
from failurelab.preflight.inputs import Load, Seen
from failurelab.preflight.intercept.cuts import counts_prompts
from failurelab.preflight.judges.rows import generates, prompt_ids, prompt_limit, prompted
from failurelab.preflight.judges.updates import optimizer_name, policy_load
from failurelab.preflight.repairs import Arguments

GIB = 2**30
SECONDS = 120
_ROWS = 64  # whose prompts are measured
_STATES = {"adamw": 2, "lion": 1, "ademamix": 3, "sgd": 0, "adafactor": 0, "rmsprop": 1, "adagrad": 1}
_LORA = ("r", "lora_alpha", "target_modules", "modules_to_save", "layers_to_transform", "exclude_modules", "bias")


def judge_memory(seen: Seen) -> Iterator[Answer]:
    """Tell the simulated peak of one device, by its terms, where the memory of one was given."""
    if not seen.memory:
        return
    load = policy_load(seen)
    if load is None or getattr(load.config, "model_type", None) is None:
        yield NotChecked("memory", "no checkpoint was loaded by name, so the full size is not known")
        return
    if seen.zero_stage or seen.asked.get("fsdp"):
        yield NotChecked("memory", "the states are sharded over the devices (DeepSpeed, FSDP), which is not simulated")
        return
    step = _step(seen, load)
    if isinstance(step, str):
        yield NotChecked("memory", step)
        return
    try:
        peak = _simulate(step)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        yield NotChecked("memory", f"the step could not be simulated: {error}")
    else:
        yield _weigh(seen, load, step, peak)


def _step(seen: Seen, load: Load) -> dict[str, Any] | str:
    """Return what one pass of the full model computes: rows, tokens, logits, what is trained; or why nobody knows."""
    asked, trainer = seen.asked, seen.trainer
    rows = int(asked.get("per_device_train_batch_size") or 1)
    if generates(trainer):
        prompts = [row["prompt"] for row in prompted(seen, _ROWS)]
        longest = max((len(ids) for ids in prompt_ids(trainer, prompts)), default=0) if prompts else 0
        longest = min(longest, prompt_limit(seen) or longest)
        completion = asked.get("max_completion_length") or asked.get("max_new_tokens")
        if not longest or not completion:
            return "the lengths of prompts and completions are not known"
        length, logits = longest + completion, completion + 1
        rows *= asked["num_generations"] if counts_prompts() and "num_generations" in asked else 1
    elif asked.get("max_length") or asked.get("max_seq_length"):
        length = logits = asked.get("max_length") or asked.get("max_seq_length")
        rows *= 2 if type(trainer).__name__.startswith("DPO") else 1
    else:
        return "the training arguments name no length"
    lora = None
    if adapters := getattr(trainer.model, "peft_config", None):
        config = next(iter(adapters.values())).to_dict()
        if str(config.get("peft_type")).rpartition(".")[2] != "LORA":
            return f"an adapter of type {config.get('peft_type')} is not simulated"
        lora = {
            key: sorted(value) if isinstance(value, set) else value for key, value in config.items() if key in _LORA
        }
    new, old = (asked.get(f"{name}_checkpointing") for name in ("activation", "gradient"))
    return {
        "config": load.config.to_dict() | {"model_type": load.config.model_type},
        "dtype": load.dtype,
        "autocast": bool(asked.get("bf16") or asked.get("fp16")),
        "rows": rows,
        "length": int(length),
        "logits": int(logits),
        "checkpointing": bool(old if new is None else new),  # as transformers reads the two names
        "lora": lora,
        "bits": load.bits,
    }


def _simulate(step: dict[str, Any]) -> dict[str, Any]:
    """Run the step in a process of its own.

    Raises:
        RuntimeError: it failed; the message is the error's last line.
        subprocess.TimeoutExpired: it took longer than two minutes.
    """
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).parent.with_name("child.py")), "memory"],
        input=json.dumps(step, default=str),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
    return json.loads(done.stdout.splitlines()[-1])


def _weigh(seen: Seen, load: Load, step: dict[str, Any], peak: dict[str, Any]) -> Answer:
    asked = seen.asked
    optimizer = optimizer_name(seen)
    states = next((count for name, count in _STATES.items() if name in optimizer), 2)
    terms = {
        "weights": peak["weights"],
        "gradients": peak["gradients"],
        f"{optimizer}'s states": states * peak["trainable" if "8bit" in optimizer else "gradients"],
        "activations and logits": peak["rest"],
    }
    assert seen.memory is not None  # else judge_memory has nothing to ask
    if getattr(seen.trainer, "ref_model", None) is not None:
        terms["reference model"] = peak["weights"]
    training = sum(terms.values())
    held = training - terms["activations and logits"] - terms["gradients"]
    cache = 0
    if generates(seen.trainer) and not asked.get("use_vllm"):
        cut = hasattr(seen.trainer.args, "steps_per_generation")  # a generation, into the batches of several steps
        steps = asked.get("steps_per_generation") or (asked.get("gradient_accumulation_steps") if cut else 1) or 1
        cache = peak["cache_per_token"] * step["rows"] * step["length"] * steps
    total = max(training, held + cache)
    named = ", ".join(f"{name} {size / GIB:.2f}" for name, size in terms.items())
    evidence = (
        f"{load.name} at full size takes {total / GIB:.2f} GiB of {seen.memory / GIB:.2f} (simulated): {named}"
        + (f"; the cache of generation {cache / GIB:.2f}" if cache else "")
        + f". One pass is {step['rows']} rows of {step['length']} tokens, {step['logits']} of them with logits"
    )
    if total <= seen.memory:
        return Held("memory", evidence, "a device with less than that would be told")
    in_training = held + cache <= training  # the peak, and not in generation
    if max(terms, key=terms.__getitem__) != "activations and logits" and in_training:
        repair = "Train an adapter (peft_config), or shard the states (DeepSpeed, FSDP): a smaller batch does not help."
        return Finding("memory", evidence, repair)
    option = option_name()
    if not step["checkpointing"] and in_training:
        return Finding("memory", evidence, f"Set {option}=True.", undo=Arguments({option: True}))
    batch, accumulation = "per_device_train_batch_size", "gradient_accumulation_steps"
    rows, accumulated = (asked.get(name) or 1 for name in (batch, accumulation))
    fixed = training - terms["activations and logits"] if in_training else held
    times = next((2**power for power in range(1, 8) if fixed + (total - fixed) / 2**power <= seen.memory), 0)
    if not times or rows % times:
        return Finding("memory", evidence, f"Halve {batch} and double {accumulation}.")
    values = {batch: rows // times, accumulation: accumulated * times}
    repair = f"Set {', '.join(f'{name}={value}' for name, value in values.items())}."
    return Finding("memory", evidence, repair, undo=Arguments(values))


def main() -> None:
    """Read a step, simulate it, and print its peak as JSON: in a process of its own."""
    import torch
    from transformers import AutoConfig

    from failurelab import simulate

    step = json.load(sys.stdin)
    simulate.devices(1)
    config = AutoConfig.for_model(**step["config"])
    config.use_cache = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = getattr(torch, step["dtype"])
    # A simulated device has no autocast: the pass is one in bfloat16, and the weights stay as they are loaded.
    half = step["autocast"] and dtype == torch.float32
    model: Any = simulate.model(config, torch.bfloat16 if half else dtype)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    head = model.get_output_embeddings()
    linear -= head.weight.numel() if head is not None else 0
    if step["lora"]:
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"):
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **step["lora"]))
    simulate.place(model, {"": 0})
    model.train()
    if step["checkpointing"]:
        enable_checkpointing(model, {"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = simulate.tokens(step["rows"], step["length"])

    def run() -> None:
        base = model.get_base_model() if step["lora"] else model
        hidden = base.model(input_ids=ids, use_cache=False)[0]
        logits = base.get_output_embeddings()(hidden[:, -step["logits"] :])
        # Under autocast a log_softmax is computed in float32; else in the dtype of the logits, as trl does.
        wider = logits.float() if step["autocast"] else logits
        wider.log_softmax(-1)[..., 0].mean().backward()

    gradients = sum(p.numel() * p.element_size() for p in trained)
    rest = max(simulate.peak_memory(run, model).total - weights - gradients, 0)
    wide = dtype.itemsize / (2 if half else dtype.itemsize)
    if half:
        rest += 2 * linear  # copies in bfloat16 that autocast makes of the weights, and keeps for the pass
    saved = linear * (dtype.itemsize - step["bits"] / 8 * 1.06) if step["bits"] else 0
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    peak = {
        "weights": weights * wide - saved,
        "gradients": gradients * wide,
        "rest": rest,
        "trainable": sum(p.numel() for p in trained),
        "cache_per_token": 2 * 2 * heads * width * text.num_hidden_layers,
    }
    print(json.dumps(peak))
