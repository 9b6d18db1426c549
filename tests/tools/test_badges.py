"""Badges and the address of the course: from CITATION.cff, and nowhere a link that leads nowhere."""

import os
import pathlib
import shutil
import subprocess
import sys

import nbformat
import pytest
from tools import badges

from failurelab_course import eras

ADDRESS = "https://github.com/someone/grpo-failure-lab"
SCRIPT = eras.root() / "tools" / "fetch_course.py"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The files that the address is written into, as they are here, without one."""
    for name in ("README.md", "docs/hosted.md", "docs/zh/README.md", "CITATION.cff",
                 "notebooks/00_start_here.ipynb", "notebooks/09_rounded_away.ipynb"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(eras.root() / name, tmp_path / name)
    monkeypatch.setattr(badges, "ROOT", tmp_path)
    address(tmp_path, "")
    badges.main([])
    return tmp_path


def address(root, value):
    """Set the repository's address in CITATION.cff, or take it away."""
    lines = [line for line in (root / "CITATION.cff").read_text().splitlines() if "repository-code" not in line]
    lines += [f"repository-code: {value}"] if value else []
    (root / "CITATION.cff").write_text("\n".join(lines) + "\n")


def texts(root):
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def cells(root, name):
    return nbformat.read(root / "notebooks" / f"{name}.ipynb", 4).cells


def test_the_course_s_own_pages_have_the_address_of_the_citation():
    assert badges.main(["--check"]) == 0


def test_an_address_is_written_everywhere_and_taken_back(root):
    before = texts(root)
    assert not any("colab-badge" in text or "COLAB_RELEASE_TAG" in text for text in before.values())
    address(root, f"'{ADDRESS}.git'")
    assert badges.main(["--check"]) == 1
    assert badges.main([]) == 0 and badges.main(["--check"]) == 0
    after = texts(root)
    assert not any("ADDRESS-OF-THIS-REPOSITORY" in text for text in after.values())
    assert f"git clone {ADDRESS} grpo-failure-lab" in after["README.md"]
    assert after["README.md"].count("main/notebooks/00_start_here.ipynb)") == 2
    head, fetch, parameters = nbformat.read(root / "notebooks" / "09_rounded_away.ipynb", 4).cells[:3]
    assert fetch.id == "fetch" and f'course = "{ADDRESS}"' in fetch.source and parameters.source.startswith("device")
    assert f'course = "{ADDRESS}"' in after["docs/hosted.md"]
    place = "colab.research.google.com/github/someone/grpo-failure-lab/blob/main/notebooks/09_rounded_away.ipynb)"
    assert place in head.source
    address(root, "")
    assert badges.main([]) == 0
    assert {**texts(root), "CITATION.cff": ""} == {**before, "CITATION.cff": ""}


@pytest.mark.parametrize("value", ["http://example.org/a/b", "git@github.com:a/b.git"])
def test_an_address_that_no_badge_can_open_changes_nothing(root, value):
    before = texts(root)
    address(root, value)
    assert badges.main([]) == 1
    assert {**texts(root), "CITATION.cff": ""} == {**before, "CITATION.cff": ""}


def publish(folder, archive):
    """Lay out what the cell asks for, as a repository's host has it; return the repository's address."""
    for name, file in (("archive/main.tar.gz", archive), ("raw/main/tools/fetch_course.py", SCRIPT)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if file:
            shutil.copy(file, folder / name)
    return folder.as_uri()


def open_alone(folder, source):
    """Run a cell in an empty folder, in a Python that knows nothing of the course; return its output and its line."""
    folder.mkdir(exist_ok=True)
    code = f"""
try:
    exec({source!r})
    from failurelab_course import notebook
except Exception as error:
    print(*getattr(error, "_render_traceback_", lambda: [repr(error)])())
"""
    foreign = ("PYTHON", "COLAB", "KAGGLE")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(
        [sys._base_executable, "-I", "-S", "-c", code], cwd=folder, capture_output=True, text=True, env=variables
    )
    assert not done.stderr
    return done.stdout.splitlines()


def test_the_cell_says_in_a_line_why_the_course_did_not_come(tmp_path):
    """No archive, one that was cut off in the middle, and one that holds no course."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "noise").write_bytes(bytes(range(256)) * 400)
    other = pathlib.Path(shutil.make_archive(str(tmp_path / "other"), "gztar", tmp_path, "folder"))
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(other.read_bytes()[:200])
    addresses = [publish(tmp_path / f"host{number}", file) for number, file in enumerate((None, cut, other))]
    for number, address in enumerate(addresses):
        (line,) = open_alone(tmp_path / f"alone{number}", badges.FETCH.replace("ADDRESS", address))
        assert f"{address} did not bring the course" in line and "run this again" in line


def test_the_cell_brings_the_course_and_prepares_it(tmp_path):
    """From an archive as a repository's host packs it."""
    package = tmp_path / "lab-main" / "helpers" / "failurelab_course"
    (package / "eras").mkdir(parents=True)
    (tmp_path / "lab-main" / "eras").mkdir()
    for name, text in (("__init__", ""), ("notebook", "print('opened')"), ("eras/__init__", ""),
                       ("eras/hosted", "def prepare(): print('prepared')")):  # fmt: skip
        (package / f"{name}.py").write_text(text)
    address = publish(tmp_path / "host", shutil.make_archive(str(tmp_path / "lab"), "gztar", tmp_path, "lab-main"))
    cell = badges.FETCH.replace("ADDRESS", address)
    for _ in range(2):  # again after one that was cut off, over what is there
        assert open_alone(tmp_path / "alone", cell) == ["prepared", "opened"]


def test_only_a_hosted_runtime_fetches_unasked(tmp_path):
    source = badges.make_fetch((tmp_path / "there").as_uri())
    (line,) = open_alone(tmp_path / "clone", source)
    assert "ModuleNotFoundError" in line
    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        (line,) = open_alone(tmp_path / name, f"import os\nos.environ[{name!r}] = 'x'\n{source}")
        assert "there did not bring the course" in line
