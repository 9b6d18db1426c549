"""Helpers and guards work unchanged in every era: their unit tests run again in each, two eras at once.

An era whose lock differs from another's in one library runs the files that name this library; all others would ask the
same packages the same again. Of an era between two that run the whole folder only `SUBJECTS` are run.
"""

import concurrent.futures
import os
import re

import pytest

from failurelab_course import eras

pytestmark = pytest.mark.slow

OLD = [era.name for era in eras.known() if era.name != eras.TODAY]
UNIT = eras.root() / "tests" / "unit"
# What trl 0.22 decides by itself: what trains, what is generated, and what guards say of it.
SUBJECTS = {
    "trl-0.22": "adapters alignment gradients guards logits_guard logits_repair rollouts trainers",
}


def pins(name):
    """Return what an era's lock pins."""
    lines = (eras.root() / "eras" / f"{name}.txt").read_text().splitlines()
    return {line.split(";")[0].strip() for line in lines if "==" in line and not line.startswith(("#", " "))}


def other_libraries(name, than):
    """Return the names of what two eras pin differently."""
    return {pin.partition("==")[0] for pin in pins(name) ^ pins(than)}


def chosen(name):
    """Return the files that an era runs: its subjects, those that name the one library that differs, or the folder."""
    if name in SUBJECTS:
        return [str(UNIT / f"test_{subject}.py") for subject in SUBJECTS[name].split()]
    for before in OLD[: OLD.index(name)]:
        if len(other := other_libraries(name, before)) == 1:
            (library,) = other
            files = sorted(UNIT.glob("test_*.py"))
            return [str(path) for path in files if re.search(rf"\b{re.escape(library)}\b", path.read_text())]
    return [str(UNIT)]


@pytest.fixture(scope="module")
def runs():
    """The unit tests of each era, in a process of its own; one thread each, for the models are tiny."""

    def unit_tests(name):
        return eras.run(
            eras.find(name),
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *chosen(name)],
            cwd=eras.root(),
            env={"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        return dict(zip(OLD, pool.map(unit_tests, OLD)))


@pytest.mark.parametrize("name", OLD)
def test_unit_tests_pass_in_the_era(runs, name):
    """Nothing failed, and something ran: an era in which nothing was collected proves nothing."""
    done = runs[name]
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
    assert done.returncode == 0, tail
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 100, tail


def test_what_is_left_out_names_nothing_that_differs():
    """trl-0.15 differs from trl-0.14 in trl alone: it runs the trainers' tests, and not those of a model's layers."""
    assert other_libraries("trl-0.15", "trl-0.14") == {"trl"}
    assert {"transformers", "bitsandbytes"} <= other_libraries("trl-0.14-tf-4.52", "trl-0.14")
    assert [name for name in OLD if chosen(name) == [str(UNIT)]] == ["trl-0.14", "trl-0.14-tf-4.52"]
    names = {path.rpartition("/")[2] for path in chosen("trl-0.15")}
    assert names >= {"test_trainers.py", "test_guards.py", "test_zero3.py", "test_adapters.py"}
    assert "test_models.py" not in names
