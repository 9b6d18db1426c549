"""The three faces of the requires_grad warning: which tensors change, for each set-up, checkpointing kind and cure.

Eras: trl-0.14, trl-0.15, today.
"""

import recording

from failurelab import gradients
from failurelab_course.experiments import models, observe, trainers

WARNING = "None of the inputs have requires_grad"


def run(make, setup: str, kind: str, cure: bool, device: str) -> dict:
    """Train three steps, and return how often the warning came, what changed, and what was raised."""
    policy, tokenizer = models.load(device=device)
    adapter = None
    if setup == "embeddings frozen":
        policy.get_input_embeddings().requires_grad_(False)
    elif setup == "LoRA":
        adapter = recording.small_lora()
    if cure:
        gradients.require_input_grads(policy)
    trainer = make(
        policy,
        tokenizer,
        steps=3,
        learning_rate=1e-3,
        prompts_per_step=4,
        peft_config=adapter,
        **recording.checkpointing(kind),
    )
    before = gradients.snapshot(trainer.model)
    with observe.count_warnings(WARNING) as seen:
        error = recording.train_watched(trainer)["error"]
    changed = before.changed(trainer.model)
    return {"warnings": seen.count, "changed": len(changed), "trainable": len(before), "error": error}


def main() -> None:
    """Run all combinations and record each."""
    device = recording.begin(__doc__).device
    for name, make in (("GRPO", trainers.grpo), ("Online DPO", trainers.online_dpo)):
        for setup in ("full", "embeddings frozen", "LoRA"):
            for kind in ("off", "reentrant", "non-reentrant"):
                for cure in (False, True) if kind == "reentrant" else (False,):
                    metrics = run(make, setup, kind, cure, device)
                    healthy = metrics["changed"] == metrics["trainable"]
                    state = "right_fix" if cure else "healthy" if healthy else "broken"
                    case = f"{name}, {setup}, {kind}{', require_input_grads' if cure else ''}"
                    observe.record("F1", state, metrics, case=case, seed=0, device=device)
                    print(case, metrics)


if __name__ == "__main__":
    main()
