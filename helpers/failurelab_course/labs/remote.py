"""`%lab` in an era's own kernel: the same command, run by the course's Python.

A learner opens a notebook in the lab's library stack, to try things, and checks there. That stack holds trl of its
time, and not what the course's command line is made of: without this, `%load_ext failurelab_course` would end in
`No module named 'typer'`.
"""

import shlex
import subprocess
import warnings

from failurelab_course import eras


def lab_magic(line: str) -> None:
    """Run `failurelab lab` in a cell of an era's kernel: `%lab check 03`.

    Raises:
        eras.EraError: the course's own environment has not been made.
    """
    words = shlex.split(line)
    if words[:1] == ["watch"]:
        print("A watch would hold this notebook. Next: save train.py and run %lab check, or watch in a terminal")
        return
    course = eras.find(eras.TODAY)
    process = subprocess.Popen(
        [str(course.python), "-m", "failurelab", "lab", *words],
        env=eras.environment(course) | {"COLUMNS": "100", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for text in process.stdout:
            print(text, end="", flush=True)
        process.wait()  # the verdict was printed; a cell has no exit status
    except BaseException:  # an interrupt: the check must not go on alone
        process.terminate()
        process.wait()
        raise
    finally:
        process.stdout.close()


def load_ipython_extension(shell) -> None:
    """Register `%lab`; other libraries' warnings stay, for they are what one studies."""
    # An era has no widgets, and tqdm says so in three red lines at the first import of trl.
    warnings.filterwarnings("ignore", message="IProgress not found")
    shell.register_magic_function(lab_magic, "line", "lab")
