"""Several accelerators on a machine that has none: placement and errors of models of any size."""

from failurelab.simulate.backend import NAME, SimulationError, devices, model, place, ranks, tokens
from failurelab.simulate.four_bit import four_bit
from failurelab.simulate.mode import fake

__all__ = [
    "NAME",
    "SimulationError",
    "devices",
    "fake",
    "four_bit",
    "model",
    "place",
    "ranks",
    "tokens",
]
