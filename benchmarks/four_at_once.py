"""One script with four of the course's failures at once, in one stack, healed one by one; each by its own measurement.

LoRA, reentrant checkpointing and mixed prompt lengths, with trl 0.15.2 and transformers 4.48.3 as released: nothing is
added by hand. Before each training run a rehearsal of one step at learning rate 0 measures gradients, rollouts and
rows of logits; training follows where it can. Three seeds. At the end accelerate judges the placement of two simulated
ranks (tier: simulated), for the map as the script makes it, and as each rank makes it.

Eras: trl-0.15.
"""

import os
import subprocess
import sys

import recording
import torch

from failurelab import gradients, guards, logits, placement, rollouts, simulate
from failurelab_course.experiments import models, observe, trainers

STEPS = 100
REPAIRS = ("placement", "gradients", "rollouts", "logits")


class Rows:
    """Counts the rows of logits that are made for each sequence in the training pass, and those that are needed."""

    def __init__(self, model):
        self.prompt = self.made = self.needed = 0
        for module in (model, model.get_base_model()):  # PEFT calls the base model's forward, which no hook hears
            module.register_forward_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs, output):
        """Note the shapes of the first pass of generation, and of the first training pass."""
        length = kwargs["input_ids"].shape[1]
        if not torch.is_grad_enabled():
            self.prompt = self.prompt or length
        elif not self.needed:
            self.needed = length - self.prompt + 1
            self.made = output.logits.shape[1] if output.logits.shape[-1] > 1 else 0


def build(repairs, seed: int, device: str, **options):
    """Return the script's trainer with these repairs, and its tokenizer."""
    from peft import LoraConfig

    policy, tokenizer = models.load(device=device)
    torch.manual_seed(seed)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    if "gradients" in repairs:
        policy, lora = gradients.prepare_peft(policy, lora), None
    trainer = trainers.grpo(
        policy,
        tokenizer,
        seed=seed,
        peft_config=lora,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        **options,
    )
    if "rollouts" in repairs:
        rollouts.repair(trainer.model)
    if "logits" in repairs:
        trainer._get_per_token_logps = logits.completion_logps
    return trainer, tokenizer


def rehearse(repairs, seed: int, device: str) -> dict:
    """Run one step at learning rate 0, and return what it shows."""
    guard = guards.RolloutGuard("warn")
    trainer, _ = build(repairs, seed, device, steps=1, learning_rate=0.0, callbacks=[guard])
    rows, error = Rows(trainer.model), ""
    with gradients.watch(trainer.model) as watched:
        try:
            trainer.train()
        except RuntimeError as raised:  # what is under study: "element 0 of tensors does not require grad ..."
            error = str(raised).splitlines()[0]
    report = watched.report()
    return {
        "error": error,
        "trainable": len(report.trainable),
        "without_gradient": len(report.without_gradient),
        "rollout_error": guard.report.error,
        "rollouts_agree": guard.report.agrees,
        "rows_made": rows.made,
        "rows_needed": rows.needed,
    }


def run(repairs, seed: int, device: str) -> dict:
    """Rehearse, then train where that is possible; return metrics."""
    metrics = rehearse(repairs, seed, device)
    if metrics["error"]:
        return metrics
    trainer, tokenizer = build(repairs, seed, device, steps=STEPS, learning_rate=1e-3)
    able = models.accuracy(trainer.model, tokenizer, sampled=True, seed=seed)
    before = gradients.snapshot(trainer.model)
    trainer.train()
    steps, rewards = trainers.curve(trainer)
    return metrics | {
        "accuracy_before": able,
        "accuracy_after": models.accuracy(trainer.model, tokenizer, sampled=True, seed=seed),
        "changed": len(before.changed(trainer.model)),
        "steps": steps,
        "rewards": [round(reward, 4) for reward in rewards],
    }


def ranks_refused(repaired: bool) -> dict:
    """Let accelerate judge a 4-bit model on each of two simulated ranks; registers simulated devices for good."""
    backend = simulate.devices(2)[0].type
    early = {"": getattr(torch, backend).current_device()}
    refused, text = 0, ""
    for rank in range(2):
        with simulate.ranks(2, rank) as accelerator:
            policy, _ = models.load()
            policy.is_loaded_in_4bit = True  # the mark that accelerate looks at, with the map
            policy.hf_device_map = placement.local_device_map() if repaired else early
            try:
                accelerator.prepare_model(policy, device_placement=False, evaluation_mode=True)
            except ValueError as error:
                refused, text = refused + 1, str(error).splitlines()[0]
    return {"ranks": 2, "refused": refused, "text": text}


def main() -> None:
    """Train every state with every seed; then ask accelerate."""
    arguments = recording.begin(
        __doc__, seeds=3, ranks={"action": "store_true", "help": "only ask accelerate about ranks; no GPU may be seen"}
    )
    if arguments.ranks:
        ask()
        return
    for seed in range(arguments.seeds):
        for count in range(len(REPAIRS) + 1):
            metrics = run(REPAIRS[:count], seed, arguments.device)
            name = REPAIRS[count - 1] if count else "broken"
            state = "right_fix" if count == len(REPAIRS) else "wrong_fix" if count else "broken"
            case = f"four at once: {name}"
            observe.record(
                "F2" if metrics["error"] else "F7", state, metrics, case=case, seed=seed, device=arguments.device
            )
            print(seed, name, {key: value for key, value in metrics.items() if key != "steps"}, flush=True)
    # Simulated devices hold for a process, and a real GPU must not be in it.
    subprocess.run([sys.executable, __file__, "--ranks"], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)


def ask() -> None:
    """Ask accelerate about a map that the script made, and one that each rank made."""
    for repaired in (False, True):
        metrics = ranks_refused(repaired)
        case = f"four at once: placement {'as each rank makes it' if repaired else 'as the script makes it'}"
        observe.record("F5", "right_fix" if repaired else "broken", metrics, case=case, seed=0, tier="simulated")
        print(case, metrics, flush=True)


if __name__ == "__main__":
    main()
