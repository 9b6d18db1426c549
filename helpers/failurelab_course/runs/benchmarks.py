"""The benchmarks that record evidence: which eras each runs in, what it needs, and a run of one.

Where a machine lacks what a benchmark needs (DeepSpeed's operation, bitsandbytes' library for its CUDA, a package
index), the benchmark has no figures and is NOT RUN. That is no failure of the course; anything else that ends badly is.
"""

import pathlib
import re
import subprocess
from collections.abc import Iterable

from failurelab_course import eras
from failurelab_course.ledger.records import EvidenceError, Record, collect

# An import or a build that this machine cannot do, as the last line of a run, or the reason of a lab's row.
_CANNOT = re.compile(
    r"No module named '?(deepspeed|bitsandbytes|liger_kernel)|MissingCUDAException|CUDA_HOME does not exist|"
    r"CUDAMismatchException|Ninja is required|libbitsandbytes"
)
_SAID = "NOT RUN: "
STATUS = 4  # a benchmark ends with it after a line that starts with NOT RUN


class CannotRun(EvidenceError):
    """This machine lacks what a benchmark needs; the message is the reason."""


def why(output: str, status: int) -> str:
    """Return why a benchmark that ended with `status` could not run here; empty if it failed."""
    last = (output.strip().splitlines() or [""])[-1].strip()
    if status == STATUS and last.startswith(_SAID):
        return last.removeprefix(_SAID)
    return last[:200] if lacks(last) else ""


def lacks(reason: str) -> bool:
    """Whether the reason of a failure is something that this machine lacks."""
    return bool(_CANNOT.search(reason))


def unmet(needs: Iterable[str], era: eras.Era, device: str) -> str:
    """Return which need of a benchmark an era does not meet; empty if it meets all."""
    if "zero3" in needs and device == "cpu" and not era.has_zero3:
        return f"DeepSpeed's operation for the CPU is not built in era {era.name}"
    return ""


def benchmarks() -> dict[str, list[str]]:
    """Return each script in benchmarks/ that records evidence, with the eras it is to run in.

    A script says so in a line of its docstring: `Eras: today, trl-0.14`.
    """
    scripts = sorted((eras.root() / "benchmarks").glob("*.py"))
    return {script.stem: names for script in scripts if (names := _listed("Eras", script))}


def needs(name: str) -> list[str]:
    """Return what a benchmark says it needs, in a line of its docstring: `Needs: zero3, bitsandbytes`."""
    return _listed("Needs", _script(name))


def _script(name: str) -> pathlib.Path:
    return eras.root() / "benchmarks" / f"{name}.py"


def _listed(field: str, script: pathlib.Path) -> list[str]:
    line = re.search(rf"^{field}: (.+?)\.?$", script.read_text(encoding="utf-8"), re.MULTILINE)
    return [name.strip() for name in line.group(1).split(",")] if line else []


def run_benchmark(name: str, era_name: str, folder: pathlib.Path, device: str = "cpu") -> list[Record]:
    """Run one benchmark script in one era and return what it recorded.

    Raises:
        CannotRun: this machine lacks what it needs.
        EvidenceError: it failed, or recorded nothing.
    """
    era = eras.find(era_name)
    if reason := unmet(needs(name), era, device):
        raise CannotRun(reason)
    inside = folder / f"{name}-{era_name}"
    source = f"benchmarks/{name}.py"
    done = eras.run(
        era,
        [str(_script(name)), "--device", device],
        # one thread: as fast for small models, and the same sums on every machine
        env={"FAILURELAB_EVIDENCE": str(inside), "FAILURELAB_SOURCE": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        if reason := why(done.stdout, done.returncode):
            raise CannotRun(reason)
        tail = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise EvidenceError(f"{source} failed in era {era_name} (exit status {done.returncode}):\n{tail}")
    if not (records := collect(inside)):
        raise EvidenceError(f"{source} ended well in era {era_name} and recorded nothing")
    return records
