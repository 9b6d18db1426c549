"""What checkpointing saves and costs, over depth: peak memory and seconds of a training step with LoRA; and shapes.

Peak memory is what torch allocated over the start of one forward and backward pass, batch 4 of 256 tokens. Seconds are
the median of five such passes. For each family: are the gradients with checkpointing of either kind those without?

Eras: trl-0.14, today.
"""

import statistics
import time

import recording
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from failurelab import gradients
from failurelab_course.experiments import observe, shapes

KINDS = ("off", "reentrant", "non-reentrant")
DEPTHS = (2, 4, 8, 16)


def step(kind: str, depth: int, device: str):
    """Return one forward and backward pass of a Qwen2 of `depth` layers with LoRA, as a function."""
    from peft import LoraConfig

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    asked = None if kind == "off" else {"use_reentrant": kind == "reentrant"}
    model = gradients.prepare_peft(Qwen2ForCausalLM(shape).to(device), lora, asked).train()
    tokens = torch.randint(0, 256, (4, 256), device=device)

    def run() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    return run


def measured(kind: str, depth: int, device: str) -> dict:
    """Return peak memory in MiB and the median of seconds."""
    run = step(kind, depth, device)
    run()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return {"peak_mib": observe.peak_memory(run, device) / 2**20, "seconds": statistics.median(seconds)}


def family(name: str, device: str) -> dict:
    """Return how many tensors have a gradient, and by how much it differs from the one without checkpointing."""
    model = shapes.small(name).to(device)
    tokens = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0)).to(device)
    metrics, plain = {}, {}
    for kind in KINDS:
        if kind != "off":
            asked = {"use_reentrant": kind == "reentrant"}
            gradients.enable_checkpointing(model, asked)
        model.zero_grad()
        torch.manual_seed(1)  # for dropout
        options = {} if name == "Mamba" else {"use_cache": False}
        model(input_ids=tokens, labels=tokens, **options).loss.backward()
        grads = {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}
        plain = plain or grads
        metrics[kind] = len(grads)
        metrics[f"{kind}_error"] = max((grads[key] - plain[key]).abs().max().item() for key in plain)
    return metrics


def main() -> None:
    """Measure all and record each."""
    device = recording.begin(__doc__).device
    for depth in DEPTHS:
        for kind in KINDS:
            metrics = measured(kind, depth, device)
            observe.record("F2", "measured", metrics, case=f"memory: {depth} layers, {kind}", seed=0, device=device)
            print(depth, kind, metrics, flush=True)
    for name in shapes.SMALL:
        metrics = family(name, device)
        observe.record("F2", "measured", metrics, case=f"family: {name}", seed=0, device=device)
        print(name, metrics, flush=True)


if __name__ == "__main__":
    main()
