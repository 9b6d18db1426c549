"""What a run did, measured: evidence records, warnings, peak memory, and a quiet set-up.

A claim in this course is a figure that a run wrote down. `record` makes one evidence record: which failure, in which
state, in which library stack, on which device, and what was measured. Records go, one JSON object a line, into the
folder that the environment variable FAILURELAB_EVIDENCE names (`failurelab run` and the tests set it); without it,
`record` only returns the record.
"""

import contextlib
import functools
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers

from failurelab_course.experiments import devices as tiers
from failurelab_course.experiments import quiet as noise

SCHEMA = 1
STATES = ("healthy", "broken", "wrong_fix", "right_fix", "measured")
TIERS = ("cpu", "gpu", "simulated")
_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "datasets")


def era() -> str:
    """Name of the era this process runs in; `today` outside an era's kernel."""
    return os.environ.get("FAILURELAB_ERA", "today")


def versions(device: str | torch.device = "cpu") -> dict[str, str]:
    """Return the installed version of every library under study (asked of the metadata, so nothing is imported).

    Args:
        device: for a GPU the driver's version, and that of the CUDA that torch was built for, are added.
    """
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.device(device).type == "cuda":
        found |= {"driver": _driver() or "unknown", "cuda": torch.version.cuda or "unknown"}
    return found


_driver = functools.cache(tiers.driver)


def tier_of(device: str | torch.device = "cpu") -> str:
    """Return the tier of what is measured on this device, `cpu` or `gpu`, to stand beside every figure."""
    return "gpu" if torch.device(device).type == "cuda" else "cpu"


def device_name(device: str | torch.device = "cpu") -> str:
    """Return what the device is called: the GPU's name, or the processor's architecture and thread count."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def record(
    failure: str,
    state: str,
    figures: Mapping[str, Any],
    *,
    case: str = "",
    seed: int | None = None,
    tier: str | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Make one evidence record, and write it where FAILURELAB_EVIDENCE says.

    Args:
        failure: the failure's id in the registry, such as `"F1"`; `"ground"` for what belongs to none.
        state: one of `healthy`, `broken`, `wrong_fix`, `right_fix`, `measured`.
        figures: names to numbers, booleans, strings, or lists of these; tensors of one element are taken as numbers.
        case: which set-up of the failure this is, such as `"full, reentrant"`.
        seed: the seed of the run, if it has one.
        tier: `cpu`, `gpu` or `simulated`; by default it follows `device`.
        device: where the run computed.

    Returns:
        The record as a dictionary, JSON-ready.

    Raises:
        ValueError: an unknown state or tier, or a figure that JSON cannot hold.
    """
    tier = tier or tier_of(device)
    if state not in STATES:
        raise ValueError(f"unknown state {state!r}: a record's state is one of {', '.join(STATES)}")
    if tier not in TIERS:
        raise ValueError(f"unknown tier {tier!r}: a record's tier is one of {', '.join(TIERS)}")
    made = {
        "schema": SCHEMA,
        "failure": failure,
        "case": case,
        "state": state,
        "era": era(),
        "seed": seed,
        "tier": tier,
        "device": device_name(device),
        "versions": versions(device),
        "source": os.environ.get("FAILURELAB_SOURCE", ""),
        "figures": {k: _plain(k, v) for k, v in figures.items()},
    }
    folder = os.environ.get("FAILURELAB_EVIDENCE")
    if folder:
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with open(path / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(made, allow_nan=False) + "\n")
    return made


def _plain(name: str, value: Any) -> Any:
    """Return `value` as JSON can hold it; NaN and infinities become strings, for JSON has none."""
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, list | tuple):
        return [_plain(name, part) for part in value]
    if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:
        return _plain(name, value.item())
    raise ValueError(
        f"figure {name!r} is a {type(value).__name__}: a record holds numbers, strings, booleans and "
        "lists of these; reduce it to such first"
    )


class SeenWarnings:
    """How often the warning was issued; filled in while `count_warnings` runs."""

    count: int = 0


@contextlib.contextmanager
def count_warnings(match: str) -> Iterator[SeenWarnings]:
    """Count the Python warnings whose text `match` finds, every one, and show none of them meanwhile."""
    seen = SeenWarnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield seen
        finally:
            seen.count = sum(bool(re.search(match, str(warning.message))) for warning in caught)


def peak_memory(step: Callable[[], Any], device: str | torch.device = "cpu") -> int:
    """Return the peak of memory allocated by torch while `step()` runs, in bytes over what was held at its start.

    On a CPU it adds up every allocation and release that torch's profiler saw, so that it is exact and independent of
    the process's own memory. On a GPU it is `torch.cuda.max_memory_allocated` over the start, of that one GPU, after
    all earlier work on it is done; torch's own peak statistics of that GPU are reset by it. There blocks are rounded
    up, and cuBLAS allocates a workspace at its first call and keeps it: let a step run once before, not to count that.

    Raises:
        ValueError: a device whose memory is not counted here, a simulated one or an Apple GPU.
    """
    device = _counted(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    held = peak = 0
    for size in _allocations(step):
        held += size
        peak = max(peak, held)
    return peak


def held_memory(make: Callable[[], Any], device: str | torch.device = "cpu") -> tuple[Any, int]:
    """Return what `make()` returns, and the bytes that torch holds for it afterwards, counted as in `peak_memory`."""
    device = _counted(device)
    made = []
    if device.type == "cuda":
        start = torch.cuda.memory_allocated(device)
        made.append(make())
        gc.collect()
        return made[0], torch.cuda.memory_allocated(device) - start

    def keep() -> None:
        made.append(make())
        gc.collect()

    held = sum(_allocations(keep))
    return made[0], held


def _counted(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"the memory of a {device.type} device is not counted: torch's CPU profiler and torch.cuda do not see it. "
            "Next: a device cpu or cuda; for simulated devices simulate.peak_memory"
        )
    gc.collect()  # what an earlier run left in cycles must not be freed, and counted as freed, during this one
    return device


def _allocations(step: Callable[[], Any]) -> list[int]:
    """Run `step` on a CPU; return the bytes of every allocation and, negative, release, in the order of time."""
    # The profiler's C++ log writes when it starts and stops, to stderr, unless its level is above the last one.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    )
    return [size for _, size in changes]


def quiet() -> None:
    """Keep other libraries' notices out of a notebook: their loggers at ERROR, no progress bars, no upgrade advice.

    Python warnings of the categories DeprecationWarning, FutureWarning and UserWarning are silenced too, for the
    whole process. `count_warnings` sees them all the same: where a warning is the subject, the course counts it.
    """
    noise.silence()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()


@contextlib.contextmanager
def stopwatch(device: str | torch.device = "cpu") -> Iterator[Callable[[], float]]:
    """Measure wall-clock seconds: the yielded function returns those since the start, or the total once ended.

    Args:
        device: a GPU's work is waited for at the start and at the end; it is only handed over when a call returns.
    """
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda _: None
    wait(device)
    start = time.perf_counter()
    total: list[float] = []
    try:
        yield lambda: total[0] if total else time.perf_counter() - start
    finally:
        wait(device)
        total.append(time.perf_counter() - start)


def machine_seconds() -> tuple[float, float]:
    """Return the processor seconds that this machine has worked, and those that it could have, since its start.

    Two readings tell how busy it was between them, with whatever work. On Linux: from `/proc/stat`.

    Raises:
        OSError: the system has no `/proc/stat`.
    """
    fields = [int(each) for each in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(fields) - fields[3] - fields[4]) / ticks, sum(fields) / ticks
