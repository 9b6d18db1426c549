"""Known gradients: the same batch through any implementation of GRPO's loss, cut as people cut it.

    failurelab gradients verl
    failurelab gradients my_adapter.py --source ~/src/my-library

Each case has inputs, options, a cut into ranks and micro-batches, and the gradient that these have by definition. An
implementation is held against what it declares. `check_adapter(adapter)` returns the `LossReport`.
"""

from failurelab.known_gradients.cases import EditedCases, LossCase, NotOffered, Part, read_cases
from failurelab.known_gradients.check import Declared, LossReport, NoAdapter, Result, check_adapter

__all__ = [
    "Declared", "EditedCases", "LossCase", "LossReport", "NoAdapter", "NotOffered", "Part", "Result", "check_adapter",
    "read_cases",
]  # fmt: skip
