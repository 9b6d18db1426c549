"""QLoRA GRPO on the small Qwen2: real 4-bit weights of bitsandbytes, checkpointing, all guards on; does it learn?

The same run three times: weights in 4 bit, weights in float32, and 4 bit with a learning rate of 0, for the noise of
sampling. Of the 4-bit weights: are they bit for bit as before, what gradient do they have, and is the adapters'
gradient the one that the dequantized weights give, or that the original weights gave?

Eras: today.
Needs: bitsandbytes.
"""

import recording
import torch

from failurelab import gradients, guards
from failurelab_course.experiments import adapter_paths, models, observe, trainers

STEPS, RANK, RATE = 120, 8, 1e-3
NON_REENTRANT = {"use_reentrant": False}


def load(four_bit: bool, device: str):
    """Return the small Qwen2, in 4 bit (NF4, double quantization) or in float32, and its tokenizer."""
    if not four_bit:
        return models.load(device=device)
    return adapter_paths.load_four_bit(device, bnb_4bit_use_double_quant=True)


def with_adapter(policy, seed: int = 0):
    """Return the policy with a LoRA adapter on every linear layer, its first weights drawn from the seed."""
    from peft import LoraConfig

    torch.manual_seed(seed)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return gradients.prepare_peft(policy, lora, NON_REENTRANT)


def quantized(policy) -> dict:
    """Return the 4-bit weights by name."""
    return {name: weight for name, weight in policy.named_parameters() if hasattr(weight, "quant_state")}


def bits(policy) -> dict:
    """Return copies of the 4-bit weights and of their scales, that say what the weights stand for."""
    weights = quantized(policy)
    return {name: (weight.data.clone(), weight.quant_state.absmax.clone()) for name, weight in weights.items()}


def unchanged(before: dict, policy) -> int:
    """Return how many 4-bit weights and scales are as they were, bit for bit."""
    now = quantized(policy)
    return sum(
        torch.equal(codes, now[name].data) and torch.equal(scales, now[name].quant_state.absmax)
        for name, (codes, scales) in before.items()
    )


def adapter_gradients(policy, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each adapter weight's gradient after one backward pass, B made different from 0 first."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    policy.train()
    policy(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters() if parameter.requires_grad}


def largest_difference(got: dict, wanted: dict) -> float:
    """Return the largest difference of a gradient's entries, as a share of the largest entry of its tensor."""
    return max(float((got[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted)


def against_dequantized(device: str) -> dict:
    """Compare the adapters' gradients with those on a float32 model that holds what the 4-bit weights stand for."""
    from bitsandbytes.functional import dequantize_4bit

    four, tokenizer = load(True, device)
    plain, _ = load(False, device)
    original, _ = load(False, device)
    weights = dict(plain.named_parameters())
    for name, weight in quantized(four).items():
        weights[name].data.copy_(dequantize_4bit(weight.data, weight.quant_state).float())
    four, plain, original = (with_adapter(model) for model in (four, plain, original))
    ids = tokenizer([prompt + answer for prompt, answer in models.sums()[210:216]], return_tensors="pt").input_ids
    got, wanted, other = (adapter_gradients(model, ids.to(device)) for model in (four, plain, original))
    weights = quantized(four)
    return {
        "quantized": len(weights),
        "require_grad": sum(weight.requires_grad for weight in weights.values()),
        "with_gradient": sum(weight.grad is not None for weight in weights.values()),
        "adapters": len(got),
        "adapters_with_gradient": sum(bool(gradient.any()) for gradient in got.values()),
        "difference_to_dequantized": largest_difference(got, wanted),
        "difference_to_original": largest_difference(got, other),
        "bytes_in_4_bit": sum(weight.data.numel() for weight in weights.values()),
        "bytes_in_float32": 4 * sum(weight.quant_state.shape.numel() for weight in weights.values()),
        "trainable_dtypes": sorted({str(tensor.dtype) for tensor in four.parameters() if tensor.requires_grad}),
    }


def run(four_bit: bool, rate: float, seed: int, device: str) -> dict:
    """Train once; return metrics."""
    policy, tokenizer = load(four_bit, device)
    policy = with_adapter(policy, seed)
    before = bits(policy)
    able = [models.accuracy(policy, tokenizer, sampled=sampled, seed=seed) for sampled in (False, True)]
    watched = [guards.GradientGuard(), guards.RolloutGuard(), guards.LogitsGuard(), guards.PlacementGuard()]
    trainer = trainers.grpo(
        policy,
        tokenizer,
        steps=STEPS,
        seed=seed,
        learning_rate=rate,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=NON_REENTRANT,
        callbacks=watched,
    )
    adapters = gradients.snapshot(trainer.model)
    with observe.stopwatch() as seconds:
        trainer.train()
    steps, rewards = trainers.curve(trainer)
    done = [models.accuracy(policy, tokenizer, sampled=sampled, seed=seed) for sampled in (False, True)]
    return {
        "greedy_before": able[0],
        "sampled_before": able[1],
        "greedy_after": done[0],
        "sampled_after": done[1],
        "steps": steps,
        "rewards": [round(reward, 4) for reward in rewards],
        "quantized": len(before),
        "quantized_unchanged": unchanged(before, policy),
        "quantized_require_grad": sum(weight.requires_grad for weight in quantized(policy).values()),
        "quantized_with_gradient": sum(weight.grad is not None for weight in quantized(policy).values()),
        "adapters": len(adapters),
        "adapters_changed": len(adapters.changed(trainer.model)),
        "checkpointing": sorted({kind for kind, _ in gradients.checkpointed(trainer.model)}),
        "guards_asked": sum(guard.report is not None for guard in watched),
        "seconds": round(seconds(), 1),
    }


def main() -> None:
    """Measure the gradients once, then train every kind with every seed."""
    arguments = recording.begin(__doc__, seeds=3)
    device = arguments.device
    passed = against_dequantized(device)
    observe.record("ground", "measured", passed, case="QLoRA: gradients", seed=0, device=device)
    print(passed, flush=True)
    kinds = {"4 bit": (True, RATE), "float32": (False, RATE), "4 bit, learning rate 0": (True, 0.0)}
    for seed in range(arguments.seeds):
        for name, (four_bit, rate) in kinds.items():
            metrics = run(four_bit, rate, seed, device)
            state = "healthy" if rate else "measured"
            observe.record("ground", state, metrics, case=f"QLoRA: {name}", seed=seed, device=device)
            print(seed, name, f"{metrics['sampled_before']:.2f} -> {metrics['sampled_after']:.2f}", metrics["rewards"])
            print("  ", {k: v for k, v in metrics.items() if k not in ("rewards", "steps")}, flush=True)


if __name__ == "__main__":
    main()
