"""F4: training or generation under ZeRO-3 that is handed something else than DeepSpeed's engine.

Who hands over what is measured with a stand-in for the engine (`intercept.engine`); notebook 06 shows what follows.
"""

from collections.abc import Iterator

from failurelab.preflight.answers import Answer, NotApplicable, NotChecked, Suspected
from failurelab.preflight.inputs import Seen

_NO_ENGINE = "no engine of ZeRO-3 runs here: it is simulated"


def judge_zero3(seen: Seen) -> Iterator[Answer]:
    """Tell whether training and generation get the DeepSpeed engine that they need."""
    bare = [taker for taker, is_bare in seen.handed_over.items() if is_bare]
    if seen.zero_stage < 3:
        stage = f"ZeRO stage {seen.zero_stage}: no parameter is partitioned"
        yield NotApplicable("F4", stage if seen.zero_stage else "no ZeRO")
    elif seen.evaluated:
        yield Suspected(
            "F4",
            "evaluate() is called before train() under ZeRO-3: train() takes over an engine without an optimizer, and "
            "its first backward pass ends in \"'NoneType' object has no attribute 'backward'\"",
            _NO_ENGINE,
            "call evaluate() after train(), or failurelab.zero3.release_evaluation_engine(trainer) between the two",
        )
    elif bare:
        yield Suspected(
            "F4",
            f"under ZeRO-3 the bare model is handed to generation, and not the engine around it, by {', '.join(bare)}: "
            "ZeRO-3's hooks stay on, and each token gathers every layer again (trl 0.14: \"object has no attribute "
            "'optimizer'\")",
            _NO_ENGINE,
            "hand over trainer.model_wrapped, as trl does from 0.16 on; or generate under "
            "failurelab.zero3.generation_model(trainer)",
        )
    else:
        seen_to = f"{', '.join(seen.handed_over)} hands the engine to generation" if seen.handed_over else (
            "nothing was seen that makes a model ready to generate"
        )  # fmt: skip
        yield NotChecked("F4", f"{seen_to}, and {_NO_ENGINE}. guards.Zero3Guard(trainer) looks whether its hooks go")
