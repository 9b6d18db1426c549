"""Which of the suspects make "element 0 of tensors does not require grad": dtype, checkpointing, LoRA, model family.

Eras: trl-0.14, trl-0.15, today.
"""

import argparse
import itertools

import torch

from failurelab import gradients
from failurelab_course.experiments import devices, models, observe, shapes, trainers

DTYPES = ("float32", "bf16 autocast", "bf16 weights")
KINDS = ("off", "reentrant", "non-reentrant")


def run(family: str, dtype: str, kind: str, trained: str, device: str) -> dict:
    """Train three steps, and return which tensors a gradient reached, and what was raised."""
    from peft import LoraConfig

    policy, tokenizer = models.load(device=device)
    if family == "Llama":
        policy = shapes.as_llama(policy)
    if dtype == "bf16 weights":
        policy = policy.to(torch.bfloat16)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    checkpointing = {} if kind == "off" else {"gradient_checkpointing_kwargs": {"use_reentrant": kind == "reentrant"}}
    trainer = trainers.grpo(
        policy,
        tokenizer,
        steps=3,
        learning_rate=1e-3,
        prompts_per_step=4,
        bf16=dtype != "float32",
        peft_config=lora if trained == "LoRA" else None,
        gradient_checkpointing=kind != "off",
        **checkpointing,
    )
    error = ""
    with gradients.watch(trainer.model) as watched:
        try:
            trainer.train()
        except RuntimeError as raised:  # what is under study
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    report = watched.report()
    reached = len(report.trainable) - len(report.without_gradient)
    return {"reached": reached, "trainable": len(report.trainable), "error": error}


def main() -> None:
    """Run all combinations and record each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=devices.argument, default="cpu")
    device = parser.parse_args().device
    observe.quiet()
    for family, dtype, kind, trained in itertools.product(("Qwen2", "Llama"), DTYPES, KINDS, ("full", "LoRA")):
        metrics = run(family, dtype, kind, trained, device)
        state = "healthy" if metrics["reached"] == metrics["trainable"] else "broken"
        case = f"matrix: {family}, {dtype}, {kind}, {trained}"
        observe.record("F2", state, metrics, case=case, seed=0, device=device)
        print(case, metrics, flush=True)


if __name__ == "__main__":
    main()
