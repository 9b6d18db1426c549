"""What a run did, as evidence records: which stack, which device, what was measured.

A claim in this course is a figure that a run wrote down. `record` makes one evidence record: which failure, in which
state, in which library stack, on which device, and what was measured. Records go, one JSON object a line, into the
folder that the environment variable FAILURELAB_EVIDENCE names (`failurelab run` and the tests set it); without it,
`record` only returns the record.
"""

import functools
import json
import os
import pathlib
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from failurelab_course.experiments import devices, machine
from failurelab_course.experiments.memory import peak_memory as peak_memory
from failurelab_course.experiments.quiet import count_warnings as count_warnings
from failurelab_course.experiments.quiet import quiet as quiet

SCHEMA = 1
STATES = ("healthy", "broken", "wrong_fix", "right_fix", "measured")
TIERS = ("cpu", "gpu", "simulated")


def era() -> str:
    """Name of the era this process runs in, also where its interpreter was started by hand; `today` outside of one."""
    environment = pathlib.Path(sys.prefix)
    own = environment.name if environment.parent.name == ".eras" else "today"
    return os.environ.get("FAILURELAB_ERA", own)


def versions(device: str | torch.device = "cpu") -> dict[str, str]:
    """Return the installed version of every library under study (asked of the metadata, so nothing is imported).

    Args:
        device: for a GPU the driver's version, and that of the CUDA that torch was built for, are added.
    """
    versions = machine.versions()
    if torch.device(device).type == "cuda":
        versions |= {"driver": _driver() or "unknown", "cuda": torch.version.cuda or "unknown"}
    return versions


_driver = functools.cache(devices.driver)


def tier_of(device: str | torch.device = "cpu") -> str:
    """Return the tier of what is measured on this device, `cpu` or `gpu`, to stand beside every figure."""
    return "gpu" if torch.device(device).type == "cuda" else "cpu"


def device_name(device: str | torch.device = "cpu") -> str:
    """Return what the device is called: the GPU's name, or the processor's architecture and thread count."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@functools.cache
def processor() -> str:
    """Return the processor's model, its instruction sets that matter here, and which of them torch uses."""
    return f"{machine.processor()}; torch uses {torch.backends.cpu.get_cpu_capability()}"


def record(
    failure: str,
    state: str,
    metrics: Mapping[str, Any],
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
        metrics: names to numbers, booleans, strings, or lists of these; tensors of one element are taken as numbers.
        case: which set-up of the failure this is, such as `"full, reentrant"`.
        seed: the seed of the run, if it has one.
        tier: `cpu`, `gpu` or `simulated`; by default it follows `device`.
        device: where the run computed.

    Returns:
        The record as a dictionary, JSON-ready.

    Raises:
        ValueError: an unknown state or tier, or a metric that JSON cannot hold.
    """
    tier = tier or tier_of(device)
    if state not in STATES:
        raise ValueError(f"unknown state {state!r}: a record's state is one of {', '.join(STATES)}")
    if tier not in TIERS:
        raise ValueError(f"unknown tier {tier!r}: a record's tier is one of {', '.join(TIERS)}")
    entry = {
        "schema": SCHEMA,
        "failure": failure,
        "case": case,
        "state": state,
        "era": era(),
        "seed": seed,
        "tier": tier,
        "device": device_name(device),
        "processor": processor(),
        "versions": versions(device),
        "source": os.environ.get("FAILURELAB_SOURCE", ""),
        "figures": {name: _plain(name, value) for name, value in metrics.items()},  # so called in all files of evidence
    }
    folder = os.environ.get("FAILURELAB_EVIDENCE")
    if folder:
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with open(path / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
    return entry


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
