"""Why a script could not be judged: one clear line for each error of its own."""

import contextlib
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator

from failurelab_preflight.script_text import location, read_source
from failurelab_preflight.stage.processes import Stopped

_NETWORK = {
    "ConnectionError",
    "ConnectTimeout",
    "LocalEntryNotFoundError",
    "NewConnectionError",
    "OfflineModeIsEnabled",
}
_GATED = {"GatedRepoError", "RepositoryNotFoundError"}


def describe_error(error: BaseException, script: str | pathlib.Path, log: str = "", line: int = 0) -> str:
    """Return one line about an error that ended a script: where, what, and the next step where there is one.

    Args:
        error: as it came out of the script.
        script: its path.
        line: of the script that began training, for an error from there.
        log: the file that holds what the script printed to stderr, for a script that ended by itself.
    """
    where = _place(error, str(script), line)
    chain = list(causes(error))
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    text = " ".join(str(error).split())[:300]
    if isinstance(error, SystemExit):
        said = _last_line(log)
        because = f'; it said last: "{said}"' if said else ""
        if isinstance(error.code, str):
            return f"{where} ended by itself before training: {' '.join(error.code.split())[:300]}"
        if error.code == 2 and said:
            return f"{where} wants other arguments{because}. Next: give them after the script's name"
        return f"{where} ended by itself with status {error.code or 0} before training{because}"
    if isinstance(error, Stopped):
        return f"{where} {text}"
    if isinstance(error, EOFError):
        return f"{where} asks on its input, and nobody is there to answer. Next: give it as an argument or a file"
    top, _, inside = (getattr(error, "name", None) or "").partition(".")
    if isinstance(error, ModuleNotFoundError) and inside and top in sys.modules:
        return f"{where} imports {error.name}, which the {top} that is installed does not have"
    if isinstance(error, ModuleNotFoundError):
        return (
            f"{where} needs {error.name}, which {sys.executable} does not have. "
            "Next: --python with the Python that you train with"
        )
    if names & _GATED or any("gated repo" in str(link) for link in chain):
        why = "asks the hub for what it does not give to this user (gated, private or not there)"
        return f"{where} {why}: {text}. Next: huggingface-cli login, or the path of a local copy"
    if names & _NETWORK or "couldn't connect to" in text.lower() or "offline mode" in text.lower():
        what = "a local copy of the configuration, the tokenizer and the dataset, or a machine with a network"
        return f"{where} needs the network, which is not there: {text}. Next: {what}"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{where} reads {error.filename}, which is not there (from {os.getcwd()})"
    if "mark a variable ready only once" in text:  # in several processes, on any device
        return (
            f"{where} ended in DistributedDataParallel: reentrant gradient checkpointing runs a layer again. Next: "
            "ddp_find_unused_parameters=False, or gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    return f"{where} ended in {type(error).__name__}: {text}" if text else f"{where} ended in {type(error).__name__}"


def _place(error: BaseException, script: str, line: int) -> str:
    own = (frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script)
    *_, line = (line, *own)
    if line and script.endswith(".ipynb"):
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            return f"{location(script, line, read_source(script))},"
    return f"{pathlib.Path(script).name}, line {line}," if line else pathlib.Path(script).name


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came of."""
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _last_line(log: str) -> str:
    sys.stderr.flush()
    try:
        lines = [line.strip() for line in pathlib.Path(log).read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""
