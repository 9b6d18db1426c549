"""Several accelerators on a machine that has none: placement, errors and memory of models of any size."""

from failurelab.simulate.backend import NAME, SimulationError, devices, model, place, ranks, tokens
from failurelab.simulate.four_bit import four_bit
from failurelab.simulate.gpu_workspace import fused_attention
from failurelab.simulate.memory import Peak, peak_memory
from failurelab.simulate.mode import fake

__all__ = [
    "NAME",
    "Peak",
    "SimulationError",
    "devices",
    "fake",
    "four_bit",
    "fused_attention",
    "model",
    "peak_memory",
    "place",
    "ranks",
    "tokens",
]
