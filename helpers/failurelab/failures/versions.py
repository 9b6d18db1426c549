"""Look at another Python's libraries before a run: which failures of this course do these versions have?

`failurelab doctor --python PATH`. That Python is only asked for the versions that its packages' metadata name: nothing
is imported or changed there.
"""

import json
import os
import pathlib
import subprocess

from packaging.version import InvalidVersion, Version

from failurelab import failures
from failurelab.checks import FAIL, IF_YOURS, PASS, Check
from failurelab.errors import FailureLabError
from failurelab.failures import atlas
from failurelab.failures.loader import PACKAGES as LIBRARIES
from failurelab.failures.toml_table import read_toml

_HEALTHY = pathlib.Path(__file__).with_name("healthy.toml")
_MEANING = (
    "EXPOSED tells what they do to a run of the kind that its line names; IF YOURS, what they do to code of your own "
    "of that kind. Your script was not read: where it does none of that, the line does not concern you. "
    "The script itself is judged by failurelab preflight SCRIPT."
)


class VersionsError(FailureLabError):
    """A Python does not tell the versions of its libraries; the message says why and the next step."""

    exit_status = 3


def check_python(python: str | pathlib.Path) -> list[Check]:
    """Check a Python's libraries against the registry: which failures do these versions have?

    Raises:
        VersionsError: it is no Python, or does not answer.
    """
    versions = ask_versions(python)
    listed = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none of the libraries under study"
    damaged = [name for name, version in versions.items() if not _is_version(version)]
    if damaged:
        raise VersionsError(
            f"what is installed for {python} does not say its version: {', '.join(damaged)}. Half of its files may be "
            f"gone, and no failure can be told by it. Next: install {' '.join(damaged)} there again."
        )
    if "transformers" not in versions:
        raise VersionsError(
            f"transformers is not installed for {python} ({listed}): none of the course's failures can happen there. "
            "Next: give the Python that you train with, as `which python` prints it there."
        )
    notes = "" if "trl" in versions else "; trl is not installed: its trainers cannot be at fault, code of your own can"
    for name, version in versions.items():
        if Version(version).is_prerelease:
            notes += f"; {name} {version} counts as {failures.release(version)}, whose code it may have in part alone"
    if measured := atlas.cite(versions):
        notes += f"; {measured} (failurelab upgrade tells what another trl changes)"
    exposures = {failure.id: failures.affected(failure, versions) for failure in failures.all()}
    checks = [Check("Libraries", PASS, listed + notes)]
    if any(exposures.values()):
        checks.append(Check("What these versions do", FAIL, _MEANING, _healthy_stack()))
    for failure in failures.all():
        hit = exposures[failure.id]
        status = FAIL if hit else IF_YOURS if hit.own_code else PASS
        repair = "" if status == PASS else _repair(failure, versions)
        checks.append(Check(f"{failure.id} {failure.title}", status, hit.reason, repair, failure.id))
    return checks


def ask_versions(python: str | pathlib.Path) -> dict[str, str]:
    """Return the versions of the libraries under study that a Python has; nothing is imported there.

    Raises:
        VersionsError: it is no Python, or does not answer.
    """
    code = (
        "import importlib.metadata as m, json\n"
        "def v(n):\n"
        "    try: return m.version(n) or 'damaged'\n"
        "    except m.PackageNotFoundError: return None\n"
        "    except Exception: return 'damaged'\n"
        f"print(json.dumps({{n: v(n) for n in {LIBRARIES!r}}}))"
    )
    try:
        # Without this process's own folders: what it has would be counted as there.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        asked = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VersionsError(
            f"{python} is no Python that starts ({error}): its libraries cannot be told. "
            "Next: give the path that `which python` prints where you train."
        ) from error
    try:
        versions = json.loads(asked.stdout.strip().splitlines()[-1])
        return {name: version for name, version in versions.items() if version}
    except (ValueError, IndexError, AttributeError) as error:
        said = (asked.stderr.strip() or asked.stdout.strip() or "nothing").splitlines()[-1][:200]
        raise VersionsError(
            f"{python} ended with status {asked.returncode} and did not tell its versions; it said last: {said}. "
            "Next: mend or make that environment anew, or give the path that `which python` prints where you train."
        ) from error


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def _repair(failure: failures.Failure, versions: dict[str, str]) -> str:
    """Return what to do about a failure, a line each: upgrade, or repair in place, and where it is explained."""
    upgrades = failures.upgrades(failure, versions)
    lines = [f"{failure.id} {failure.title}"]
    lines += [f"upgrade: {upgrade}" for upgrade in upgrades]
    lines.append(f"in place: {failure.fix}")
    lines += [f"helper: failurelab.{failure.helper}"] if failure.helper else []
    lines += [f"why: notebooks/{failure.notebook}.ipynb"] if failure.notebook else []
    return "\n".join(lines)


def _healthy_stack() -> str:
    """Return how to have a stack that has none of the failures; nothing if the registry knows none."""
    stack = read_toml(_HEALTHY)
    if any(failures.affected(failure, stack) for failure in failures.all()):
        return ""
    versions = ", ".join(f"{name} {stack[name]}" for name in ("trl", "transformers", "peft"))
    return f"Best, for all of these at once: {versions}, together. If you must stay, each by itself:"
