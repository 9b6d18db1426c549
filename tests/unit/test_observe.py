"""Measurements: records that JSON can hold, warnings counted, and a peak of memory that is exact."""

import json
import math
import warnings

import pytest
import torch

from failurelab_course.experiments import machine, memory, observe


@pytest.fixture
def evidence_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FAILURELAB_EVIDENCE", str(tmp_path))
    monkeypatch.setenv("FAILURELAB_SOURCE", "a test")
    return tmp_path


def test_a_record_says_what_ran_where(evidence_folder):
    record = observe.record("F1", "broken", {"changed": 1, "loss": torch.tensor(0.5)}, case="frozen", seed=3)
    observe.record("F1", "right_fix", {})
    (path,) = evidence_folder.glob("*.jsonl")
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == record and second["state"] == "right_fix"
    assert record["figures"] == {"changed": 1, "loss": 0.5}
    assert torch.__version__.startswith(record["versions"]["torch"])  # a wheel may leave its +cu130 out
    assert (record["tier"], record["seed"], record["source"]) == ("cpu", 3, "a test")
    assert record["processor"].endswith(f"torch uses {torch.backends.cpu.get_cpu_capability()}")


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (
            "processor\t: 0\nmodel name\t: Xeon 8481C\nflags\t\t: fpu avx2 avx512f amx_bf16 avx2x\n\nprocessor\t: 1\n",
            "Xeon 8481C, avx2 avx512f amx_bf16",
        ),
        ("processor\t: 0\nmodel name\t: Old\nflags\t\t: fpu sse2\n", "Old, none of avx2 "),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd40\n", ", asimd bf16"),
    ],
)
def test_a_processor_is_named_with_its_instruction_sets(cpuinfo, expected):
    """One with bfloat16 instructions and one without round differently, and "x86_64 CPU" is what both are called."""
    assert expected in machine.processor(cpuinfo)


def test_nothing_is_written_unless_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("FAILURELAB_EVIDENCE", raising=False)
    monkeypatch.chdir(tmp_path)
    observe.record("F1", "broken", {})
    assert not list(tmp_path.iterdir())


def test_figures_that_json_cannot_hold(evidence_folder):
    assert observe.record("F1", "broken", {"loss": math.nan})["figures"]["loss"] == "nan"
    with pytest.raises(ValueError, match="figure 'logits' is a Tensor"):
        observe.record("F1", "broken", {"logits": torch.zeros(2)})
    for state, tier in (("fixed", None), ("broken", "tpu")):  # words that the schema has not
        with pytest.raises(ValueError, match="is one of"):
            observe.record("F1", state, {}, tier=tier)


def test_warnings_are_counted_every_one(recwarn):
    """Python shows a warning of one line once; the count is of all, and none reaches the reader."""
    with observe.count_warnings("requires_grad") as seen:
        for _ in range(3):
            warnings.warn("None of the inputs have requires_grad=True", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert seen.count == 3
    assert not recwarn.list


def test_peak_memory_is_that_of_the_tensors_of_the_step():
    """Two tensors of 4 MiB live at once, a third after one has gone: the peak is 8 MiB over what was held before."""
    held = torch.zeros(1 << 22)

    def step():
        first = torch.zeros(1 << 20)
        second = first + 1
        del first
        return (second * 2).sum()

    measured = observe.peak_memory(step)
    assert abs(measured - (8 << 20)) < 4096 and held.numel()
    with pytest.raises(ValueError, match=r"memory of a mps device is not counted.*Next: "):
        observe.peak_memory(lambda: None, "mps")  # the CPU's profiler would see nothing, and say 0


def test_the_blocks_at_the_peak_are_told_by_their_size(monkeypatch):
    """Of 4, 2 and 1 MiB the first two are held together; what has gone before the peak, or comes after it, is not."""
    held = torch.zeros(1 << 18)

    def step():
        nonlocal held
        held = None  # was there before, and goes during the step
        gone = torch.zeros(1 << 18)
        del gone
        first, second = torch.zeros(1 << 20), torch.zeros(1 << 19)
        del first, second
        return torch.zeros(1 << 18)

    assert [size >> 20 for size in memory.held_at_peak(step) if size > 4096] == [4, 2]
    monkeypatch.setattr(memory, "peak_memory", lambda step, device: 350)
    assert memory.held_at_peak(step, "cuda:1") == [350]


def test_on_a_gpu_the_peak_is_read_when_all_work_is_done(monkeypatch):
    """Before the start is read, earlier work has ended and its peak is forgotten; the end waits again. A stand-in."""
    calls = []
    for name, result in (("synchronize", 0), ("reset_peak_memory_stats", 0), ("memory_allocated", 100)):
        monkeypatch.setattr(torch.cuda, name, lambda device, n=name, r=result: calls.append((n, device.index)) or r)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: calls.append(("max", device.index)) or 350)
    assert observe.peak_memory(lambda: calls.append("step"), "cuda:1") == 250
    named = ["synchronize", "reset_peak_memory_stats", "memory_allocated", "step", "synchronize", "max"]
    assert calls == [each if each == "step" else (each, 1) for each in named]
