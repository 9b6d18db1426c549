"""Find out whether a script replaced a part of the libraries.

A lab is repaired in its own script: in the model, the config, the trainer, or a class of its own. Who replaces
`torch.utils.checkpoint.checkpoint` for the whole process has silenced the symptom for everyone and repaired nothing
that can be taken home. So the checker notes what the libraries' functions and methods are before it imports the script,
and compares afterwards.
"""

import sys
import types
from typing import Any

# Where the failures of this course live; whole libraries would take seconds.
WATCHED = (
    "torch.utils.checkpoint",
    "torch.autograd",
    "torch.autograd.graph",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch.nn.modules.sparse",
    "torch.nn.modules.linear",
    "torch.optim.adamw",
    "torch.optim.optimizer",
    "torch.serialization",
    "transformers.trainer",
    "transformers.trainer_callback",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
    "transformers.models.qwen2.modeling_qwen2",
    "trl.models.utils",
    "trl.trainer.utils",
    "trl.trainer.grpo_trainer",
    "trl.trainer.online_dpo_trainer",
    "trl.trainer.dpo_trainer",
    "peft.peft_model",
    "peft.mapping",
    "peft.tuners.tuners_utils",
    "peft.tuners.lora.layer",
    "peft.tuners.lora.model",
    "accelerate.accelerator",
    "bitsandbytes.functional",
    "bitsandbytes.nn.modules",
    "failurelab_course.experiments.models",
    "failurelab_course.labs.checker.base",
    "failurelab_course.labs.checker.measure",
    "failurelab_course.labs.checker.judge",
)
# What libraries put in place of each other's functions is no doing of the script.
_LIBRARIES = ("deepspeed", "accelerate", "torch", "transformers", "peft", "trl", "bitsandbytes", "liger_kernel")
_PLAIN = (types.FunctionType, types.BuiltinFunctionType, type, property, classmethod, staticmethod)

Snapshot = dict[tuple[str, str], Any]


def snapshot() -> Snapshot:
    """Return the functions, classes and methods of the watched modules that are loaded, by module and name."""
    functions: Snapshot = {}
    for name in WATCHED:
        module = sys.modules.get(name)
        for key, value in list(vars(module).items()) if module else ():
            if not isinstance(value, _PLAIN):
                continue
            functions[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                for method, function in list(vars(value).items()):
                    if isinstance(function, _PLAIN):
                        functions[name, f"{key}.{method}"] = function
    return functions


def replaced(before: Snapshot) -> list[str]:
    """Return the full names of what is no longer as it was, in order; what one library did to another is left out."""
    now = snapshot()
    names = [
        f"{module}.{name}"
        for (module, name), value in before.items()
        if now.get((module, name)) is not value and not _by_library(now.get((module, name)), value)
    ]
    return sorted(names)


def _by_library(value: Any, before: Any) -> bool:
    """Whether a library put `value` in the place of another library's function."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    origin = (getattr(value, "__module__", "") or "").partition(".")[0]
    owner = (getattr(before, "__module__", "") or "").partition(".")[0]
    return origin in _LIBRARIES and origin != owner
