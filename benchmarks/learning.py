"""GRPO learns sums: how much better the small Qwen2 gets, and in how many seconds, in the era this is started in.

Eras: trl-0.14, today.
"""

import pathlib
import time

import frames
import recording

from failurelab_course.experiments import models, observe, trainers

STEPS = 120


ERAS = ("trl-0.14", "today")


def table_learning(folder: pathlib.Path) -> str:
    """GRPO on the small Qwen2: sampled accuracy before and after, in each era."""
    return frames.table(
        ["era"],
        frames.group_runs(frames.read_runs(folder, "learning"), ERAS, "era").items(),
        ("sampled accuracy before", "sampled_before"),
        ("after", "sampled_after"),
        (
            "gain of 0.2 or more",
            lambda runs: f"{frames.count(runs['sampled_after'] - runs['sampled_before'] >= 0.2)} seeds",
        ),
    )


def main() -> None:
    """Train from each seed, measure before and after, and record both."""
    arguments = recording.begin(__doc__, seeds=3, steps=STEPS)
    gains = []
    for seed in range(arguments.seeds):
        policy, tokenizer = models.load(device=arguments.device)
        wall, processor = time.perf_counter(), time.process_time()
        before = accuracies(policy, tokenizer)
        trainer = trainers.grpo(policy, tokenizer, steps=arguments.steps, seed=seed)
        trainer.train()
        after = accuracies(policy, tokenizer)
        steps, rewards = trainers.curve(trainer)
        gains.append(after[0] - before[0])
        metrics = {
            "optimizer_steps": arguments.steps,
            "sampled_before": round(before[0], 4),
            "sampled_after": round(after[0], 4),
            "greedy_before": before[1],
            "greedy_after": after[1],
            "steps": steps,
            "rewards": [round(reward, 4) for reward in rewards],
            "seconds": round(time.perf_counter() - wall, 1),
            "processor_seconds": round(time.process_time() - processor, 1),
        }
        observe.record("ground", "healthy", metrics, case="GRPO learns sums", seed=seed, device=arguments.device)
        print(
            f"{observe.era()} seed {seed}: sampled {before[0]:.3f} -> {after[0]:.3f}, greedy {before[1]:.3f} -> "
            f"{after[1]:.3f}, {metrics['seconds']} s, {metrics['processor_seconds']} s of processor time",
            flush=True,
        )
    print(f"sampled accuracy up by at least {min(gains):.3f}")


def accuracies(policy, tokenizer) -> tuple[float, float]:
    """Return sampled accuracy (mean of five draws of all sums) and greedy accuracy."""
    draws = [models.accuracy(policy, tokenizer, sampled=True, seed=seed) for seed in range(5)]
    return sum(draws) / len(draws), models.accuracy(policy, tokenizer)


if __name__ == "__main__":
    main()
