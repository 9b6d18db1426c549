"""A training script as one rank of a node with two GPUs that are not there: as far as accelerate's check of its model.

A script for `accelerate launch` fails on rank 1 and not on rank 0, and most readers have no two GPUs. `of_a_node` is
that rank for a block, and the script runs with trl's own trainer and accelerate's own check. Besides what
`simulate.node` says, two things stand in for the GPU:

- `from_pretrained` loads the weights in float32 on the CPU, where transformers 4.48 refuses to quantize, and gives the
  model the marks of 4 bit, which is all that accelerate looks at;
- `train()` of every Trainer ends where accelerate has accepted the model, because a GPU that is not there computes
  nothing: `accepted` of the trainer is then true. Where accelerate refuses it the process would end, so that what runs
  next in the block begins as a process does: a cell that a reader runs twice ends in the same error twice.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState

from failurelab.simulate import loads, node

COMMAND = "accelerate launch --num_processes 2 train.py"
GPUS = 2


@contextlib.contextmanager
def of_a_node(rank: int, gpus: int = GPUS) -> Iterator[None]:
    """Be this rank, 0 or 1 of two, while the block runs; all is as before afterwards.

    The process sees so many `gpus`: 1 where a scheduler shows each process its own GPU only, as number 0.
    """

    def ask_accelerate(trainer: transformers.Trainer, *_: Any, **__: Any) -> None:
        try:
            trainer.accelerator.prepare_model(trainer.model, device_placement=False, evaluation_mode=True)
        except ValueError:
            cuda.current, cuda.chosen = 0, False
            for state in (PartialState, AcceleratorState):
                state._shared_state.clear()
            raise
        trainer.accepted = True

    with (
        node.process(node.started(COMMAND, GPUS), rank, gpus) as cuda,
        loads.loaded_by(_load_on_cpu),
        mock.patch.object(transformers.Trainer, "train", ask_accelerate),
    ):
        yield


def _load_on_cpu(call: loads.Call) -> transformers.PreTrainedModel:
    device_map = call.options.pop("device_map", None)
    in_4bit = getattr(call.options.pop("quantization_config", None), "load_in_4bit", False)
    model = call.load()
    if in_4bit:
        loads.mark_as_4bit(model, loads.resolve_map(device_map, model, in_4bit, torch.cuda))
    return model
