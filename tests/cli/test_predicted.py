"""Predicted memory against measured memory, on a CPU: small steps, every way, every kind of checkpointing.

What is measured here is in float32: what a CPU holds for a bfloat16 product depends on its instructions, and a test
must not.
"""

import dataclasses

import pytest
from tests.cli.benchmark_scripts import load

pytestmark = pytest.mark.slow

SHAPE = {
    "vocab_size": 30_000,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def predicted():
    return load("predicted")


@pytest.fixture(scope="module")
def asked(predicted):
    """Cases by name: two shapes, three ways, three kinds of checkpointing, adapters, weights in 4 bit."""
    shape = predicted.Case(SHAPE, 2, 96, 32, rows=8)
    small = SHAPE | {"vocab_size": 500, "num_hidden_layers": 6}
    deep = dataclasses.replace(shape, shape=small, batch=4, prompt=48, completion=16)
    asked = {way: dataclasses.replace(shape, way=way) for way in ("full", "kept", "chunked")}
    asked |= {kind: dataclasses.replace(deep, kind=kind) for kind in predicted.KINDS}
    asked["LoRA"] = dataclasses.replace(deep, adapters=True)
    asked["4 bit"] = dataclasses.replace(asked["LoRA"], bits=4)
    return asked


@pytest.fixture(scope="module")
def compared(predicted, asked):
    """Figures by case, predicted and measured; one simulation."""
    found = predicted.predictions(list(asked.values()), "cpu")
    return {name: predicted.compare(case, each, "cpu") for (name, case), each in zip(asked.items(), found)}


def test_predicted_is_measured_within_a_twentieth(compared):
    """Peak beyond the weights; with adapters the weights themselves too. None is left out."""
    for name, rows in compared.items():
        for row in rows:
            assert 0.95 < row["ratio"] < 1.05, (name, row)
            assert row["ratio"] == row["predicted_mib"] / row["measured_mib"]
    assert {name: len(rows) for name, rows in compared.items() if len(rows) > 1} == {"LoRA": 2, "4 bit": 2}


def test_what_does_not_fit_or_misses_a_library_is_recorded_with_its_reason(predicted, monkeypatch):
    case = predicted.Case(SHAPE, 1, 8, 4)

    def full(gib, device, what):
        raise predicted.devices.TierError(f"{what} needs {gib:.0f} GiB")

    monkeypatch.setattr(predicted.devices, "require_memory", full)
    (row,) = predicted.compare(case, {"weights": 2**33, "step": 2**33}, "cpu")
    assert row["not_run"] == "this step needs 17 GiB" and "measured_mib" not in row and "ratio" not in row
    monkeypatch.setattr(predicted.problems, "find_native_problem", lambda device: "no native library")
    rows = predicted.compare(dataclasses.replace(case, adapters=True, bits=4), {"weights": 1, "step": 1}, "cpu")
    assert [each["not_run"] for each in rows] == ["no native library"] * 2
