"""Peak memory of a training step on devices that are not there, by kind: weights, gradients, optimizer, activations.

Out of memory shows late and dear. A step on fake tensors allocates nothing and tells every allocation that a real one
would make. What differs from a GPU: the kernels. Attention there is one fused kernel that keeps its output and a row
sum; a simulated device has the decomposed one, whose backward keeps matrices of `(rows, heads, length, length)`. So
attention is replaced, for the time of a step, by a stand-in that keeps what the fused kernel keeps; the decomposed
figure can be asked for too, and the ratio of both grows with the length.

Not in the figure: the allocator's rounding and fragmentation, kernels' workspaces, the CUDA context (some hundred MiB),
and temporary casts inside fused kernels.

Source: FlashAttention-2 (arXiv 2307.08691) for what the fused kernel keeps.
"""

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment of a step at which most memory was held, on one device.

    Attributes:
        total: bytes.
        kinds: bytes by kind: `Parameter` (scales of 4-bit weights too), `Buffer`, `Gradient`, `Optstate` (made in the
            optimizer's step), `Activation` (made in a forward pass) and `Temp` (made in a backward pass, where layers
            under checkpointing are computed again).
        device: such as `sim:0`.
        attention: `fused` or `decomposed`.
    """

    total: int
    kinds: Mapping[str, int]
    device: str
    attention: str


def peak_memory(
    step: Callable[[], Any],
    *modules: Any,
    attention: str = "fused",
    optimizer: torch.optim.Optimizer | None = None,
) -> Peak:
    """Return the peak memory of `step()` on the simulated device that used most, weights included.

    Args:
        step: forward and backward passes on fake tensors; called once, in the fake tensor mode.
        modules: whose parameters and buffers count as held before; the model.
        attention: `fused` (as on a GPU) or `decomposed` (as a simulated device really does it).
        optimizer: its states count as their own kind.

    Raises:
        ValueError: another `attention`, or no memory was seen on any device.
    """
    if attention not in ("fused", "decomposed"):
        raise ValueError(f"attention={attention!r}: a step is simulated with 'fused' or 'decomposed' attention")
    from failurelab.simulate import fake

    with fake(), contextlib.ExitStack() as stack:
        tracker = _Tracker(modules, optimizer)
        stack.callback(tracker.stop)
        if attention == "fused":
            stack.enter_context(fused_attention())
        with tracker:
            step()
    peaks = {device: peak for device, peak in tracker.peaks.items() if device.type not in ("cpu", "meta")}
    if not peaks:
        raise ValueError(
            "the step used no memory on a simulated device: it must compute with tensors of the simulation"
        )
    device, kinds = max(peaks.items(), key=lambda each: sum(each[1].values()))
    return Peak(sum(kinds.values()), dict(kinds), str(device), attention)


class _Tracker(TorchDispatchMode):
    """Counts the storages that are alive, by device and kind.

    torch's own MemTracker says the same totals; it keeps a record for each module and takes minutes for 80 layers.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self.held: dict[torch.device, collections.Counter] = collections.defaultdict(collections.Counter)
        self.totals: collections.Counter = collections.Counter()
        self.peaks: dict[torch.device, dict[str, int]] = {}
        self.kinds = WeakIdKeyDictionary()
        self.hooks, self.in_optimizer = [], False
        for module in modules:
            for parameter in module.parameters():
                self._count(parameter, "Parameter")
                self._count(parameter.grad, "Gradient")
                self._count_state(getattr(parameter, "quant_state", None))
                if parameter.requires_grad:
                    self.hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient))
            for buffer in module.buffers():
                self._count(buffer, "Buffer")
        if optimizer is not None:
            tree_map_only(torch.Tensor, lambda tensor: self._count(tensor, "Optstate"), dict(optimizer.state))
            self.hooks.append(optimizer.register_step_pre_hook(lambda *_: self._in_optimizer(True)))
            self.hooks.append(optimizer.register_step_post_hook(lambda *_: self._in_optimizer(False)))

    def _in_optimizer(self, inside: bool) -> None:
        self.in_optimizer = inside

    def _count_state(self, state: Any) -> None:
        """Count the scales of a quantized weight as part of the weight."""
        for value in vars(state).values() if state is not None else ():
            self._count_state(value) if hasattr(value, "absmax") else self._count(value, "Parameter")

    def stop(self) -> None:
        """Listen no more."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        in_backward = torch._C._current_graph_task_id() != -1
        kind = "Optstate" if self.in_optimizer else "Temp" if in_backward else "Activation"
        tree_map_only(torch.Tensor, lambda tensor: self._count(tensor, kind), out)
        return out

    def _gradient(self, parameter: torch.Tensor) -> None:
        self._count(parameter.grad, "Gradient", again=True)

    def _count(self, tensor: Any, kind: str, again: bool = False) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage, device = tensor.untyped_storage(), tensor.device
        known = self.kinds.get(storage)
        if known is not None:
            if again and known[0] != kind:  # what was a temporary result has become a gradient
                self.held[device][known[0]] -= known[1]
                self.held[device][kind] += known[1]
                known[0] = kind
            return
        entry = [kind, storage.nbytes()]
        self.kinds[storage] = entry
        weakref.finalize(storage, self._gone, device, entry)
        self.held[device][kind] += entry[1]
        self.totals[device] += entry[1]
        if self.totals[device] > sum(self.peaks.get(device, {}).values()):
            self.peaks[device] = {name: size for name, size in self.held[device].items() if size}

    def _gone(self, device: torch.device, entry: list) -> None:
        self.held[device][entry[0]] -= entry[1]
        self.totals[device] -= entry[1]


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` keep what a GPU's fused kernel keeps, for the time of the block; no numbers.

    For fake tensors only: on real ones it would compute nothing, so that is an error.
    """
    original = functional.scaled_dot_product_attention

    def fused(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not hasattr(query, "fake_mode"):
            raise ValueError("fused_attention stands in for a kernel on fake tensors, and these are real ones")
        return _Fused.apply(query, key, value)

    functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


class _Fused(torch.autograd.Function):
    """Shapes and what is kept of FlashAttention: inputs, output, and one float32 for each row of scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
