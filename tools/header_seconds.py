"""Run each notebook alone, and write how long it took into its first cell: python -m tools.header_seconds [NAME...]

A reader plans by that number, so ask on a machine that has nothing else to do: the load before each run is printed.
"""

import os
import re
import sys

from tools.store_outputs import normalise

from failurelab_course import state_file
from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import runs, stored

SECONDS = re.compile(r"(?<=, runs in )\d+(?= seconds on )")
STEP = 5  # the number is rounded up to so many seconds


def rewrite(opening: str, seconds: float) -> str:
    """Return a notebook's first cell with the seconds that a run took, rounded up.

    Raises:
        ValueError: the cell does not say how long the notebook runs, or says it more than once.
    """
    if len(SECONDS.findall(opening)) != 1:
        raise ValueError("the first cell does not say once `, runs in N seconds on `")
    return SECONDS.sub(str(-int(-seconds // STEP) * STEP), opening)


def main(names: list[str]) -> int:
    """Measure the named notebooks, all without a name; return 1 if one did not pass, and is left as it was."""
    failed = 0
    for notebook in course.find(names):
        print(f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
        (result,) = runs.run([notebook.name], jobs=1)
        if result.status != "PASS":
            failed = 1
            continue
        content = stored.read(notebook.path)
        content.cells[0].source = rewrite(content.cells[0].source, result.seconds)
        state_file.write(notebook.path, stored.write_text(normalise(content)))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
