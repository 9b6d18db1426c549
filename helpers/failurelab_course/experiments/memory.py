"""What a step costs: the peak of memory, exact on a CPU."""

import gc
import os
from collections.abc import Callable
from typing import Any

import torch


def peak_memory(step: Callable[[], Any], device: str | torch.device = "cpu") -> int:
    """Return the peak of memory allocated by torch while `step()` runs, in bytes over what was held at its start.

    On a CPU it adds up every allocation and release that torch's profiler saw, so that it is exact and independent of
    the process's own memory. On a GPU it is `torch.cuda.max_memory_allocated` over the start, of that one GPU, after
    all earlier work on it is done; torch's own peak statistics of that GPU are reset by it. There blocks are rounded
    up, and cuBLAS allocates a workspace at its first call and keeps it: let a step run once before, not to count that.

    Raises:
        ValueError: a device whose memory is not counted here, a simulated one or an Apple GPU.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"the memory of a {device.type} device is not counted: torch's CPU profiler and torch.cuda do not see it. "
            "Next: a device cpu or cuda"
        )
    gc.collect()  # what an earlier run left in cycles must not be freed, and counted as freed, during this one
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    held = peak = 0
    for size, _, _ in _allocations(step):
        held += size
        peak = max(peak, held)
    return peak


def held_at_peak(step: Callable[[], Any], device: str | torch.device = "cpu") -> list[tuple[int, str]]:
    """Return each block that torch held at the peak of `step()`, the largest first: its bytes, and what allocated it.

    That is the outermost of torch's operations that ran then, such as `aten::empty`, `SliceBackward0` in a backward
    pass, or `Optimizer.step#AdamW.step`. Blocks that were there before are not counted, as in `peak_memory`. On a GPU
    the peak is one block without an operation: it is not split there.

    Raises:
        ValueError: as `peak_memory`.
    """
    if torch.device(device).type != "cpu":
        return [(peak_memory(step, device), "")]
    gc.collect()
    held: dict[int, tuple[int, str]] = {}  # by address
    total = peak = 0
    at_peak = held.copy()
    for size, address, operation in _allocations(step):
        total += size
        if size > 0:
            held[address] = (size, operation)
        else:
            held.pop(address, None)
        if total > peak:
            peak, at_peak = total, held.copy()
    return sorted(at_peak.values(), reverse=True)


def _allocations(step: Callable[[], Any]) -> list[tuple[int, int, str]]:
    """Run `step` on a CPU; return every allocation and release in the order of time.

    Each is its bytes, negative if they are released, the address, and the outermost operation that ran then.
    """
    # The profiler's C++ log writes when it starts and stops, to stderr, unless its level is above the last one.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    changes = []
    events = [(event, event.name) for event in profile.profiler.kineto_results.experimental_event_tree()]
    while events:
        event, outermost = events.pop()
        events += ((inner, outermost) for inner in event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            block, operation = event.extra_fields, outermost.removeprefix("autograd::engine::evaluate_function: ")
            changes.append((event.start_time_ns, block.alloc_size, block.ptr, operation))
    return [change[1:] for change in sorted(changes)]
