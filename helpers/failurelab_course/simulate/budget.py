"""A step against a memory budget: it fits, or runs out of memory, on a GPU for real and elsewhere on fake tensors.

Out of memory is the commonest failure of all, and a laptop cannot show it: its system swaps, or ends the process. So a
step is given a budget. On a GPU torch is told to take no more than that, and raises its own error. On a CPU the same
step runs on simulated tensors, which tell every allocation and compute nothing; over the budget is the same error.

    net = budget.model(config, "cuda")
    budget.spend(lambda: net(budget.tokens(net, 8, 2048)).logits.mean().backward(), 6, net)

Simulated peaks lack the allocator's rounding and fragmentation and kernels' workspaces (`simulated_memory`). A GPU's
budget is held against what torch has reserved, these included.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from failurelab.simulate import backend as simulate
from failurelab_course.experiments import devices as tiers
from failurelab_course.experiments import shapes


class DoesNotFit(torch.OutOfMemoryError):
    """A simulated step that would have run out of memory; caught wherever the real error is."""


@contextlib.contextmanager
def limit(gib: float, device: str | torch.device) -> Iterator[None]:
    """Let this process take no more than `gib` GiB of a GPU for a block; afterwards all of it again.

    Raises:
        ValueError: the device is no GPU, or the budget is not above 0.
        TierError: the GPU has not that much free, so that the budget would not be what stops the step.
    """
    device = torch.device(device)
    if device.type != "cuda" or gib <= 0:
        raise ValueError(f"a budget of {gib} GiB on {device}: a GPU can be limited, to more than 0")
    gc.collect()
    torch.cuda.empty_cache()
    tiers.require_memory(gib - torch.cuda.memory_reserved(device) / tiers.GIB, device, f"a budget of {gib} GiB")
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * tiers.GIB / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        gc.collect()
        torch.cuda.empty_cache()


def model(config: Any, device: str | torch.device, seed: int = 0) -> nn.Module:
    """Return a model of this shape in train mode, in what a GPU would compute in, bfloat16 if it can.

    On a GPU it has random weights; on a CPU it is simulated (`simulate.devices` holds for the process, so that should
    be a process of its own, such as an era's kernel).
    """
    if torch.device(device).type == "cuda":
        return shapes.build(config, device, tiers.dtype(device, "large"), seed)
    simulate.devices(1)
    return simulate.place(simulate.model(config), {"": 0}).train()


def tokens(model: nn.Module, rows: int, length: int) -> torch.Tensor:
    """Return token ids for a model of `budget.model`, `(rows, length)`: random on a GPU, without values otherwise."""
    if simulate.is_fake(model):
        return simulate.tokens(rows, length)
    weight = model.get_input_embeddings().weight
    return torch.randint(0, weight.shape[0], (rows, length), device=weight.device)


def tier(model: nn.Module) -> str:
    """Return the tier of what is measured with this model: `gpu` or `simulated`."""
    return "simulated" if simulate.is_fake(model) else "gpu"


def spend(step: Callable[[], Any], gib: float, model: nn.Module) -> int:
    """Run a step under a budget; return its peak in bytes, weights included. Gradients are dropped before and after.

    Args:
        step: forward and backward passes with `model`.
        gib: the budget, weights included.
        model: of `budget.model`.

    Raises:
        torch.OutOfMemoryError: the step does not fit; nothing of it is held any more. `DoesNotFit` where simulated.
        TierError: the GPU has not that much free.
    """
    model.zero_grad(set_to_none=True)
    try:
        if simulate.is_fake(model):
            return _simulated(step, gib, model)
        device = next(model.parameters()).device
        with limit(gib, device):
            return _measured(step, device)
    finally:
        model.zero_grad(set_to_none=True)


def _simulated(step: Callable[[], Any], gib: float, model: nn.Module) -> int:
    peak = simulate.peak_memory(step, model).total
    if peak > gib * tiers.GIB:
        raise DoesNotFit(f"the step needs {peak / tiers.GIB:.1f} GiB of {gib:.1f} (tier: simulated)")
    return peak


def _measured(step: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    failed = ""
    try:
        step()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        failed = str(error)
    if failed:  # raised anew: the original's traceback holds every tensor of the step
        gc.collect()
        raise torch.OutOfMemoryError(failed)
    return torch.cuda.max_memory_allocated(device)
