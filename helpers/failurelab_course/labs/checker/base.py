"""What every kind's `measure` works with: the run, and a refusal of what cannot be measured as an answer to the lab."""

import dataclasses
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import safetensors.torch
import torch

from failurelab_course.labs.checker.scorer import Refused as Refused


@dataclasses.dataclass
class Measured:
    """What came of one run.

    Attributes:
        metrics: every name that `metrics.of(kind)` gives; None where the run ended before.
        refused: why this is no answer to the lab at all (another trainer, another model), or empty.
        environment: why the question could not be asked (the stack does not import, no space), or empty.
        traceback: of the error, or empty.
    """

    metrics: dict[str, Any]
    refused: str = ""
    environment: str = ""
    traceback: str = ""


@dataclasses.dataclass
class CheckRun:
    """What a kind's `measure` works with, and whose `metrics` it fills in.

    Attributes:
        model_path: the folder of the model that the script is given.
        trainer_class: the lab's `trainer`, the name of a class or function; what it means is the kind's.
        clean: the model as it was before the script was imported, in eval mode.
        score: of `scorer.start`: the accuracy of weights, in a process that the script never ran in, on the CPU.
        device: `cpu` or `cuda`, where the script must compute.
        start: the clean model's state dict, copied.
        stop_after: steps after which training ends, whatever the script plans; 0 is its own end.
        stage: where the run is; an error is reported with it. `import`, `build`, `train` or `measure`.
    """

    model_path: pathlib.Path
    output_dir: pathlib.Path
    trainer_class: str
    metrics: dict[str, Any]
    clean: Any
    tokenizer: Any
    score: Callable[..., float]
    start: dict[str, torch.Tensor]
    device: str = "cpu"
    stop_after: int = 0
    stage: str = "import"

    def function(self, module: types.ModuleType, signature: str) -> Callable[..., Any]:
        """Return the function that a script must define, such as `build_trainer(model_path, output_dir)`.

        Raises:
            Refused: it does not.
        """
        function = getattr(module, signature.partition("(")[0], None)
        if not callable(function):
            raise Refused(f"the script defines no function {signature}")
        return function

    def must_be_there(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Make sure that tensors are on the device that the check is about.

        Raises:
            Refused: some are elsewhere; a figure of one device would be shown as another's.
        """
        elsewhere = sorted({tensor.device.type for tensor in tensors} - {self.device})
        if elsewhere:
            raise Refused(
                f"{what} is on {' and '.join(elsewhere)}, and this check is on {self.device}: its figures would be "
                "another device's. Next: use_cpu=not torch.cuda.is_available(), tensors on model.device, or check with "
                f"--device {elsewhere[0]}"
            )

    def accuracy_of(self, weights: dict[str, torch.Tensor]) -> float:
        """Return the accuracy of the clean model with these weights, as the scorer finds it.

        Raises:
            Refused: they are not weights of this model.
        """
        self.output_dir.mkdir(parents=True, exist_ok=True)
        path = self.output_dir / "measured-weights.safetensors"
        # a copy of each: tensors that share their memory cannot be saved so
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
        safetensors.torch.save_file(copies, path)
        try:
            return self.score(weights=path)
        finally:
            path.unlink()


def import_script(path: str | pathlib.Path) -> types.ModuleType:
    """Return the script as a module, run from its file: once more at each call, as another process would."""
    spec = importlib.util.spec_from_file_location("lab_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
