"""Learning curves of a run that is broken twice: frozen embeddings and generation under checkpointing.

Healthy without checkpointing; broken with it; each repair alone; both repairs. And notebook 02's script, which freezes
nothing, broken, with the other kind of checkpointing, and repaired; and notebook 03's, a LoRA adapter, which is
repaired in its gradients alone, and in both; each of them without checkpointing, too.
Three seeds each.

Eras: trl-0.14.
"""

import peft
import recording

from failurelab import gradients
from failurelab_course.experiments import models, trainers

STEPS = 100
RUNS = {
    # case: state, embeddings frozen, checkpointing, gradients repaired, rollouts repaired
    "curve: checkpointing off": ("healthy", True, False, False, False),
    "curve: broken": ("broken", True, True, False, False),
    "curve: gradients repaired": ("wrong_fix", True, True, True, False),
    "curve: rollouts repaired": ("wrong_fix", True, True, False, True),
    "curve: both repaired": ("right_fix", True, True, True, True),
    "notebook 02: broken": ("broken", False, True, False, False),
    "notebook 02: reentrant": ("wrong_fix", False, True, False, False),
    "notebook 02: repaired": ("right_fix", False, True, False, True),
    "notebook 02: checkpointing off": ("healthy", False, False, False, False),
    "notebook 03: gradients repaired": ("wrong_fix", True, True, True, False),
    "notebook 03: both repaired": ("right_fix", True, True, True, True),
    "notebook 03: checkpointing off": ("healthy", True, False, False, False),
}


def run(case: str, seed: int, device: str) -> dict:
    """Train once; return the curve, and the accuracy before and after."""
    _, frozen, checkpointing, gradient, rollout = RUNS[case]
    policy, tokenizer = models.load(device=device)
    policy.get_input_embeddings().requires_grad_(not frozen)
    before = models.accuracy(policy, tokenizer, sampled=True)
    if gradient:
        gradients.require_input_grads(policy)
    more = {}
    if case.startswith("notebook 03"):
        lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        more = {"peft_config": lora, "learning_rate": 2e-3}
    kind = "reentrant" if frozen or case.endswith("reentrant") else "non-reentrant"
    more |= recording.checkpointing(kind if checkpointing else "off")
    trainer = trainers.grpo(policy, tokenizer, steps=STEPS, seed=seed, **more)
    if rollout:
        trainer.generation_config.use_cache = False
    trainer.train()
    steps, rewards = trainers.curve(trainer)
    after = models.accuracy(policy, tokenizer, sampled=True)
    rewards = [round(reward, 4) for reward in rewards]
    return {"accuracy_before": before, "accuracy_after": after, "steps": steps, "rewards": rewards}


def main() -> None:
    """Train every run with every seed, or the cases that end as `--only` says, and record its curve."""
    arguments = recording.begin(__doc__, seeds=3, only="")
    cases = (
        ("F7", state, case, lambda seed, case=case: run(case, seed, arguments.device))
        for case, (state, *_) in RUNS.items()
        if case.endswith(arguments.only)
    )
    recording.record_cases(cases, arguments.seeds, arguments.device)


if __name__ == "__main__":
    main()
