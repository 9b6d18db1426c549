"""A training script as one rank of a node with two GPUs that are not there: as far as accelerate's check of its model.

A script for `accelerate launch` fails on rank 1 and not on rank 0, and most readers have no two GPUs. `of_a_node` is
that rank for a block: `torch.cuda` and accelerate's state are those of the rank (`node.process`), and the script runs
with trl's own trainer and accelerate's own check. Three things stand in for the GPU:

- `from_pretrained` loads the weights in float32 on the CPU, where transformers 4.48 refuses to quantize, and gives the
  model the marks of 4 bit (`is_loaded_in_4bit`, `hf_device_map`), which is all that accelerate looks at;
- `train()` of every Trainer ends where accelerate has accepted the model, because a GPU that is not there computes
  nothing: `accepted` of the trainer is then true;
- there is no process group: nothing is sent.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import transformers

from failurelab_course.simulate import node

COMMAND = "accelerate launch --num_processes 2 train.py"
GPUS = 2


@contextlib.contextmanager
def of_a_node(rank: int) -> Iterator[None]:
    """Be this rank of two while the block runs; all is as before afterwards.

    Args:
        rank: 0 or 1.
    """
    kind = transformers.AutoModelForCausalLM
    load = kind.from_pretrained

    def from_pretrained(
        path: str, *, quantization_config: Any = None, device_map: Any = None, **options: Any
    ) -> transformers.PreTrainedModel:
        model = load(path, **options)
        if getattr(quantization_config, "load_in_4bit", False):
            model.is_loaded_in_4bit = True
            model.quantization_method = transformers.utils.quantization_config.QuantizationMethod.BITS_AND_BYTES
            model.hf_device_map = _resolved(device_map, model)
        return model

    with (
        node.process(node.started(COMMAND, GPUS), rank, GPUS),
        mock.patch.object(kind, "from_pretrained", from_pretrained),
        mock.patch.object(transformers.Trainer, "train", _ask_accelerate),
    ):
        yield


def _ask_accelerate(trainer: transformers.Trainer, *_: Any, **__: Any) -> None:
    trainer.accelerator.prepare_model(trainer.model, device_placement=False, evaluation_mode=True)
    trainer.accepted = True


def _resolved(device_map: Any, model: transformers.PreTrainedModel) -> dict[str, str]:
    """Return the map as transformers makes it; devices by name, for torch takes a bare number for nothing here."""
    if device_map == "auto":
        from accelerate import infer_auto_device_map

        half = sum(parameter.nbytes for parameter in model.parameters()) * 2 // 3
        device_map = infer_auto_device_map(model, max_memory=dict.fromkeys(range(GPUS), half))
    return {name: f"cuda:{place}" for name, place in (device_map or {"": 0}).items()}
