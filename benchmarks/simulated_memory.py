"""Peak memory of one training step of known shapes, on simulated devices, beside the arithmetic.

Qwen2-0.5B, 7B and 72B in bf16, and the 7B in 4 bit with LoRA adapters; 4 rows of 1024 tokens, logits of the last 257.
Tier: simulated. Attention is simulated as the fused kernel of a GPU, and, beside it, decomposed. Two things can be
worked out by hand: weights are parameters times two bytes; a decomposed kernel keeps matrices of scores, rows x heads x
length x length for each layer, about two of them.

Eras: trl-0.14, today.
"""

import os
import resource
import sys
import time

import recording
import torch
import transformers

from failurelab import simulate
from failurelab_course.experiments import observe

ROWS, LENGTH, KEPT = 4, 1024, 257
SHAPES = {
    "Qwen2-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 152064, False),
}


def config(name: str) -> transformers.Qwen2Config:
    """Return the published shape."""
    hidden, intermediate, layers, heads, groups, vocabulary, tied = SHAPES[name]
    return transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=tied,
    )


def counted(name: str) -> int:
    """Return the number of parameters by hand: embeddings, head, and per layer attention, MLP and norms."""
    hidden, intermediate, layers, heads, groups, vocabulary, tied = SHAPES[name]
    narrow = hidden // heads * groups
    attention = 2 * hidden * hidden + 2 * hidden * narrow + hidden + 2 * narrow
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    return vocabulary * hidden * (1 if tied else 2) + layers * layer + hidden


def measure(name: str, bits: int) -> None:
    """Simulate one step with both kinds of attention, and record."""
    started = time.perf_counter()
    peaks = {}
    for attention in ("fused", "decomposed"):
        model = simulate.model(config(name))
        keep = "logits_to_keep" if observe.era() == "today" else "num_logits_to_keep"
        if bits == 4:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(simulate.four_bit(model), LoraConfig(r=16, target_modules="all-linear"))
        simulate.place(model, {"": 0})
        model.train()

        def step(model=model, keep=keep) -> None:
            ids = simulate.tokens(ROWS, LENGTH)
            logits = model(input_ids=ids, use_cache=False, **{keep: KEPT}).logits
            logits.float().logsumexp(-1).mean().backward()

        peaks[attention] = simulate.peak_memory(step, model, attention=attention)
    _, _, layers, heads, _, _, _ = SHAPES[name]
    fused, decomposed = peaks["fused"], peaks["decomposed"]
    metrics = {
        "peak_bytes": fused.total,
        "weights_bytes": fused.kinds["Parameter"],
        "weights_by_hand": 2 * counted(name) if bits == 16 else None,
        "activations_bytes": fused.kinds.get("Activation", 0),
        "gradients_bytes": fused.kinds.get("Gradient", 0) + fused.kinds.get("Temp", 0),
        "decomposed_bytes": decomposed.total,
        "scores_by_hand": layers * ROWS * heads * LENGTH * LENGTH * 2,
        "seconds": time.perf_counter() - started,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    case = f"simulated step: {name}, {'bf16' if bits == 16 else '4 bit and LoRA'}"
    observe.record("F5", "measured", metrics, case=case, tier="simulated")
    print(case, {key: round(value / 2**30, 2) for key, value in metrics.items() if value and "seconds" not in key})
    print("  seconds", round(metrics["seconds"], 1))


def main() -> None:
    """Measure every shape."""
    recording.begin(__doc__)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real GPU beside simulated ones would get in the way of a backward pass
    if torch.cuda.is_initialized():  # looking for the device did that
        os.execv(sys.executable, [sys.executable, __file__])
    observe.quiet()
    torch.set_num_threads(1)
    simulate.devices(1)
    for name in SHAPES:
        measure(name, 16)
    if observe.era() == "today":
        measure("Qwen2-7B", 4)


if __name__ == "__main__":
    main()
