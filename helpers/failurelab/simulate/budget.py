"""A step against a memory budget: it fits, or runs out of memory, on a GPU for real and elsewhere on fake tensors.

Out of memory is the commonest failure of all, and a laptop cannot show it: its system swaps, or ends the process. So a
step is given a budget. On a GPU torch may take no more than that, and raises its own error. On a CPU the same step runs
on simulated tensors, which show every allocation and compute nothing; over the budget is the same error.

    net = budget.model(config, "cuda")
    budget.spend(lambda: net(budget.tokens(net, 8, 2048)).logits.mean().backward(), 6, net)

Simulated peaks lack the allocator's rounding and fragmentation and some kernels' workspaces (`simulate.memory`). A
GPU's budget limits what torch reserves, these included.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from failurelab import simulate
from failurelab.errors import FailureLabError

GIB = 2**30


class DoesNotFit(torch.OutOfMemoryError):
    """A simulated step that would have run out of memory; caught wherever the real error is."""


class BudgetError(FailureLabError):
    """The GPU has not the memory that is asked for; the message says how much is free."""

    exit_status = 3


@contextlib.contextmanager
def limit(gib: float, device: str | torch.device) -> Iterator[None]:
    """Let this process take no more than `gib` GiB of a GPU for a block; afterwards all of it again.

    Raises:
        ValueError: the device is no GPU, or the budget is not above 0.
        BudgetError: the GPU has less than that free, so that the budget would not be what stops the step.
    """
    device = torch.device(device)
    if device.type != "cuda" or gib <= 0:
        raise ValueError(f"a budget of {gib} GiB on {device}: a GPU can be limited, to more than 0")
    _release_cache()
    _require_free(gib * GIB - torch.cuda.memory_reserved(device), device, f"a budget of {gib} GiB")
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        _release_cache()


def _release_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _require_free(size: float, device: torch.device, purpose: str) -> None:
    free, total = torch.cuda.mem_get_info(device)
    if free < size:
        step = "a larger card" if total < size else "end what else runs on it (nvidia-smi lists it)"
        raise BudgetError(
            f"{torch.cuda.get_device_name(device)} has {total / GIB:.1f} GiB, {free / GIB:.1f} of them free, and "
            f"{purpose} needs {size / GIB:.1f}. Next: {step}"
        )


def model(config: Any, device: str | torch.device, seed: int = 0) -> nn.Module:
    """Return a model of this shape in train mode: random weights on a GPU, simulated on a CPU.

    The weights are bfloat16; on a GPU without it, float32. `simulate.devices` holds for the process, so a simulation
    should have a process of its own, such as an era's kernel.

    Raises:
        BudgetError: the GPU has not the memory for the weights and their gradients.
    """
    device = torch.device(device)
    if device.type != "cuda":
        simulate.devices(1)
        return simulate.place(simulate.model(config), {"": 0}).train()
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    size = sum(parameter.numel() for parameter in simulate.model(config).parameters()) * dtype.itemsize
    _require_free(2 * size, device, "the model with its gradients")
    return _build(config, device, dtype, seed)


def _build(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).to(dtype).train()


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
        BudgetError: the GPU has less than the budget free.
    """
    model.zero_grad(set_to_none=True)
    try:
        if simulate.is_fake(model):
            peak = simulate.peak_memory(step, model).total
            if peak > gib * GIB:
                raise DoesNotFit(f"the step needs {peak / GIB:.1f} GiB of {gib:.1f} (tier: simulated)")
            return peak
        device = next(model.parameters()).device
        with limit(gib, device):
            return _measure(step, device)
    finally:
        model.zero_grad(set_to_none=True)


def _measure(step: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    message = ""
    try:
        step()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        message = str(error)
    if message:  # raised anew: the original's traceback holds every tensor of the step
        gc.collect()
        raise torch.OutOfMemoryError(message)
    return torch.cuda.max_memory_allocated(device)
