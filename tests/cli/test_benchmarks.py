"""The benchmarks' own judgement: what a signature means."""

import ast
import datetime
import importlib
import sys

import pytest
from packaging.version import Version
from tests.cli.benchmark_scripts import FOLDER, load

from failurelab_course import eras
from failurelab_course.experiments import devices

pytestmark = pytest.mark.slow

SOURCE = """
class Qwen2Model:
    def forward(self, input_ids): ...

class Qwen2ForCausalLM:
    {decorator}
    def forward(self, input_ids=None, {name}=0{rest}): ...
"""
RENAMES = '@deprecate_kwarg("num_logits_to_keep", version="4.50", new_name="logits_to_keep")'


@pytest.mark.parametrize(
    "version, name, rest, decorator, other",
    [
        ("4.45.2", "num_logits_to_keep", "", "", "TypeError"),
        ("4.48.3", "num_logits_to_keep", ", **kwargs", "", "swallowed"),
        ("4.49.0", "logits_to_keep", ", **kwargs", RENAMES, "renamed, FutureWarning"),
        ("4.50.0", "logits_to_keep", ", **kwargs", RENAMES, "renamed, no warning"),
        ("4.52.4", "logits_to_keep", ", **kwargs", "@can_return_tuple", "swallowed"),
        ("4.100.0", "logits_to_keep", ", **kwargs", RENAMES, "renamed, no warning"),
    ],
)
def test_a_signature_is_read_as_python_would_act_on_it(version, name, rest, decorator, other):
    """Five kinds of release, and a version that string comparison would put in the wrong place."""
    signatures = load("signatures")
    forward = signatures.forward_of(SOURCE.format(name=name, rest=rest, decorator=decorator))
    assert isinstance(forward, ast.FunctionDef)
    assert signatures.judge(version, forward) == (name, other)


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


VERL = {"BROKEN": [0] * 9, "differs": [0] * 9, "another objective": [0] * 9, "agrees": [3] * 9, "NOT RUN": [0] * 9}
VERL |= {"BROKEN: lines": [], "differs: lines": [], "another objective: lines": [], "reason": "", "version": ""}
CAPPED = {"differs": [0, 0, 1, *[0] * 6], "differs: lines": ["kl/far: KL capped at 10: cosine 0.7516, size 0.4839"]}
CAPPED |= {"agrees": [3, 3, 2, *[3] * 6]}
OTHER_FIGURES = {"differs: lines": ["kl/far: KL capped at 10: cosine 0.7517, size 0.4840"]}
FEWER = {"agrees": [3] * 8 + [2]}
GONE = {"reason": "cannot be imported: no agg_loss"}


@pytest.mark.parametrize(
    ("before", "now", "status", "said"),
    [
        ({}, {}, 0, "Nothing is otherwise"),
        ({}, CAPPED, 1, "kl/far: agreed, or was not asked; now differs, KL capped at 10"),
        (CAPPED, {}, 0, "kl/far: differs, KL capped at 10; now it agrees"),
        (CAPPED, CAPPED | OTHER_FIGURES, 0, "Nothing is otherwise"),
        ({}, FEWER, 0, "wiring: 3 cases ran, now 2"),
        ({}, GONE, 1, "NOT RUN: cannot be imported: no agg_loss"),
    ],
)
def test_drift_tells_what_a_new_release_does_otherwise(before, now, status, said, tmp_path, monkeypatch, capsys):
    """The newest release of the index beside the last of the evidence; an older one is not asked for. No network."""
    losses, recording = load("known_gradients"), load("recording")
    stacks = importlib.import_module("stacks")
    record = {"case": "library: verl 0.9.1", "era": "today", "failure": "ground", "figures": VERL | before}
    record |= {"state": "measured", "device": "cpu", "tier": "cpu", "processor": "", "versions": {}}
    recording.write_file(tmp_path / "known_gradients.json", [record], [])
    releases = [stacks.Release(Version(name), datetime.date(2026, 11, 1)) for name in ("0.9.1", "0.9.2", "0.10.0")]
    monkeypatch.setattr(stacks, "read_index", lambda package: releases)
    asked = []
    monkeypatch.setattr(losses, "fetch", lambda package, release, folder: asked.append(release))
    monkeypatch.setattr(losses, "measure", lambda adapter, folder: VERL | now)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert losses.tell_drift(tmp_path, ["verl"], tmp_path) == status
    printed = capsys.readouterr().out
    assert said in printed and "verl 0.10.0, beside 0.9.1" in printed and asked == ["0.10.0"]
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") in printed
    monkeypatch.setattr(stacks, "read_index", lambda package: releases[:1])
    assert losses.tell_drift(tmp_path, ["verl"], tmp_path) == 0 and "no release is new" in capsys.readouterr().out
