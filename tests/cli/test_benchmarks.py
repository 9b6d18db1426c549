"""Benchmarks say on which stacks they run, and never take another device than they were asked for."""

import sys

import pytest
from tests.cli.benchmark_scripts import FOLDER, load

from failurelab_course import eras
from failurelab_course.experiments import devices

pytestmark = pytest.mark.slow

NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "recording.begin(" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_its_eras_and_takes_a_device_and_never_another(name, monkeypatch, capsys):
    """Asked for a GPU that is not there it ends with one line and status 3, before it computes."""
    script, recording = load(name), load("recording")
    assert set(recording.list_field("Eras", script.__doc__)) <= {era.name for era in eras.known()}
    assert recording.list_field("Eras", script.__doc__)
    assert set(recording.list_field("Needs", script.__doc__)) <= {"zero3", "bitsandbytes"}
    monkeypatch.setattr(devices, "gpu_problem", lambda: "there is none. Next: look for one")
    for words, status, line in (
        (["--device", "cuda"], 3, f"{name}.py: device cuda is asked for, and there is none. Next: look for one"),
        (["--device", "tpu"], 2, "unknown device 'tpu'"),
        (["--help"], 0, ""),
    ):
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words])
        with pytest.raises(SystemExit) as ended:
            script.main()
        said = capsys.readouterr()
        assert ended.value.code == status and line in said.err and bool(said.out) == (status == 0)
