"""What guards cost: seconds added to the first step, which they judge, and to the steps after it.

The same GRPO run with no guard, with each, and with all, in turn for a number of rounds, so that other work on the
machine meets all of them alike. The first step of a run is compared with the first step of a run without a guard, the
median of the later steps with theirs.

Eras: trl-0.14, today.
"""

import pathlib
import statistics
import time
from collections.abc import Iterable

import frames
import recording
import torch
import transformers

from failurelab import guards
from failurelab_course.experiments import models, observe, trainers

ROUNDS, STEPS = 7, 12
KINDS = {
    "GradientGuard": lambda trainer: guards.GradientGuard(),
    "RolloutGuard": lambda trainer: guards.RolloutGuard(),
    "LogitsGuard": lambda trainer: guards.LogitsGuard(),
    "RewardGuard": guards.RewardGuard,
    "UpdateGuard": lambda trainer: guards.UpdateGuard(),
    "EngineMismatchGuard": guards.EngineMismatchGuard,
}
SETS = {"none": (), **{kind: (kind,) for kind in KINDS}, "all six": tuple(KINDS)}


class Clock(transformers.TrainerCallback):
    """Takes the time of every optimizer step, generation included."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.start = torch.device(device), [], 0.0

    def now(self) -> float:
        """Return the time once all work on the device is done: the clock's on a GPU, the process's own on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return time.perf_counter()
        return time.process_time()  # of one thread: other work on the machine does not count

    def on_step_begin(self, *_, **__) -> None:
        """Start."""
        self.start = self.now()

    def on_step_end(self, *_, **__) -> None:
        """Stop."""
        self.seconds.append(self.now() - self.start)


def run(kinds: Iterable[str], device: str) -> list[float]:
    """Return the seconds of each step of a short healthy run."""
    policy, tokenizer = models.load(device=device)
    clock = Clock(device)
    # on_step_end of the clock comes before that of the guards; LogitsGuard asks for the peak memory there
    trainer = trainers.grpo(policy, tokenizer, steps=STEPS, callbacks=[clock])
    for kind in kinds:
        trainer.add_callback(KINDS[kind](trainer))
    trainer.train()
    return clock.seconds


def table_guards(folder: pathlib.Path) -> str:
    """What all guards together cost: what they add to the first step, which they judge, and to later ones."""
    runs = frames.read_runs(folder, "guards", "overhead of guards: all six")
    return "\n".join(
        f"- {run['era']}: {1000 * run['first_step_added_seconds']:.0f} ms more for the first step, "
        f"{run['later_step_added_share']:.0%} for later ones"
        for run in runs.to_dict("records")
    )


def main() -> None:
    """Run all in turn, record and print medians over the rounds."""
    device = recording.begin(__doc__).device
    torch.set_num_threads(1)
    run((), device)  # a run to warm up is not counted
    seconds: dict[str, list[list[float]]] = {kind: [] for kind in SETS}
    for _ in range(ROUNDS):
        for kind, kinds in SETS.items():
            seconds[kind].append(run(kinds, device))
    first = {kind: [steps[0] for steps in runs] for kind, runs in seconds.items()}
    later = {kind: [statistics.median(steps[1:]) for steps in runs] for kind, runs in seconds.items()}
    for kind in SETS:
        metrics = {
            "first_step_seconds": statistics.median(first[kind]),
            "first_step_added_seconds": statistics.median(a - b for a, b in zip(first[kind], first["none"])),
            "later_step_seconds": statistics.median(later[kind]),
            "later_step_added_share": statistics.median(a / b - 1 for a, b in zip(later[kind], later["none"])),
            "rounds": ROUNDS,
            "steps": STEPS,
        }
        observe.record("ground", "measured", metrics, case=f"overhead of guards: {kind}", device=device)
        print(
            f"{kind:20s} first step {metrics['first_step_seconds']:.4f} s (added "
            f"{metrics['first_step_added_seconds']:+.4f}), later steps {metrics['later_step_seconds']:.4f} s "
            f"({metrics['later_step_added_share']:+.1%})"
        )


if __name__ == "__main__":
    main()
