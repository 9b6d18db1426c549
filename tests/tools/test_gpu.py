"""`make gpu`: what cannot be used is one line, a part resumes, and its page stands beside the CPU's figures."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tools import gpu, predictions

from failurelab_course import eras
from failurelab_course.experiments import devices

PYTHON = sys.executable


def test_no_card_is_one_line_and_status_3(monkeypatch, capsys, tmp_path):
    """Each cause is one of `devices`; a card that works may be too small. Nothing is written."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu.main(["--part", "1"]) == 3
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "gpu_problem", str)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 4 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.main(["--part", "1"]) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert "build for CPUs. Next: install a CUDA build" in first and list(tmp_path.iterdir()) == []
    assert "has 4.0 GiB, 3.0 of them free, and make gpu needs 8.0. Next: a larger card" in second


@pytest.mark.slow
def test_a_part_ends_in_time_and_resumes(tmp_path, monkeypatch, pipe):
    """A step that does not fit is left, with all that it started ended; one that has ended is not run again.

    The time is over when the step that never ends has begun, and not before.
    """
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    begun = pipe(tmp_path / "begun")
    kept = os.open(tmp_path / "begun", os.O_WRONLY)  # or the end of the first writer would be read again

    class Process(subprocess.Popen):
        def communicate(self, timeout=None):
            if "signal.pause" in self.args[-1]:
                begun()
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().communicate()

    monkeypatch.setattr(gpu.subprocess, "Popen", Process)
    steps = [
        ("-c", "open('runs', 'a').write('1'); print('fine')"),
        ("-c", "import signal; open('runs', 'a').write('2'); open('begun', 'w').write('2'); signal.pause()"),
        ("-c", "import sys; print('no two cards'); sys.exit(4)"),
        ("-c", "import nothing_of_that_name"),
        ("-c", "1 / 0"),
    ]
    file = tmp_path / "steps.json"
    assert not gpu.run_part(1, steps, tmp_path, PYTHON)
    assert [step["outcome"] for step in json.loads(file.read_text()).values()] == ["PASS"]
    assert not gpu.run_part(1, steps, tmp_path, PYTHON, limit=0)  # too long for a whole part: said, and not begun again
    assert gpu.run_part(1, steps, tmp_path, PYTHON)
    done = list(json.loads(file.read_text()).values())
    assert [step["outcome"] for step in done] == ["PASS", "NOT RUN", "NOT RUN", "NOT RUN", "FAIL"]
    assert [done[1]["said"], done[2]["said"]] == ["longer than 0 s", "no two cards"]
    assert (tmp_path / "runs").read_text() == "122"
    os.close(kept)


@pytest.mark.parametrize(
    ("band", "here", "outcome"),
    [
        ({"within": 0.1}, [1.05, 1.95], "held"),
        ({"within": 0.1}, [1.2, 1.95], "refuted"),
        ({"within": 0.1}, [float("nan"), 1.95], "refuted"),
        ({"within": 0.1}, [], "NOT RUN"),
        ({"within_share": 0.05}, [1.04, 1.95], "held"),
        ({"at_least": 1.5}, [1.2, 1.95], "refuted"),
        ({"at_most": 2}, [1.2, 1.95], "held"),
    ],
)
def test_a_prediction_is_held_or_refuted_by_the_cards_figures(tmp_path, band, here, outcome):
    for name, values in (("cpu", [1.0, 2.0]), ("card", here)):
        records = [{"era": "today", "case": f"a: {n}", "figures": {"size": value}} for n, value in enumerate(values)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "bench.json").write_text(json.dumps({"records": records}))
    prediction = {"benchmark": "bench", "case": "a:", "figure": "size", **band}
    assert predictions.judge(prediction, tmp_path / "card", tmp_path / "cpu")[0] == outcome


def test_every_prediction_is_about_figures_that_the_cpu_measured():
    lines = predictions.describe(eras.root() / "evidence" / "cpu")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert len(rows) > 5 and {outcome for _, _, outcome, _ in rows} == {"held"}
