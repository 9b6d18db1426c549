"""Files that a command is asked to write.

What cannot be written is told before the work begins, as a wrong call. An error after it loses an answer that took
minutes, and a traceback ends with status 1, which means that something was found.
"""

import os
import pathlib

from failurelab.errors import FailureLabError


class OutputError(FailureLabError):
    """A file that was asked for cannot be written; the message says why and the next step."""

    exit_status = 2


def check_output(path: pathlib.Path | None, option: str, new: bool = False) -> None:
    """Check that a file can be written, or that none is asked for; nothing of it is left.

    Args:
        path: of the file.
        option: of the command line that names it, for the next step.
        new: whether a file that is there already must stay.

    Raises:
        OutputError: it cannot be written.
    """
    if path is None:
        return
    next_step = f"Next: {option} with the name of a {'new ' * new}file in a folder that you may write"
    if path.is_dir():
        raise OutputError(f"{path} is a folder. {next_step}")
    if path.exists():
        if new:
            raise OutputError(f"{path} is there already. {next_step}")
        if not os.access(path, os.W_OK):
            raise OutputError(f"{path} may not be written. {next_step}")
        return
    try:
        path.open("xb").close()
        path.unlink()
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror or error}). {next_step}") from None


def make_folder(path: pathlib.Path, option: str) -> None:
    """Make the folder that a command writes into, where it is not there yet.

    Raises:
        OutputError: it cannot be made; `option` names it on the command line.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{path} is no folder ({why}). Next: {option} in a folder that you may write") from None


def write_output(path: pathlib.Path | None, contents: str | bytes) -> None:
    """Write a file, if one is asked for.

    Raises:
        OutputError: it cannot be written now: the disk is full, or its folder is gone. The status is then 3.
    """
    if path is None:
        return
    try:
        path.write_bytes(contents.encode("utf-8") if isinstance(contents, str) else contents)
    except OSError as error:
        failed = OutputError(f"{path} was not written ({error.strerror or error}). What was found stands above")
        failed.exit_status = 3
        raise failed from None
