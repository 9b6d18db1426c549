"""Errors raised inside guards: how many were injected into each, and how many runs went on.

Every third line that a guard runs for itself raises once, in a GRPO run of two steps, healthy and broken, that must end
with the weights it has without a guard (see `failurelab_course.experiments.faults`).

Eras: trl-0.14, today.
"""

import argparse

import torch

from failurelab_course.experiments import devices, faults, observe


def main() -> None:
    """Inject, record and print, for each guard."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=devices.argument, default="cpu", help="not used: the runs are on the CPU")
    parser.add_argument("--every", type=int, default=3, help="inject at every so many lines")
    arguments = parser.parse_args()
    observe.quiet()
    torch.set_num_threads(1)
    for name in faults.GUARDS:
        result = faults.inject(name, every=arguments.every)
        metrics = {key: getattr(result, key) for key in ("lines", "faults", "went_on", "told")}
        state = "healthy" if result.went_on == result.told == result.faults else "broken"
        observe.record("ground", state, metrics, case=f"faults in guards: {name}")
        print(f"{name:14s}", *(f"{key} {value}" for key, value in metrics.items()), *result.others.items(), sep="  ")


if __name__ == "__main__":
    main()
