"""A notebook that was copied out of the course, opened where the package, or the repository, is missing."""

import json
import os
import subprocess
import sys

from failurelab_course import eras

NOTEBOOKS = sorted((eras.root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))
# Of each notebook runs cells until one fails, as Run All does, and prints what the last one showed.
OPEN = """
import importlib.abc, json, sys
missing, *paths = sys.argv[1:]
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
for path in paths:
    shell, ran = InteractiveShell(), 0
    for cell in json.load(open(path))["cells"]:
        if cell["cell_type"] == "code":
            with capture_output() as shown:
                result = shell.run_cell("".join(cell["source"]))
            ran += 1
            if not result.success:
                break
    print(json.dumps([ran, type(result.error_in_exec).__name__, *(shown.stdout + shown.stderr).strip().splitlines()]))
"""


def open_alone(folder, missing, notebooks):
    """Open copies of notebooks in an empty folder; return of each the cells that ran, the error, the lines it shows."""
    copies = []
    for notebook in notebooks:
        copies.append(folder / notebook.name)
        copies[-1].write_bytes(notebook.read_bytes())
    variables = {"FAILURELAB_ROOT": str(folder), "IPYTHONDIR": str(folder), "NO_COLOR": "1"}
    command = [sys.executable, "-c", OPEN, missing, *map(str, copies)]
    options = {"cwd": folder, "env": os.environ | variables, "capture_output": True, "text": True, "check": True}
    return [json.loads(line) for line in subprocess.run(command, **options).stdout.splitlines()]


def test_without_the_package_the_first_cell_says_what_to_do(tmp_path):
    found = open_alone(tmp_path, "failurelab", NOTEBOOKS)
    assert len(found) == len(NOTEBOOKS) > 10
    for ran, error, *lines in found:
        assert (ran, error) == (2, "ModuleNotFoundError")
        shown = "\n".join(lines)
        assert "No module named 'failurelab'" in shown and "make lab" in shown and "docs/hosted.md" in shown


def test_without_the_repository_the_first_cell_says_it_in_a_line(tmp_path):
    """The package is installed; notebooks, eras and the small model are not there. torch is not even imported."""
    ((ran, error, line),) = open_alone(tmp_path, "torch", NOTEBOOKS[:1])
    assert (ran, error) == (2, "EraError")
    assert "this is not the course's repository" in line and "cd into your clone" in line and str(tmp_path) in line
