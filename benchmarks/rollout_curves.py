"""Learning curves of a run that is broken twice: frozen embeddings and generation under checkpointing.

Healthy without checkpointing; broken with it; each repair alone; both repairs. Three seeds each.

Eras: trl-0.14.
"""

import recording

from failurelab import gradients
from failurelab_course.experiments import models, observe, trainers

STEPS = 100
RUNS = {
    # name: state, checkpointing, gradients repaired, rollouts repaired
    "checkpointing off": ("healthy", False, False, False),
    "broken": ("broken", True, False, False),
    "gradients repaired": ("wrong_fix", True, True, False),
    "rollouts repaired": ("wrong_fix", True, False, True),
    "both repaired": ("right_fix", True, True, True),
}


def main() -> None:
    """Train every run with every seed and record its curve."""
    arguments = recording.begin(__doc__, seeds=3)
    for seed in range(arguments.seeds):
        for name, (state, checkpointing, gradient, rollout) in RUNS.items():
            policy, tokenizer = models.load(device=arguments.device)
            policy.get_input_embeddings().requires_grad_(False)
            before = models.accuracy(policy, tokenizer, sampled=True)
            if gradient:
                gradients.require_input_grads(policy)
            trainer = trainers.grpo(
                policy,
                tokenizer,
                steps=STEPS,
                seed=seed,
                gradient_checkpointing=checkpointing,
                gradient_checkpointing_kwargs={"use_reentrant": True},
            )
            if rollout:
                trainer.generation_config.use_cache = False
            trainer.train()
            steps, rewards = trainers.curve(trainer)
            metrics = {
                "accuracy_before": before,
                "accuracy_after": models.accuracy(policy, tokenizer, sampled=True),
                "steps": steps,
                "rewards": [round(reward, 4) for reward in rewards],
            }
            observe.record("F7", state, metrics, case=f"curve: {name}", seed=seed, device=arguments.device)
            print(seed, name, f"{before:.2f} -> {metrics['accuracy_after']:.2f}", metrics["rewards"], flush=True)


if __name__ == "__main__":
    main()
