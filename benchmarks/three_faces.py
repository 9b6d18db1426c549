"""The three faces of the requires_grad warning: which tensors change, for each set-up, checkpointing kind and cure.

Eras: trl-0.14, trl-0.15, today.
"""

import argparse

from failurelab import gradients
from failurelab_course.experiments import devices, models, observe, trainers

WARNING = "None of the inputs have requires_grad"


def run(make, setup: str, kind: str, cure: bool, device: str) -> dict:
    """Train three steps, and return how often the warning came, what changed, and what was raised."""
    policy, tokenizer = models.load(device=device)
    adapter = None
    if setup == "embeddings frozen":
        policy.get_input_embeddings().requires_grad_(False)
    elif setup == "LoRA":
        from peft import LoraConfig

        adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if cure:
        gradients.require_input_grads(policy)
    checkpointing = {} if kind == "off" else {"gradient_checkpointing_kwargs": {"use_reentrant": kind == "reentrant"}}
    trainer = make(
        policy,
        tokenizer,
        steps=3,
        learning_rate=1e-3,
        prompts_per_step=4,
        peft_config=adapter,
        gradient_checkpointing=kind != "off",
        **checkpointing,
    )
    before, error = gradients.snapshot(trainer.model), ""
    with observe.count_warnings(WARNING) as seen:
        try:
            trainer.train()
        except RuntimeError as raised:  # what is under study: "element 0 of tensors does not require grad ..."
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    changed = before.changed(trainer.model)
    return {"warnings": seen.count, "changed": len(changed), "trainable": len(before), "error": error}


def main() -> None:
    """Run all combinations and record each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=devices.argument, default="cpu")
    device = parser.parse_args().device
    observe.quiet()
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
