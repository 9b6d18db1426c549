"""Simulated devices: where a model fails is where it is said to fail."""

import json
import pathlib

import pytest
from small import run_child
from torch import nn

from failurelab import simulate

pytestmark = pytest.mark.slow

CHILD = pathlib.Path(__file__).with_name("simulate_child.py")


@pytest.fixture(scope="module")
def child():
    """All figures of one run: registering devices holds for a process, and would change the other tests'."""
    return json.loads(run_child(CHILD.read_text(encoding="utf-8")).splitlines()[-1])


def test_devices_are_registered_once(child):
    assert child["devices"] == ["sim:0", "sim:1"]
    first, second = child["again"]
    assert first == "" and second and child["none"] and "simulate.devices(2)" in child["few"]
    assert child["module"] == 2 and "sim:2 is not there" in child["absent"]
    # A thread of autograd's own that still holds Python objects when the process ends aborts it, now and then.
    assert child["main thread"] == [True]


def test_the_layer_that_is_said_to_fail_first_is_the_one_that_fails(child):
    """The report is a prediction, and the run decides: norms come before what they feed."""
    for moved, said, real, error in child["order"]:
        assert said == real, (moved, said, real, error)
        assert bool(real) == ("same device" in error), (moved, error)
    assert [said for _, said, _, _ in child["order"]][3] == "model.layers.3.input_layernorm"


def test_a_4_bit_model_with_adapters_runs(child):
    reached, trainable = child["four_bit"]["grads"]
    assert reached == trainable > 0 and child["four_bit"]["local"]


def test_places_are_checked_before_anything_is_moved():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for device_map, what in (({"0": 0}, "no place for 1.weight"), ({"": 0, "2": 1}, "'2', which is no module")):
        with pytest.raises(simulate.SimulationError, match=what):
            simulate.place(model, device_map)
    model[1].weight = model[0].weight
    with pytest.raises(simulate.SimulationError, match=r"1\.weight and 0\.weight are one tied tensor"):
        simulate.place(model, {"0": 0, "1": 1})
    assert model[0].weight.sum() != 0
    tied = simulate.place(model, {"": 1})
    assert tied[0].weight is tied[1].weight and str(tied[0].weight.device) == "cuda:1"
