"""Which of the suspects make "element 0 of tensors does not require grad": dtype, checkpointing, LoRA, model family.

Eras: trl-0.14, trl-0.15, today.
"""

import itertools

import recording
import torch

from failurelab_course.experiments import models, observe, shapes, trainers

DTYPES = ("float32", "bf16 autocast", "bf16 weights")
KINDS = ("off", "reentrant", "non-reentrant")


def run(family: str, dtype: str, kind: str, trained: str, device: str) -> dict:
    """Train three steps, and return which tensors a gradient reached, and what was raised."""
    policy, tokenizer = models.load(device=device)
    if family == "Llama":
        policy = shapes.as_llama(policy)
    if dtype == "bf16 weights":
        policy = policy.to(torch.bfloat16)
    trainer = trainers.grpo(
        policy,
        tokenizer,
        steps=3,
        learning_rate=1e-3,
        prompts_per_step=4,
        bf16=dtype != "float32",
        peft_config=recording.small_lora() if trained == "LoRA" else None,
        **recording.checkpointing(kind),
    )
    return recording.train_watched(trainer)


def main() -> None:
    """Run all combinations and record each."""
    device = recording.begin(__doc__).device
    for family, dtype, kind, trained in itertools.product(("Qwen2", "Llama"), DTYPES, KINDS, ("full", "LoRA")):
        metrics = run(family, dtype, kind, trained, device)
        state = "healthy" if metrics["reached"] == metrics["trainable"] else "broken"
        case = f"matrix: {family}, {dtype}, {kind}, {trained}"
        observe.record("F2", state, metrics, case=case, seed=0, device=device)
        print(case, metrics, flush=True)


if __name__ == "__main__":
    main()
