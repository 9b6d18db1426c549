"""A notebook that was copied out of the course, opened where the package, or the repository, is missing."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from failurelab_course import eras

NOTEBOOKS = sorted((eras.root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))
# Runs cells until one fails, as Run All does, and prints what the last one showed.
OPEN = """
import importlib.abc, json, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
shell = InteractiveShell.instance()
ran = 0
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        with capture_output() as shown:
            result = shell.run_cell("".join(cell["source"]))
        ran += 1
        if not result.success:
            break
print(json.dumps({"ran": ran, "error": type(result.error_in_exec).__name__, "shown": shown.stdout + shown.stderr}))
"""


def open_alone(notebook, folder, missing=()):
    """Open a copy of the notebook in an empty folder, and run it; return what was shown."""
    copy = folder / notebook.name
    copy.write_bytes(notebook.read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(copy), *missing],
        cwd=folder,
        env=os.environ | {"FAILURELAB_ROOT": str(folder), "IPYTHONDIR": str(folder), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_without_the_package_the_first_cell_says_it_in_a_line(notebook, tmp_path):
    found = open_alone(notebook, tmp_path, missing=["failurelab"])
    lines = found["shown"].strip().splitlines()
    assert (found["ran"], found["error"], len(lines)) == (2, "ModuleNotFoundError", 1), found
    assert "No module named 'failurelab'" in lines[0] and "clone this course" in lines[0] and "make lab" in lines[0]


@pytest.mark.parametrize("notebook", NOTEBOOKS[:1], ids=lambda path: path.stem)
def test_without_the_repository_the_first_cell_says_it_in_a_line(notebook, tmp_path):
    """The package is installed; notebooks, eras and the small model are not there. torch is not even imported."""
    found = open_alone(notebook, tmp_path, missing=["torch"])
    lines = found["shown"].strip().splitlines()
    assert (found["ran"], found["error"], len(lines)) == (2, "EraError", 1), found
    assert "this is not the course's repository" in lines[0] and "cd into your clone" in lines[0]


def test_the_shown_path_is_the_readers(tmp_path):
    """The line names where the repository was looked for."""
    assert str(pathlib.Path(tmp_path)) in open_alone(NOTEBOOKS[0], tmp_path)["shown"]
