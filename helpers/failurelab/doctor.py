"""Look at a machine before a course, or at another Python's libraries before a run.

Nothing heavy is imported here, so that it answers in a second: versions are asked of the packages' metadata.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from . import eras, registry

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        status: PASS, FAIL or NOT RUN.
        detail: what was found.
        next_step: empty unless something is to be done.
        failure: the id of the failure that it is about, if any.
    """

    name: str
    status: str
    detail: str
    next_step: str = ""
    failure: str = ""


def course() -> list[Check]:
    """Check what the course needs on this machine: Python, disk, memory, compiler, eras, the small model, a GPU."""
    top = eras.root()
    made = _eras()
    ready = [each.name.removeprefix("Era ") for each in made if each.status == PASS]
    return [
        _python(),
        _packages(),
        *made,
        _kernel(ready[0] if ready else eras.TODAY),
        _model(top),
        _compiler(),
        _memory(),
        _disk(top),
        _gpu(),
    ]


def _kernel(era: str) -> Check:
    """Start the kernel of an era, as a notebook's cell does, and ask it for its transformers; end it again."""
    from . import era_client, era_output

    name = f"Kernel of {era}"
    began = time.monotonic()
    try:
        kernel = era_client.EraKernel(era)
        try:
            code = "import trl; from trl import GRPOTrainer; answer = trl.__version__"
            answer = kernel.run(code, fetch=["answer"])["answer"]
        finally:
            kernel.stop()
    except (eras.EraError, era_output.EraKernelDied, era_output.EraMagicError, era_output.EraCellError) as error:
        reason = str(error).strip().splitlines()[0]
        return Check(name, FAIL, reason, f"failurelab eras remove {era}, then failurelab eras create {era}")
    seconds = time.monotonic() - began
    return Check(name, PASS, f"imported GRPOTrainer of trl {answer}, {seconds:.0f} s from start to end")


def _python() -> Check:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    fits = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Check("Python", PASS if fits else FAIL, text, "" if fits else "make PYTHON=python3.11")


def _packages() -> Check:
    """Compare the packages installed with the lock; a conda environment may hold others, which is said."""
    lock = eras.find(eras.TODAY, ready=False).lock.read_text(encoding="utf-8")
    wanted = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE))
    wrong = []
    for name in _LIBRARIES[1:]:
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = "missing"
        if have != wanted.get(name):
            wrong.append(f"{name} {have}, the lock says {wanted.get(name)}")
    if wrong:
        return Check("Packages", FAIL, "; ".join(wrong), "make setup")
    return Check("Packages", PASS, ", ".join(f"{name} {wanted[name]}" for name in _LIBRARIES[1:]))


def _eras() -> list[Check]:
    made = []
    for era in eras.known():
        if era.name == eras.TODAY:
            continue
        ready = era.status == "ready"
        detail = era.title if ready else f"{era.title}: {era.status}"
        made.append(
            Check(
                f"Era {era.name}",
                PASS if ready else FAIL,
                detail,
                "" if ready else f"failurelab eras create {era.name}",
            )
        )
    return made


def _model(top: pathlib.Path) -> Check:
    weights = top / "models" / "tiny-qwen2" / "model.safetensors"
    if weights.is_file() and weights.stat().st_size > 100_000:
        return Check("Small Qwen2", PASS, f"{weights.stat().st_size / 1e6:.1f} MB of weights")
    return Check("Small Qwen2", FAIL, "its weights are missing or cut short", "git checkout models/tiny-qwen2")


def _compiler() -> Check:
    found = shutil.which("g++") or shutil.which("c++")
    if found:
        return Check("C++ compiler", PASS, pathlib.Path(found).name)
    return Check("C++ compiler", NOT_RUN, "none found: ZeRO-3 cannot run on the CPU", "install g++ (ZeRO-3 only)")


def _memory() -> Check:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return Check("Memory", NOT_RUN, "this system does not tell")
    enough = size >= 4e9
    step = "" if enough else "run the notebooks one by one: failurelab run --jobs 1"
    return Check("Memory", PASS if enough else FAIL, f"{size / 1e9:.0f} GB", step)


def _disk(top: pathlib.Path) -> Check:
    free = shutil.disk_usage(top).free
    enough = free >= 1e9
    return Check("Disk", PASS if enough else FAIL, f"{free / 1e9:.0f} GB free", "" if enough else "free 1 GB")


def _gpu() -> Check:
    if not shutil.which("nvidia-smi"):
        return Check("GPU", NOT_RUN, "none found: everything runs on the CPU tier")
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True
    )
    names = asked.stdout.strip().splitlines()
    if asked.returncode or not names:
        return Check("GPU", NOT_RUN, "nvidia-smi is here and shows no GPU: everything runs on the CPU tier")
    return Check("GPU", PASS, "; ".join(names))


def other_python(python: pathlib.Path) -> list[Check]:
    """Check another Python's libraries against the registry: which failures do these versions have?

    Raises:
        eras.EraError: it is no Python, or does not answer.
    """
    code = (
        "import importlib.metadata as m, json\n"
        "def v(n):\n"
        "    try: return m.version(n)\n"
        "    except m.PackageNotFoundError: return None\n"
        f"print(json.dumps({{n: v(n) for n in {_LIBRARIES!r}}}))"
    )
    versions = _asked(python, code)
    listed = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none of the libraries under study"
    if "transformers" not in versions:
        raise eras.EraError(
            f"transformers is not installed for {python} ({listed}): none of the course's failures can happen there. "
            "Next: give the Python that you train with, as `which python` prints it there."
        )
    missing = (
        "" if "trl" in versions else "; trl is not installed: its trainers cannot be at fault, code of your own can"
    )
    made = [Check("Libraries", PASS, listed + missing)]
    for failure in registry.all():
        hit = registry.affected(failure, versions)
        made.append(
            Check(
                f"{failure.id} {failure.title}",
                FAIL if hit else PASS,
                str(hit.reason),
                _repair(failure, versions) if hit else "",
                failure.id,
            )
        )
    return made


def _asked(python: pathlib.Path, code: str) -> dict[str, str]:
    """Return the versions that a Python names.

    Raises:
        eras.EraError: it is no Python, or does not start, or does not answer.
    """
    try:
        # Without this process's own folders: what it has would be counted as there.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        asked = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise eras.EraError(
            f"{python} is no Python that starts ({error}): its libraries cannot be told. "
            "Next: give the path that `which python` prints where you train."
        ) from error
    try:
        found = json.loads(asked.stdout.strip().splitlines()[-1])
        return {name: version for name, version in found.items() if version}
    except (ValueError, IndexError, AttributeError) as error:
        said = (asked.stderr.strip() or asked.stdout.strip() or "nothing").splitlines()[-1][:200]
        raise eras.EraError(
            f"{python} ended with status {asked.returncode} and did not tell its versions; it said last: {said}. "
            "Next: mend or make that environment anew, or give the path that `which python` prints where you train."
        ) from error


def _repair(failure: registry.Failure, versions: dict[str, str]) -> str:
    """Return what to do about a failure: upgrade, or repair in place, and where it is explained."""
    upgrades = [f"{stack} ({stack.what})" for stack in failure.fixed if not stack.holds(versions)]
    ways = [f"upgrade to {' or '.join(upgrades)}"] if upgrades else []
    ways += [f"in place: {failure.fix}"]
    ways += [f"helper: failurelab.{failure.helper}"] if failure.helper else []
    return f"{failure.id}: {'; '.join(ways)}. Why: notebooks/{failure.notebook}.ipynb"


def to_json(checks: list[Check]) -> dict[str, Any]:
    """Return the checks as JSON can hold them."""
    return {"schema": 1, "exit_status": exit_status(checks), "checks": [dataclasses.asdict(each) for each in checks]}


def text(checks: list[Check]) -> str:
    """Return the checks as lines: `STATUS name`, an indented detail, then one list of next steps."""
    lines = []
    for check in checks:
        lines += [f"{check.status:<8} {check.name}", f"         {check.detail}"]
    steps = [check.next_step for check in checks if check.next_step]
    if steps:
        lines += ["Next:", *(f"  - {step}" for step in steps)]
    return "\n".join(lines)


def exit_status(checks: list[Check]) -> int:
    """Return 1 if any check failed, else 0."""
    return int(any(check.status == FAIL for check in checks))
