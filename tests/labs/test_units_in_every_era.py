"""Helpers and guards work unchanged in every era: their unit tests run again in each, two eras at once."""

import concurrent.futures
import os
import re

import pytest

from failurelab import eras

OLD = [era.name for era in eras.known() if era.name != eras.TODAY]


@pytest.fixture(scope="module")
def runs():
    """The unit tests of each era, in a process of its own; one thread each, for the models are tiny."""

    def unit_tests(name):
        return eras.run(
            eras.find(name),
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(eras.root() / "tests" / "unit")],
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
