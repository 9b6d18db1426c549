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


def test_stacks_from_folders_come_before_this_python_s_libraries(tmp_path, monkeypatch):
    """Without a network: what a stack does not hold is today's, then this Python's; `.pth` files in there count."""
    (tmp_path / "sites/today").mkdir(parents=True)
    (tmp_path / "sites/trl-0.22").mkdir()
    (tmp_path / "sites/today/other.py").write_text("name = 'today'")
    (tmp_path / "sites/today/trl.py").write_text("__version__ = '1'")
    (tmp_path / "sites/trl-0.22/trl.py").write_text("__version__ = '0'")
    (tmp_path / "sites/trl-0.22/deep.pth").write_text(f"{tmp_path}\n")
    (tmp_path / "below.py").write_text("")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setenv("FAILURELAB_ROOT", str(tmp_path))
    (tmp_path / "helpers/failurelab").mkdir(parents=True)
    (tmp_path / "eras").mkdir()
    for name in ("torch.txt", "today.in", "today.txt", "trl-0.22.in", "trl-0.22.txt"):
        (tmp_path / "eras" / name).write_text("")
    today = gpu.own_python(tmp_path / "sites")
    era = eras.find("trl-0.22")  # ready, or it would raise
    ask = "import other, trl, rich; print(other.name, trl.__version__, end='')"
    for python, said in ((today, "today 1"), (era.python, "today 0")):
        assert subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout == said
    assert subprocess.run([era.python, "-c", "import below"]).returncode == 0
    launcher = era.folder / "bin" / "torchrun"  # which notebooks call: of this environment
    assert launcher.read_text().startswith(f"#!{era.python}\n") and os.access(launcher, os.X_OK)
    (tmp_path / ".venv").mkdir()
    assert gpu.main(["--sites", str(tmp_path / "sites")]) == 3


def test_figures_stand_beside_the_cpu_s(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    for name, value in (("cpu", 1.5), ("h100", 0.25)):
        (tmp_path / "evidence" / name).mkdir(parents=True)
        record = {"era": "today", "case": "a step", "figures": {"seconds": value, "rows": 4, "shape": [2]}}
        (tmp_path / "evidence" / name / "learning.json").write_text(json.dumps({"records": [record]}))
    steps = '{"x": {"part": 2, "outcome": "NOT RUN", "seconds": 2, "said": "a|b"}}'
    (tmp_path / "evidence/h100/steps.json").write_text(steps)
    lines = gpu.page(tmp_path / "evidence" / "h100").splitlines()
    assert (
        "| learning | today | a step | seconds | 1.5 | 0.25 |" in lines and "| 2 | `x` | NOT RUN | 2 | a/b |" in lines
    )
    assert not any("| rows |" in line for line in lines) and any(
        line.startswith("1 figures are the CPU's") for line in lines
    )


def test_every_notebook_lab_and_benchmark_is_in_a_part(tmp_path):
    words = [" ".join(step) for part in gpu.parts(tmp_path / "h100") for step in part]
    assert len(words) == len(set(words))
    for room, form in (("notebooks", "run {} "), ("labs", " {} ")):
        for path in (gpu.ROOT / room).glob("[0-9][0-9]_*"):
            assert any(form.format(path.name[:2]) in line for line in words)
    for path in (gpu.ROOT / "benchmarks").glob("*.py"):
        if "recording.begin(" in path.read_text():
            assert any(line.startswith(f"benchmarks/{path.name} ") for line in words)


def evidence(folder, name, **figures):
    """Write an evidence file with a record for each figure's value, as cases `a: 0`, `a: 1`."""
    folder.mkdir(exist_ok=True)
    ((figure, values),) = figures.items()
    records = [{"era": "today", "case": f"a: {n}", "figures": {figure: value}} for n, value in enumerate(values)]
    (folder / f"{name}.json").write_text(json.dumps({"records": records}))


@pytest.mark.parametrize(
    ("band", "here", "outcome", "figures"),
    [
        ({"within": 0.1}, [1.05, 1.95], "held", "2 of 2"),
        ({"within": 0.1}, [1.2, 1.95], "refuted", "1 of 2 outside; today, a: 0: 1 on the CPU, 1.2 here"),
        ({"within": 0.1}, [], "NOT RUN", "`benchmarks/bench.py --device cuda --out evidence/card`"),
        ({"within": 0.1}, [float("nan"), 1.95], "refuted", "1 of 2 outside; today, a: 0: 1 on the CPU, nan here"),
        ({"within_share": 0.05}, [1.04, 1.95], "held", "2 of 2"),
        ({"at_least": 1.5}, [1.2, 1.95], "refuted", "1 of 2 outside; today, a: 0: 1.2"),
        ({"at_most": 2}, [1.2, 1.95], "held", "2 of 2"),
    ],
)
def test_a_prediction_is_held_or_refuted_by_the_cards_figures(tmp_path, band, here, outcome, figures):
    evidence(tmp_path / "cpu", "bench", size=[1.0, 2.0])
    evidence(tmp_path / "card", "bench", size=here)
    prediction = {"benchmark": "bench", "case": "a:", "figure": "size", **band}
    assert predictions.judge(prediction, tmp_path / "card", tmp_path / "cpu") == (outcome, figures)


def test_every_prediction_is_about_figures_that_the_cpu_measured():
    lines = predictions.describe(eras.root() / "evidence" / "cpu")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert len(rows) > 5 and {outcome for _, _, outcome, _ in rows} == {"held"}
