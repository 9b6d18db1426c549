"""`%lab` in a notebook's cell: the command `failurelab lab`, run by the course's own Python.

A learner may also open a notebook in a lab's library stack, to try things, and check there. Such a stack holds trl of
its time, and not what the command line is made of: so nothing of it is imported here.
"""

import shlex
import subprocess
import warnings

from failurelab_course import eras

# Colours as in a terminal, and no line that is redrawn.
_LOOK = {"COLUMNS": "100", "FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "PYTHONUNBUFFERED": "1"}


def lab_magic(line: str) -> None:
    """Run `failurelab lab` in a cell: `%lab check 03`.

    Raises:
        eras.EraError: the course's own environment has not been made.
    """
    words = shlex.split(line)
    course = eras.find(eras.TODAY)
    process = subprocess.Popen(
        [str(course.python), "-m", "failurelab", "lab", *words],
        env=eras.environment(course) | _LOOK,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            for text in process.stdout:
                print(text, end="", flush=True)
        except BaseException:  # an interrupt: the check must not go on alone
            process.terminate()
            raise


def load_ipython_extension(shell) -> None:
    """Register `%lab`; other libraries' warnings stay, for they are what one studies."""
    # An era has no widgets, and tqdm says so in three red lines at the first import of trl.
    warnings.filterwarnings("ignore", message="IProgress not found")
    shell.register_magic_function(lab_magic, "line", "lab")
