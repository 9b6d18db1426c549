"""The processes that train together, for a comparison that is one on all of them.

Each rank computes the textbook for its own rows, and the sums are reduced: cost and memory are a rank's. All ranks hold
the same rows, trainer's gradient and sums, so that each comes to the same passes in the same order.

Before anything is done together, each rank writes into the store of the launch that it is there, and waits a limited
time for the others: a guard on one rank, a rank that died or one that hangs is named, and nobody waits in a call of all
processes. Those go through a group of gloo of our own, with a time limit, so that the trainer's group stays as it is.

Weights and gradients that are spread over the ranks, of ZeRO and of FSDP2, are put together here too.
"""

import contextlib
import datetime
import hashlib
import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from failurelab.textbook.gradient import Gradient, OutOfMemory, is_out_of_memory

# Seconds, or less where the launch's own time-out is shorter: nobody waits for longer than it would without a guard.
WAIT = 60.0  # in which the others come to where one is; at most half of the time-out
PASS = 600.0  # in which they are done with a pass; at most the time-out
GONE = 5.0  # in which those that still live say so, after a call has failed; at most a quarter of the time-out
SHARDING = ("deepspeed.runtime.zero.", "deepspeed.utils.nvtx", "torch.distributed.fsdp.")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KINDS = {kind.__name__: kind for kind in (OutOfMemory, ValueError, RuntimeError)}
_meetings = itertools.count(1)
T = TypeVar("T")


class RanksApart(RuntimeError):
    """The ranks do not come to the same place; the message names those that do not."""


class Ranks:
    """This process among those that train together; by default the only one.

    Args:
        number: of this process.
        count: of all.
        store: that all of them read and write; None of a single one.
        limit: seconds after which a call of all processes of the launch gives up.
    """

    def __init__(self, number: int = 0, count: int = 1, store: Any = None, limit: float = PASS):
        self.number, self.count, self._store = number, count, store
        self._wait, self._pass, self._gone = min(WAIT, limit / 2), min(PASS, limit), min(GONE, limit / 4)
        self._calls = 0
        self._group: Any = None
        self.lost = ""  # why this rank is in no call of all processes any more
        self.split = False  # whether the others may know something else of the last comparison

    @classmethod
    def meet(cls, told: Mapping[str, Any], limit: float = PASS) -> "Ranks":
        """Return this process among the others, which all have to come here.

        Args:
            told: what has to be the same on all of them, by what it is called.
            limit: seconds after which a call of all processes of the launch gives up.

        Raises:
            RanksApart: one of them does not come, or is told otherwise.
        """
        if not several():
            return cls()
        place = f"failurelab/{next(_meetings)}"
        ranks = cls(dist.get_rank(), dist.get_world_size(), dist.PrefixStore(place, _store()), limit)
        every = ranks.call("the beginning of training, with StepGuard or textbook.compare", dict(told))
        for number, other in enumerate(every):
            for name in every[0] | other:  # the same on all, who tells what
                if other.get(name) != every[0].get(name):
                    raise RanksApart(
                        f"the ranks are not alike: {name} is {other.get(name)} on rank {number}, and "
                        f"{every[0].get(name)} on rank 0"
                    )
        ranks._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=ranks._pass))
        return ranks

    def call(self, where: str, told: Any) -> list[Any]:
        """Return what each rank says here, once all have come; by the store alone.

        One that does not come in time is waited for by nobody: the first who knows writes down whether it goes on.

        Raises:
            RanksApart: one of them does not come.
        """
        if self.count == 1:
            return [told]
        self._calls, self.split = self._calls + 1, True  # until all have come
        key, until = f"call-{self._calls}", time.monotonic() + self._wait
        try:
            self._store.set(f"{key}/{self.number}", pickle.dumps(told))
            absent = [rank for rank in range(self.count) if not self._came(f"{key}/{rank}", until)]
            word = self._store.compare_set(f"{key}/word", "", "waited in vain" if absent else "go")
        except RuntimeError as error:  # the store's own: who keeps it is gone
            raise RanksApart(
                f"the store of the launch, through which the ranks meet, does not answer: {error}"
            ) from error
        if word != b"go":
            raise RanksApart(
                f"{name_ranks(absent) or 'another rank'} did not come to {where} within {self._wait:g} seconds"
            )
        self.split = False
        return [pickle.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.count)]

    def _came(self, key: str, until: float) -> bool:
        left = datetime.timedelta(seconds=max(0.01, until - time.monotonic()))
        try:
            self._store.wait([key], left)
        except RuntimeError as error:
            if self._store.check([key]):
                raise RanksApart(str(error)) from error
            return False
        return True

    def together(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Make a call of all processes, in our group.

        Raises:
            RanksApart: it failed; with the ranks that no longer answer.
        """
        try:
            call(*args, group=self._group, **kwargs)
        except RuntimeError as error:
            raise self.apart(error) from error

    def apart(self, error: RuntimeError) -> RanksApart:
        """Return what an error in a call of all processes is told as, with the ranks that no longer answer.

        One that left by an error of its own has said so.
        """
        until, said = time.monotonic() + self._gone, ""
        try:
            self._store.compare_set(f"left/{self.number}", "", " ")
            gone = [rank for rank in range(self.count) if not self._came(f"left/{rank}", until)]
            others = {rank: self._store.get(f"left/{rank}").decode() for rank in range(self.count) if rank not in gone}
            said = "; ".join(f"rank {rank}: {why}" for rank, why in others.items() if why.strip())
        except RuntimeError:  # the store went with them
            gone = []
        said = said or (f"{name_ranks(gone)} no longer answers" if gone else "the ranks have lost each other")
        self.leave(f"{said}: {str(error).splitlines()[0]}")
        return RanksApart(self.lost)

    def leave(self, why: str) -> None:
        """Leave our group, so that those who wait in it for this rank need not wait until their time is up."""
        if self._group is not None:
            self.lost, self.split = why, True
            with contextlib.suppress(RuntimeError):  # the store may have gone
                self._store.compare_set(f"left/{self.number}", "", why)
            dist.destroy_process_group(self._group)
            self._group = None

    def share(self, value: T) -> list[T]:
        """Return the value of each rank, in their order."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        self.together(dist.all_gather_object, values, value)
        return values

    def agree(self, work: Callable[[], T]) -> T:
        """Do a rank's own work, and return what it gives; an error of one rank is raised on all.

        Raises:
            OutOfMemory: memory is not enough on a rank.
            ValueError: the work raised one.
            RuntimeError: it raised another error.
        """
        if self.count == 1:
            return work()
        result, error = None, ""
        try:
            result = work()
        except Exception as raised:
            kind = OutOfMemory if is_out_of_memory(raised) else type(raised)
            error = f"{kind.__name__ if kind.__name__ in _KINDS else 'RuntimeError'}|{raised}"
        for rank, told in enumerate(self.share(error)):
            if told:
                name, _, line = told.partition("|")
                raise _KINDS[name](f"rank {rank}: {line}")
        return result  # type: ignore[return-value]  # no error, so it is there

    def collect(self, work: Callable[[], T]) -> list[T]:
        """Return what each rank's own work gives, in their order."""
        return self.share(self.agree(work))

    def add(self, work: Callable[[], Gradient]) -> Gradient:
        """Return the sum of the ranks' gradients, the same bits on all."""
        gradient = self.agree(work)
        if self.count == 1:
            return gradient
        return {name: self._reduce(grad) for name, grad in gradient.items()}

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().cpu().contiguous()
        self.together(dist.all_reduce, own)
        return own.to(tensor.device)

    def same(self, gradient: Gradient) -> tuple[Gradient, bool]:
        """Return a gradient that is the same on all ranks, and whether it was: else their mean."""
        own = [int(_bits(grad)) for grad in gradient.values()]
        if all(other == own for other in self.share(own)):
            return gradient, True
        return self.add(lambda: {name: grad / self.count for name, grad in gradient.items()}), False


ALONE = Ranks()


def several() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def own_number() -> int:
    """Return this process's number; 0 of a single one."""
    return dist.get_rank() if several() else 0


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def name_ranks(numbers: Sequence[int]) -> str:
    """Return a few ranks in words."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""


def fingerprint(tensors: Sequence[Any]) -> list[int]:
    """Return a number for each tensor, of the part that is on this rank: the sum of its bits."""
    return [_bits(tensor.to_local() if is_sharded(tensor) else tensor) for tensor in tensors]


def digest(told: bytes) -> int:
    """Return a number of 56 bits for what is told."""
    return int.from_bytes(hashlib.sha256(told).digest()[:7], "big")


def _bits(tensor: torch.Tensor) -> int:
    return int(tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))


# Weights and gradients that lie on several ranks.


def engine_of(trainer: Any) -> Any:
    """Return the engine that steps by itself, inside the backward pass; None where the trainer steps an optimizer."""
    wrapper = getattr(trainer.accelerator, "deepspeed_engine_wrapped", None)
    engine = getattr(wrapper, "engine", None)
    return engine if callable(getattr(engine, "zero_optimization_stage", None)) else None


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one of FSDP2, of which each rank has a part."""
    return callable(getattr(tensor, "full_tensor", None))


def is_spread(model: nn.Module) -> bool:
    """Whether weights of a model are spread over the ranks."""
    return any(hasattr(parameter, "ds_id") or is_sharded(parameter) for parameter in model.parameters())


def full_gradient(trainer: Any, copy: bool = True) -> Gradient:
    """Return the trainer's gradient of all rows, in float32; zeros where a parameter got none.

    To be asked between the backward pass and the step; of DeepSpeed and of FSDP2 on all ranks at once.
    """
    engine, gradient = engine_of(trainer), {}
    for name, parameter in trainer.model.named_parameters():
        if not parameter.requires_grad:
            continue
        if engine is not None:
            from deepspeed.utils import safe_get_full_grad

            grad = safe_get_full_grad(parameter)
        else:
            grad = parameter.grad
        if grad is None:
            grad = torch.zeros(getattr(parameter, "ds_shape", parameter.shape), device=parameter.device)
        elif is_sharded(grad):
            grad = grad.full_tensor()
        gradient[name] = grad.detach().to(parameter.device, torch.float32, copy=copy)
    return gradient


def whole_bytes(model: nn.Module) -> tuple[int, int]:
    """Return how many bytes a comparison takes for weights that are spread over ranks, and how many there are.

    These are the weights themselves, and in float32 their copy and three gradients of those that are trained.
    """
    if not is_spread(model):
        return 0, 0
    needed = 0
    for parameter in model.parameters():
        count = getattr(parameter, "ds_numel", parameter.numel())
        narrow = 4 * (parameter.element_size() < 4)
        needed += count * (parameter.element_size() + narrow + 12 * parameter.requires_grad)
    return needed, free_memory(next(model.parameters()).device)


def free_memory(device: torch.device) -> int:
    """Return how many bytes can be asked for."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


@contextlib.contextmanager
def whole(ranks: Ranks, *models: nn.Module | None) -> Iterator[None]:
    """Within the block models have plain, whole weights, where they are spread over the ranks by ZeRO-3 or FSDP2.

    All ranks have to enter it. Weights are gathered one tensor after another, into parameters that stand in the place
    of those that are spread; the hooks that would gather them are out. Afterwards everything is as it was.

    Raises:
        RanksApart: a rank does not take part.
    """
    with contextlib.ExitStack() as stack:
        try:
            for model in models:
                if model is not None and is_spread(model):
                    _replace(model, stack)
        except RuntimeError as error:
            if is_out_of_memory(error) or ranks.count == 1:
                raise
            raise ranks.apart(error) from error
        yield


def _replace(model: nn.Module, stack: contextlib.ExitStack) -> None:
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        if own:
            for parameter in own.values():
                if id(parameter) not in known:
                    known[id(parameter)] = nn.Parameter(_full(parameter), requires_grad=parameter.requires_grad)
            replaced = {name: known[id(own[name])] if name in own else None for name in module._parameters}
            stack.enter_context(mock.patch.object(module, "_parameters", replaced))
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = getattr(module, name)
            kept = type(hooks)((key, hook) for key, hook in hooks.items() if not _shards(hook))
            if len(kept) < len(hooks):
                stack.enter_context(mock.patch.object(module, name, kept))


def _full(parameter: Any) -> torch.Tensor:
    if is_sharded(parameter):
        whole: torch.Tensor = parameter.detach().full_tensor()
        return whole
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()  # type: ignore[no-any-return]
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]


def _shards(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(SHARDING)
