#!/usr/bin/env python3
"""Time and memory of a completion's log-probabilities, forward and backward: seven ways, several shapes, one run.

    python benchmarks/logps.py [--rounds N] [--device cpu|cuda] [--shapes NAME,...] [--chunks]

Every way is first given the known-answer probe: only right functions are compared; those that give a loss are held
against its gradients. Rounds go through all ways in turn, so that other work on the machine meets all of them; a ratio
is the median of each round's own, or that of the fastest, which other work disturbs least (the machine's load is in the
record). On a GPU times are those between two CUDA events, after warm-up; a way that runs out of memory, or certainly
would, is NOT RUN, and the record says why.

Memory is what torch allocated at its peak over the start, on a CPU counted from every allocation. *Beyond gradients* is
that peak less the gradients that any way must leave behind: the head's, vocabulary x width x bytes, and as much again
for an embedding of its own where the two are not tied. It still holds the model's activations, which no way of scoring
saves.

Errors are against a float64 copy of the same weights, all logits, on two rows of 32 + 16 tokens: the largest of the
log-probabilities, in nats, and of the parameters' gradients, as a share of the largest entry. A loss is held against
the truth's by its gradients alone: its value at the first step of a batch depends on no log-probability.

Eras: today.
"""

import argparse
import copy
import gc
import os
import statistics
import time
from collections.abc import Callable

import arithmetic
import torch
from logps_ways import (
    CARD_SHAPES,
    KEPT,
    LOSSES,
    OURS,
    SHAPES,
    WAYS,
    NotRun,
    Shape,
    chunked,
    full_logits,
    grpo_loss,
    kept_logits,
    selective,
)

from failurelab import logits
from failurelab_course.experiments import devices, observe

MIB = 2**20
WARM_UP = {"cpu": 1, "cuda": 3}
ROUNDS = {"cpu": 7, "cuda": 20}
WRONG = 0.1  # a gradient this far from the truth, as a share of its largest entry, is another function's


def errors(shape: Shape, ways: dict[str, Callable], device: str) -> dict[str, dict[str, float]]:
    """Return for each way how far its results and gradients are from a float64 model's, on a small batch.

    Raises:
        ValueError: a way that gives a loss has gradients of something else.
    """
    model = shape.model(device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (2, 48), generator=generator).to(device)
    mask = torch.ones_like(ids)
    exact = copy.deepcopy(model).double()

    def scored(net, way: Callable) -> tuple[torch.Tensor, list[torch.Tensor]]:
        net.zero_grad(set_to_none=True)
        scores = way(net, ids, mask, 16)
        scores.double().mean().backward()
        return scores.detach().double(), [parameter.grad.double() for parameter in net.parameters()]

    truths = {False: scored(exact, full_logits), True: scored(exact, lambda *args: grpo_loss(full_logits(*args)))}
    metrics = {}
    for name, way in ways.items():
        got, grown = scored(model, way)
        truth, slopes = truths[way in LOSSES]
        error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(grown, slopes))
        if way in LOSSES and error > WRONG:
            raise ValueError(f"{name}: gradients are {error:.2g} from those of GRPO's loss; it is another function")
        metrics[name] = {"gradient_error": error}
        if way not in LOSSES:  # GRPO's loss at a batch's first step is its advantages' mean, whatever was scored
            metrics[name]["score_error"] = (got - truth).abs().max().item()
    return metrics


def seconds(step: Callable[[], None], device: str) -> float:
    """Return how long a step takes: on a GPU between two events in its queue, elsewhere by the clock."""
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def require_room(shape: Shape, way: Callable, device: str) -> None:
    """Make sure that the least which a way needs is there: gradients, and the logits that it makes with theirs.

    Raises:
        TierError: it is not; the way would run out of memory.
    """
    length = shape.prompt + shape.completion if way is full_logits else shape.completion
    element = torch.finfo(shape.dtype).bits // 8
    rows = shape.batch * length if way in (full_logits, kept_logits, selective) else 0
    gradients = (1 if shape.tied else 2) * arithmetic.logits(shape.width, shape.vocabulary, element)
    needed = gradients + 2 * arithmetic.logits(rows, shape.vocabulary, element)
    devices.require_memory(needed / devices.GIB, device, "this way, at the least")


def measure(shape: Shape, ways: dict[str, Callable], rounds: int, device: str) -> dict[str, dict | str]:
    """Return metrics by way, or why it was not run."""
    model = shape.model(device).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.prompt + shape.completion), generator=generator)
    ids = ids.to(device)
    mask = torch.ones_like(ids)

    def step(way: Callable) -> None:
        model.zero_grad(set_to_none=True)
        way(model, ids, mask, shape.completion).mean().backward()

    rows: dict[str, dict | str] = {}
    runnable: dict[str, Callable] = {}
    for name, way in ways.items():
        try:
            require_room(shape, way, device)
            for _ in range(WARM_UP[torch.device(device).type]):
                step(way)
        except (NotRun, devices.TierError, torch.cuda.OutOfMemoryError) as reason:
            rows[name] = str(reason).splitlines()[0]
        else:
            runnable[name] = way
            if way not in LOSSES:
                logits.check_alignment(way, model)
        model.zero_grad(set_to_none=True)
        free(device)
    if KEPT not in runnable:
        return {name: rows.get(name, f"{KEPT}, which all are compared with, was not run") for name in ways}
    wrong = _errors_where_they_fit(shape, runnable, device)
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    all_times = [{name: seconds(lambda way=way: step(way), device) for name, way in runnable.items()}]
    # What takes four times as long as another is slow, however often it is timed.
    quick = {name: way for name, way in runnable.items() if all_times[0][name] < 4 * all_times[0][KEPT]}
    for _ in range(rounds - 1):
        all_times.append({name: seconds(lambda way=way: step(way), device) for name, way in quick.items()})
    for name, way in runnable.items():
        times = [timed for timed in all_times if name in timed]
        model.zero_grad(set_to_none=True)
        peak = observe.peak_memory(lambda way=way: step(way), device)
        rows[name] = {
            "seconds": statistics.median(timed[name] for timed in times),
            "time_to_kept": statistics.median(timed[name] / timed[KEPT] for timed in times),
            "fastest_seconds": min(timed[name] for timed in times),
            "fastest_to_kept": min(timed[name] for timed in times) / min(timed[KEPT] for timed in times),
            "peak_mib": peak / MIB,
            "gradients_mib": gradients / MIB,
            "beyond_gradients_mib": (peak - gradients) / MIB,
            "rounds": len(times),
            "load": os.getloadavg()[0],
            **wrong.get(name, {}),
        }
    for row in rows.values():
        if isinstance(row, dict):
            row["memory_to_kept"] = row["beyond_gradients_mib"] / rows[KEPT]["beyond_gradients_mib"]
    return rows


def _errors_where_they_fit(shape: Shape, ways: dict[str, Callable], device: str) -> dict[str, dict[str, float]]:
    try:
        return errors(shape, ways, device)
    except torch.cuda.OutOfMemoryError:  # a float64 copy of a 7B head beside its gradients
        return {}
    finally:
        free(device)


def free(device: str) -> None:
    """Give back what a way has left in torch's cache, so that the next finds the card as it found it."""
    if torch.device(device).type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def show(shape: Shape, rows: dict[str, dict | str], device: str) -> None:
    """Print the table of one shape, and write its records."""
    print(f"\n{shape}; {observe.device_name(device)}\n")
    print("| way | median, ms | to kept | fastest, ms | to kept | peak, MiB | beyond gradients | to kept | error |")
    print("|" + "---|" * 9)
    for name, row in rows.items():
        case = f"log-probs: {name}, {shape}"
        if isinstance(row, str):
            print(f"| {name} | NOT RUN: {row} | | | | | | | |")
            observe.record("F3a", "measured", {"not_run": row}, case=case, device=device)
            continue
        print(
            f"| {name} | {1000 * row['seconds']:.1f} | {row['time_to_kept']:.2f} | {1000 * row['fastest_seconds']:.1f} "
            f"| {row['fastest_to_kept']:.2f} | {row['peak_mib']:.0f} | "
            f"{row['beyond_gradients_mib']:.0f} | {row['memory_to_kept']:.2f} | "
            f"{', '.join(f'{row[key]:.1e}' if key in row else '-' for key in ('score_error', 'gradient_error'))} |"
        )
        observe.record("F3a", "measured", row, case=case, device=device)


def main() -> None:
    """Run the benchmark."""
    every = SHAPES | CARD_SHAPES
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="7 on a CPU, 20 on a GPU")
    parser.add_argument("--device", type=devices.argument, default="cpu")
    parser.add_argument("--shapes", help=f"of {', '.join(every)}; by default those for the device")
    parser.add_argument("--chunks", action="store_true", help="also completion_logps at several chunk sizes")
    options = parser.parse_args()
    observe.quiet()
    kind = torch.device(options.device).type
    usual = SHAPES if kind == "cpu" else CARD_SHAPES
    rounds = options.rounds or ROUNDS[kind]
    names = options.shapes.split(",") if options.shapes else list(usual)
    for name in names:
        if name not in every:
            parser.error(f"unknown shape {name!r}: the shapes are {', '.join(every)}")
        show(every[name], measure(every[name], WAYS, rounds, options.device), options.device)
    if options.chunks:
        ways = {KEPT: kept_logits} | {f"{OURS}, chunk {rows}": chunked(rows) for rows in (1, 4, 16, 64, 256, 1024)}
        shape = every[names[0]]
        show(shape, measure(shape, ways, rounds, options.device), options.device)


if __name__ == "__main__":
    main()
