"""F4: training or generation under ZeRO-3 that is handed something else than DeepSpeed's engine.

No engine runs here: the rules are those of the registry, by versions, and notebook 06 shows them.
"""

from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from failurelab.preflight.answers import Answer, NotApplicable, NotChecked, Suspected
from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges.rows import installed_version

_NO_ENGINE = "by the arguments and the registry's versions: no engine of ZeRO-3 runs here"


def judge_zero3(seen: Seen) -> Iterator[Answer]:
    """Tell whether training and generation get the DeepSpeed engine that they need."""
    yield _judge_engine(seen)


def _judge_engine(seen: Seen) -> Answer:
    if seen.zero_stage < 3:
        return NotApplicable(
            "F4", f"ZeRO stage {seen.zero_stage}: no parameter is partitioned" if seen.zero_stage else "no ZeRO"
        )
    kinds = {kind.__name__ for kind in type(seen.trainer).__mro__}
    if seen.evaluated:
        return Suspected(
            "F4",
            "evaluate() is called before train() under ZeRO-3: train() takes over an engine without an optimizer, and "
            "its first backward pass ends in \"'NoneType' object has no attribute 'backward'\"",
            _NO_ENGINE,
            "call evaluate() after train(), or failurelab.zero3.release_evaluation_engine(trainer) between the two",
        )
    if "GRPOTrainer" in kinds and Version("0.15") <= installed_version("trl") < Version("0.16"):
        return Suspected(
            "F4",
            f"ZeRO-3 and GRPOTrainer of trl {installed_version('trl')}, which hands the bare model to generation: "
            "ZeRO-3's hooks stay on, and each token gathers every layer again",
            _NO_ENGINE,
            "trl 0.16 or later; or generate under failurelab.zero3.generation_model(trainer)",
        )
    if own := _own_code(seen.trainer):
        return NotChecked(
            "F4",
            f"{own}, of the script's own, may take the bare model for ZeRO-3's engine, and no engine runs here: "
            "guards.Zero3Guard(trainer) watches it",
        )
    return NotChecked(
        "F4",
        f"trl {installed_version('trl')} hands ZeRO-3's engine to generation by the registry's versions, and no engine "
        "runs here: guards.Zero3Guard(trainer) looks",
    )


def _own_code(trainer: Any) -> str:
    """Return the names of the trainer's class and of its callbacks that are in no library; empty if all are."""
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", [])
    kinds = [type(trainer), *(kind if isinstance(kind, type) else type(kind) for kind in callbacks)]
    libraries = ("accelerate", "failurelab", "transformers", "trl")
    return ", ".join(kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] not in libraries)
