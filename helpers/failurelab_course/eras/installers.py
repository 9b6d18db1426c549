"""What installs an era's packages, uv or pip: where it is, how it is called, what its failures mean.

An installer's pages of output become one line: what was found, and the next step. Only the standard library is needed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

from failurelab_course.eras import EraError, root

# Hidden from an installer, for it would look elsewhere than asked.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "JPY_PARENT_PID")


def find_links() -> str:
    """Return the folder that find-links name, for uv or pip; uv does not read what pip reads."""
    return os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""


def uv(*, required: bool = True) -> str:
    """Return the program uv that installs; empty if there is none and it is not required.

    Raises:
        EraError: it is required, and there is none.
    """
    for place in (root() / ".venv" / "bin" / "uv", pathlib.Path(sys.prefix) / "bin" / "uv"):
        if os.access(place, os.X_OK):
            return str(place)
    found = shutil.which("uv")
    if not found and required:
        raise EraError("uv is not found: eras are installed with it. Next: make, or pip install uv")
    return found or ""


def pip(python: str, wheels: pathlib.Path) -> list[str]:
    """Return pip's command for another environment and a folder of wheels; from its own wheel if the folder holds one.

    Raises:
        EraError: there is no pip.
    """
    wheel = sorted(wheels.glob("pip-*.whl"))
    if wheel:
        start = [python, f"{wheel[-1]}/pip", "--isolated"]
    elif works([sys.executable, "-m", "pip", "--version"]):
        start = [sys.executable, "-m", "pip", "--isolated", "--python", python]
    else:
        raise EraError(
            f"{sys.executable} has no pip, no uv is found, and {wheels} holds no wheel of pip: nothing here can "
            "install. Next: put a wheel of pip into that folder"
        )
    options = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--no-warn-script-location"]
    return [*start, "install", *options, "--no-index", "--find-links", str(wheels), "--no-deps"]


def _cache() -> pathlib.Path:
    return root() / ".eras" / ".wheels-cache"


def forget_cache() -> None:
    """Delete uv's own cache of unpacked wheels. The eras of one set-up share their files through it, and keep them."""
    with contextlib.suppress(EraError):
        shutil.rmtree(_cache(), ignore_errors=True)


def works(command: list[str]) -> bool:
    """Whether a command starts, and ends well."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


NO_NETWORK = re.compile(
    r"failed to fetch|dns error|error sending request|could not connect|network is unreachable|"
    r"timed out|temporary failure in name resolution|connection refused|max retries|"
    r"newconnectionerror|network connectivity is disabled",
    re.IGNORECASE,
)
NO_SPACE = re.compile(r"no space left|os error 28|disk quota", re.IGNORECASE)
_NOT_RESOLVED = re.compile(
    r"no solution found|no matching distribution|could not find a version|was not found", re.IGNORECASE
)


def step(command: list[str], what: str, era: str, *, offline: bool = False) -> None:
    """Run one step of a set-up of an era; turn its failure into one line.

    Raises:
        EraError: it failed.
    """
    env = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    env["DS_BUILD_OPS"] = "0"
    if offline:
        env["UV_CACHE_DIR"] = str(_cache())
        for name in ("UV_FIND_LINKS", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX"):
            env.pop(name, None)
    elif find_links():
        env["UV_FIND_LINKS"] = find_links()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    except OSError as error:
        raise EraError(f"{what} could not be made: {error}") from error
    if done.returncode:
        raise EraError(explain(done.stderr + done.stdout, what, era))


def explain(output: str, what: str, name: str) -> str:
    """Return one line for the failure of an installer: what was found, and the next step."""
    again = "Next: run the same command again; what is done already is kept."
    if NO_SPACE.search(output):
        return f"era {name}: no space is left on the disk while installing {what}. Free some. {again}"
    if NO_NETWORK.search(output):
        return (
            f"era {name}: {what} could not be fetched, the package index was not reached. Set-up needs the network "
            f"once. Check it, or the proxy. {again}"
        )
    if _NOT_RESOLVED.search(output):
        said = next((line.strip(" ×╰─▶│") for line in output.splitlines() if _NOT_RESOLVED.search(line)), "")
        return (
            f"era {name}: {what} does not resolve ({said}). Next: git checkout eras/{name}.txt, or after a "
            f"change to eras/{name}.in: make lock"
        )
    return f"era {name}: {what} could not be installed: {last_line(output)}"


def last_line(text: str) -> str:
    """Return the last line of an output that tells of an error, or else the last."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"(error|\w*Error|×)\b", line)] or lines
    return told[-1][:300] if told else "no message"
