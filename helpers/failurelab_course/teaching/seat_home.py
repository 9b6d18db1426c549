"""What a learner finds at a seat of a class: a copy of the course to work on, and a word where memory runs out.

The environments are shared, and read-only for learners. So nothing that a learner's work writes may lie beside them:
notebooks, labs, states and runs go into a copy in the home folder, which FAILURELAB_ROOT names. Only the standard
library is needed, for JupyterHub's own Python makes the copy (configs/hub/jupyterhub_config.py).
"""

import os
import pathlib
import shutil
import sys

from failurelab_course.teaching.seats import MIB, SeatError

FOLDER = "failurelab"  # the learner's copy, in the home folder
# What a learner works on is copied; all else of the course is linked, and stays the teacher's.
COPIED = ("notebooks", "labs")
LINKED_HIDDEN = (".venv", ".eras")
_NOT_LINKED = ("build", "dist", "tests", *COPIED)


def prepare(shared: pathlib.Path, home: pathlib.Path) -> pathlib.Path:
    """Give a learner the course, in the home folder: notebooks and labs as copies, the rest as links.

    It runs as the learner. What is there already is the learner's, and stays as it is; what is new is added. Returns
    the folder of the copy.

    Raises:
        SeatError: the home folder is missing, full or closed, or something else has the folder's name.
    """
    own = home / FOLDER
    again = "Next: have the home folder mended by whoever looks after this server, then start the seat again."
    try:
        if not home.is_dir():
            raise SeatError(f"the home folder {home} is missing, so there is no room for your notebooks. {again}")
        own.mkdir(exist_ok=True)
        for name in COPIED:
            _add(shared / name, own / name)
        for source in sorted(shared.iterdir()):
            there = own / source.name
            hidden = source.name.startswith(".") and source.name not in LINKED_HIDDEN
            if source.name not in _NOT_LINKED and not hidden and not there.exists():
                there.unlink(missing_ok=True)  # a link that leads nowhere: the course has moved
                there.symlink_to(source)
    except OSError as error:
        raise SeatError(
            f"your copy of the course, {own}, cannot be made: {error.strerror or error}. {again}"
        ) from error
    return own


def _add(source: pathlib.Path, there: pathlib.Path) -> None:
    """Copy the files that are not there yet; not the teacher's own repairs in labs."""
    there.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.name.startswith((".", "train.backup-")) or path.name in ("__pycache__", "train.py"):
            continue
        if path.is_dir():
            _add(path, there / path.name)
        elif not (there / path.name).exists():
            partial = there / f".{path.name}.{os.getpid()}"
            shutil.copyfile(path, partial)
            partial.replace(there / path.name)


def load_ipython_extension(shell) -> None:
    """Say, after a cell that ran out of memory, why: a seat has a limit, and Python's MemoryError is a bare word."""
    shell.events.register("post_run_cell", _explain)


def _explain(result) -> None:
    error = result.error_in_exec
    if error is None or not is_out_of_memory(error):
        return
    limit = os.environ.get("FAILURELAB_SEAT_LIMIT")
    told = f"a process of this seat may hold {int(limit) // MIB} MiB" if limit else "the server has no more memory"
    print(
        f"This cell ran out of memory: {told}. Other seats are not affected. Next: restart the kernel, which gives its "
        "memory back, close other notebooks, and take smaller sizes.",
        file=sys.stderr,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, of Python, of torch or from an era's kernel, says that memory could not be had."""
    text = f"{type(error).__name__}: {error}".lower()
    return isinstance(error, MemoryError) or any(
        words in text for words in ("memoryerror", "bad_alloc", "allocate memory", "not enough memory")
    )


def main(arguments: list[str] | None = None) -> int:
    """Make a learner's copy, as the learner: `python -m failurelab_course.teaching.seat_home SHARED HOME`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 2:
        print("usage: python -m failurelab_course.teaching.seat_home SHARED HOME", file=sys.stderr)
        return 2
    try:
        prepare(*map(pathlib.Path, arguments))
    except SeatError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
