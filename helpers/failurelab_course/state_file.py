"""A small file, as a learner's under `.course/`: changed by one process at a time, and written whole or not at all."""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Hold the file for this process, so that two at once do not lose each other's changes; make its folder.

    Raises:
        OSError: the folder cannot be made, or the lock beside the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read(path: pathlib.Path, broken: Callable[[str], Exception]) -> Any:
    """Return what the file holds, as JSON; None where there is no file yet.

    Raises:
        Exception: what `broken` made of the reason why the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise broken(f"it cannot be read ({type(error).__name__})") from error
    if content is None:
        raise broken("it holds nothing")
    return content


def write(path: pathlib.Path, text: str) -> None:
    """Write the whole file or none of it; where what was there is read first, call it while it is `locked`.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    # another process, or thread, may write the same file
    partial = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a machine that loses its power may keep the name and lose the text
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def full_disk(folder: pathlib.Path) -> str:
    """Return that the disk of a folder is full, for who finds no other reason; empty where it is not."""
    return f"no space is left on the disk of {folder}" if shutil.disk_usage(folder).free < 2**16 else ""
