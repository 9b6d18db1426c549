"""The benchmarks' own judgement: what a signature means, and that only right functions are compared."""

import argparse
import ast
import json
import sys

import pytest
import torch
from tests.cli.benchmark_scripts import load

from failurelab import logits
from failurelab_course.experiments import devices, observe
from failurelab_course.ledger.tables import machines
from failurelab_course.runs import benchmarks

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


def test_ways_are_compared_in_one_run_and_the_missing_say_why(capsys, monkeypatch, tmp_path):
    """A small vocabulary, one round: figures for all that run, a reason for what does not, a record for each figure."""
    monkeypatch.setenv("FAILURELAB_EVIDENCE", str(tmp_path))
    logps = load("logps")
    shape = logps.Shape(2, 8, 8, 64, True, vocabulary=2000)
    found = logps.measure(shape, logps.WAYS, 1, "cpu")
    assert found[logps.KEPT]["memory_to_kept"] == found[logps.KEPT]["time_to_kept"] == 1.0
    reason = found["Liger's GRPO loss"]
    assert "No module named 'liger_kernel'" in reason
    logps.show(shape, found, "cpu")
    assert f"| Liger's GRPO loss | NOT RUN: {reason}" in capsys.readouterr().out
    ran = sum(isinstance(each, dict) for each in found.values())
    assert ran >= 5
    records = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(records) == len(found) == len(logps.WAYS)
    assert [made["figures"] for made in records if "not_run" in made["figures"]] == [{"not_run": reason}]


def test_a_way_that_scores_other_tokens_is_not_timed():
    """A fast wrong answer would win any benchmark."""
    logps = load("logps")

    def early(model, ids, mask, length):
        rows = model(input_ids=ids, attention_mask=mask).logits[:, :length].log_softmax(-1)
        return torch.gather(rows, -1, ids[:, -length:, None])[..., 0]

    with pytest.raises(logits.MisalignedLogProbs, match="prompt positions"):
        logps.measure(logps.Shape(2, 8, 8, 64, True, vocabulary=2000), {logps.KEPT: early}, 1, "cpu")


def test_a_way_that_runs_out_of_memory_is_not_run_and_the_others_are():
    """Caught for each way, with torch's own first line."""
    logps = load("logps")

    def greedy(model, ids, mask, length):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore.")

    shape = logps.Shape(2, 8, 8, 64, True, vocabulary=2000)
    found = logps.measure(shape, {"greedy": greedy, logps.KEPT: logps.kept_logits}, 1, "cpu")
    assert found["greedy"] == "CUDA out of memory. Tried to allocate 9 GiB."
    assert found[logps.KEPT]["rounds"] == 1
    found = logps.measure(shape, {"greedy": logps.kept_logits, logps.KEPT: greedy}, 1, "cpu")
    assert "which all are compared with, was not run" in found["greedy"]


def test_a_way_that_cannot_fit_is_not_tried(monkeypatch):
    """The least that full logits need: gradients of a tied 0.5B head, and 2 x 8,192 rows twice, all in bfloat16."""
    logps, asked = load("logps"), []
    monkeypatch.setattr(devices, "require_memory", lambda gib, device, what: asked.append(gib))
    shape = logps.CARD_SHAPES["0.5b-8k"]
    for way in (logps.full_logits, logits.completion_logps):
        logps.require_room(shape, way, "cuda")
    assert asked == pytest.approx([each * 151_936 * 2 / 2**30 for each in (896 + 2 * 2 * 8192, 896)])


def test_a_loss_of_another_kind_is_not_timed():
    """It would have other gradients: the mean log-probability in the place of GRPO's loss."""
    logps = load("logps")

    def other(model, ids, mask, length):
        return logits.completion_logps(model, ids, mask, length).mean()

    shape = logps.Shape(2, 8, 8, 64, True, vocabulary=2000)
    logps.LOSSES.add(other)
    with pytest.raises(ValueError, match="another function"):
        logps.errors(shape, {"other": other}, "cpu")


def test_a_loss_has_no_error_of_scores():
    """GRPO's loss at ratio 1 is the same for every model, so only its gradients tell; the table shows a dash for it."""
    logps = load("logps")
    shape = logps.Shape(2, 8, 8, 64, True, vocabulary=2000)
    ways = {logps.OURS: logits.completion_logps, "its loss": logps.WAYS["completion_logps, GRPO loss"]}
    found = logps.errors(shape, ways, "cpu")
    assert found["its loss"].keys() == {"gradient_error"} and 0 < found["its loss"]["gradient_error"] < 1e-4
    assert 0 < found[logps.OURS]["score_error"] < 1e-4
    metrics = {"time_to_kept": 1, "beyond_gradients_mib": 1, "memory_to_kept": 1, "gradients_mib": 1}
    record = observe.record(
        "F3a", "measured", metrics | found["its loss"], case=f"log-probs: its loss, {machines.MAIN_SHAPE}"
    )
    row = machines.log_probs([record | {"source": "benchmarks/logps.py"}]).splitlines()[-1]
    assert row.endswith(f"| - | {found['its loss']['gradient_error']:.0e} |")


def test_on_a_gpu_times_are_between_events(monkeypatch):
    """The step lies between two events of one queue, which is waited for; the GPU is a stand-in."""
    logps, calls = load("logps"), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def synchronize(self):
            calls.append("wait")

        def elapsed_time(self, other):
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("idle"))
    assert logps.seconds(lambda: calls.append("step"), "cuda:0") == 1.5
    assert calls == ["idle", "record", "step", "record", "wait"]


@pytest.mark.parametrize("name", sorted(benchmarks.benchmarks()))
def test_a_benchmark_takes_a_device_and_never_another(name, monkeypatch, capsys):
    """Asked for a GPU that is not there it ends with one line and status 3, before it computes; `auto` is resolved."""
    script, seen = load(name), []
    monkeypatch.setattr(devices, "gpu_problem", lambda: "there is none. Next: look for one")
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    said = capsys.readouterr()
    assert ended.value.code == 3 and not said.out
    assert said.err == (
        f"{name}.py: device cuda is asked for, and there is none. Next: look for one, or run with --device cpu\n"
    )
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", "--device", "tpu"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and "unknown device 'tpu'" in capsys.readouterr().err
    parsed = argparse.ArgumentParser.parse_args

    def noted(*args, **kwargs):
        seen.append(parsed(*args, **kwargs).device)
        raise KeyboardInterrupt  # before anything is run

    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", "--device", "auto"])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", noted)
    with pytest.raises(KeyboardInterrupt):
        script.main()
    assert seen == ["cpu"]


def test_two_processes_are_not_put_on_one_gpu(monkeypatch, capsys):
    """NCCL refuses it; the ledger is told that it was not run, by the status that means so."""
    sharding = load("zero3_sharding")
    monkeypatch.setattr(devices, "resolve", lambda device: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["zero3_sharding.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        sharding.main()
    said = capsys.readouterr().out
    assert benchmarks.why(said, ended.value.code) == "2 processes need a GPU each, and 1 is there"
