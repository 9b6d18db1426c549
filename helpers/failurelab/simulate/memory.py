"""Peak memory of a training step on devices that are not there, by kind: weights, gradients, optimizer, activations.

Out of memory shows late and costs much. A step on fake tensors allocates nothing and shows every allocation that a
real one would make. The kernels differ from a GPU's. There attention is one fused kernel that keeps its output and a
row sum; a simulated device has the decomposed one, whose backward keeps matrices of `(rows, heads, length, length)`. So
attention is replaced, for the time of a step, by a stand-in that keeps what the fused kernel keeps.

Kernels also allocate for the time of a call: copies of what is not contiguous, sums of attention's backward pass.
`gpu_workspace` knows those that a training step meets. Not in the figure: fragmentation of the allocator's blocks (one
of more than 1 MiB may be up to 1 MiB too large), what cuBLAS keeps from its first call on, the CUDA context (some
hundred MiB), and temporary casts inside fused kernels.
"""

import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from failurelab.simulate.gpu_workspace import fused_attention, workspace
from failurelab.simulate.mode import fake


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment of a step at which most memory was held, on one device.

    Attributes:
        total: bytes.
        kinds: bytes by kind: `Parameter` (scales of 4-bit weights too), `Buffer`, `Gradient`, `Activation` (made in a
            forward pass), `Temp` (made in a backward pass, where layers under checkpointing are computed again) and
            `Workspace` (held by a kernel while it runs).
        device: such as `sim:0`.
        before: bytes of the total that were held when the step began: weights, buffers, gradients that were there.
    """

    total: int
    kinds: Mapping[str, int]
    device: str
    before: int = 0

    @property
    def beyond(self) -> int:
        """Bytes that the step added."""
        return self.total - self.before


def peak_memory(step: Callable[[], Any], *modules: Any, block: int = 1) -> Peak:
    """Return the peak memory of `step()` on the simulated device that used most, weights included.

    Args:
        step: forward and backward passes on fake tensors; called once, in the fake tensor mode.
        modules: whose parameters and buffers count as held before; the model.
        block: what the size of each allocation is rounded up to, in bytes: 512 on a CUDA device.

    Raises:
        ValueError: a block below 1, or no memory was seen on any device.
    """
    if block < 1:
        raise ValueError(f"block={block}: allocations are rounded up to whole blocks of at least 1 byte")
    with fake():
        tracker = _Tracker(modules, block)
        before = dict(tracker.totals)
        try:
            with fused_attention(), tracker:
                step()
        finally:
            tracker.stop()
    peaks = {device: peak for device, peak in tracker.peaks.items() if device.type not in ("cpu", "meta")}
    if not peaks:
        raise ValueError(
            "the step used no memory on a simulated device: it must compute with tensors of the simulation"
        )
    device, kinds = max(peaks.items(), key=lambda peak: sum(peak[1].values()))
    return Peak(sum(kinds.values()), dict(kinds), str(device), before.get(device, 0))


class _Tracker(TorchDispatchMode):
    """Counts the storages that are alive, by device and kind.

    torch's own MemTracker gives the same totals; it keeps a record for each module and takes minutes for 80 layers.
    """

    def __init__(self, modules: Iterable[nn.Module], block: int) -> None:
        super().__init__()
        self.block = block
        self.held: dict[torch.device, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.totals: collections.Counter[torch.device] = collections.Counter()
        self.peaks: dict[torch.device, dict[str, int]] = {}
        self.kinds = WeakIdKeyDictionary()
        self.hooks = []
        for module in modules:
            for parameter in module.parameters():
                self._count(parameter, "Parameter")
                self._count(parameter.grad, "Gradient")
                self._count_state(getattr(parameter, "quant_state", None))
                if parameter.requires_grad:
                    self.hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient))
            for buffer in module.buffers():
                self._count(buffer, "Buffer")

    def _count_state(self, state: Any) -> None:
        """Count the scales of a quantized weight as part of the weight."""
        for value in vars(state).values() if state is not None else ():
            if hasattr(value, "absmax"):
                self._count_state(value)
            else:
                self._count(value, "Parameter")

    def stop(self) -> None:
        """Stop listening."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        in_backward = torch._C._current_graph_task_id() != -1
        kind = "Temp" if in_backward else "Activation"
        tree_map_only(torch.Tensor, lambda tensor: self._count(tensor, kind), out)
        for device, size in workspace(function, args).items():
            self._compare(device, self._rounded(size))
        return out

    def _gradient(self, parameter: torch.Tensor) -> None:
        self._count(parameter.grad, "Gradient", again=True)

    def _count(self, tensor: Any, kind: str, again: bool = False) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage, device = tensor.untyped_storage(), tensor.device
        known = self.kinds.get(storage)
        if known is not None:
            if again and known[0] != kind:  # a temporary result has become a gradient
                self.held[device][known[0]] -= known[1]
                self.held[device][kind] += known[1]
                known[0] = kind
            return
        entry: list[Any] = [kind, self._rounded(storage.nbytes())]
        self.kinds[storage] = entry
        weakref.finalize(storage, self._gone, device, entry)
        self.held[device][kind] += entry[1]
        self.totals[device] += entry[1]
        self._compare(device)

    def _rounded(self, size: int) -> int:
        return -(-size // self.block) * self.block

    def _compare(self, device: torch.device, workspace: int = 0) -> None:
        if self.totals[device] + workspace > sum(self.peaks.get(device, {}).values()):
            kinds = {**self.held[device], "Workspace": workspace}
            self.peaks[device] = {kind: size for kind, size in kinds.items() if size}

    def _gone(self, device: torch.device, entry: list[Any]) -> None:
        self.held[device][entry[0]] -= entry[1]
        self.totals[device] -= entry[1]
