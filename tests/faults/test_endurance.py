"""The endurance run, small: nothing grows in a few dozen; `make endurance` does thousands."""

import os
import subprocess
import sys

import pytest
from tests.cli.benchmark_scripts import load
from tests.faults.conftest import ROOT


def test_a_small_endurance_run():
    words = ["--checks", "24", "--kernels", "4", "--cells", "24", "--minutes", "9"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "endurance.py"), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no growth") == 3


@pytest.mark.parametrize(
    ("more", "grown"),
    [
        ({}, []),
        ({"processes_after": 20}, ["processes"]),
        ({"files_after": 200}, ["files"]),
        ({"mib_after": 200.0}, ["mib"]),
        ({"temporary_left": 9}, ["temporary left"]),
    ],
)
def test_growth_is_told(more, grown):
    held = {"processes": 4, "files": 40, "mib": 100.0, "temporary": 5}
    figures = {f"{name}_{when}": value for name, value in held.items() for when in ("before", "after")}
    figures |= {"processes_left": 0, "files_left": 0, "temporary_left": 0}
    assert load("endurance").grew(figures | more) == grown
