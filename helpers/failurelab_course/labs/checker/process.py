"""What runs in the process of one check: its own folder, session and end; then the measurement, and its answer."""

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import pathlib
import pkgutil
import signal
import sys
import traceback
from typing import Any

# Both are set by `preload`, in the fork server: its process id, and which of the labs' needs do not import.
PARENT = 0
BROKEN: dict[str, str] = {}
NEEDS = "FAILURELAB_NEEDS"  # the variable that names what the labs import, with blanks between
BROKE = 70  # a check's exit status when the check itself could not be done
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def import_needs() -> dict[str, str]:
    """Import each `module.Name` or `module` that the labs need; return those that fail, with the reason."""
    broken = {}
    for need in os.environ.get(NEEDS, "").split():
        try:
            pkgutil.resolve_name(need)
        except Exception as error:  # an import of a stack that does not fit fails in every way
            first = next(iter(str(error).strip().splitlines()), "")
            broken[need] = f"{type(error).__name__}: {first}"
    return broken


def report_imports(path: pathlib.Path) -> None:
    """Write which needs the fork server could not import."""
    from failurelab_course.labs.checker import measure  # noqa: F401  raises what the fork server passed over

    path.write_text(json.dumps(BROKEN))


def report_accuracy(model: str, path: pathlib.Path) -> None:
    """Write the accuracy of a model as it is given."""
    from failurelab_course.experiments import models
    from failurelab_course.labs.checker import judge

    with judge.start(*models.load(model)) as scorer:
        path.write_text(json.dumps(scorer.accuracy()))


def adopt_orphans() -> None:
    """Make this process the one to which what it started falls when its parent ends, instead of the system's first."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let the system end this process when its parent ends, however that happens."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def run(order: dict[str, Any]) -> None:
    """Do one check, and end this process with nothing of a script's own run at its end."""
    status = BROKE
    try:
        _settle(pathlib.Path(order["folder"]))
        _measure(order)
        status = 0
    except Exception:  # not the script's: that one's errors are what is measured
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):  # where what was printed has no room
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _settle(folder: pathlib.Path) -> None:
    """Make this process a run of its own: session, descriptors and folders."""
    os.setsid()
    end_with_parent()
    if os.getppid() != (PARENT or multiprocessing.parent_process().pid):  # it ended before
        os._exit(1)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    os.chdir(folder / "work")


def _measure(order: dict[str, Any]) -> None:
    """Measure one script, and write the answer."""
    from failurelab_course.labs.checker import measure

    folder = pathlib.Path(order["folder"])
    measured = measure.run(
        folder / "work" / "train.py",
        folder / "model",
        folder / "output",
        order["trainer"],
        order["kind"],
        device=order["device"],
        facts=order["facts"],
        accuracy_before=order["accuracy_before"],
        stop_after=order["stop_after"],
        # A forked check has them already.
        prepare=None if order["device"] == "cpu" else import_needs,
    )
    partial = folder / "answer.partial"
    answer = dataclasses.asdict(measured) | {"records": records(order, measured), "cpu_seconds": sum(os.times()[:4])}
    partial.write_text(json.dumps(answer))
    partial.rename(folder / order["answer"])


def records(order: dict[str, Any], measured: Any) -> list[dict[str, Any]]:
    """Make the evidence records of the run, where the order asks for them: one for each tier that it measured on."""
    asked = order.get("record")
    if not asked or measured.environment:
        return []
    from failurelab_course.experiments import observe
    from failurelab_course.labs import metrics

    os.environ["FAILURELAB_SOURCE"] = asked["source"]
    device = order["device"]
    parts = metrics.by_tier(order["kind"], measured.metrics, "cpu" if device == "cpu" else "gpu")
    return [
        observe.record(asked["failure"], asked["state"], part, case=asked["case"], seed=0, device=device, tier=tier)
        for tier, part in parts.items()
    ]
