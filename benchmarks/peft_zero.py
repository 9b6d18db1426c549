"""DeepSpeed as a suspect of "element 0", and the relative of that failure under ZeRO-3: CheckpointError.

Each run is a process of its own, for DeepSpeed keeps what it was told first. With non-reentrant checkpointing the
recomputation meets frozen weights that ZeRO-3 has partitioned since, with 0 elements: CheckpointError, until DeepSpeed
keeps them there (https://github.com/deepspeedai/DeepSpeed/pull/8148). trl 1.16 makes such runs reentrant; here that is
undone after the trainer is made, and in one more run DeepSpeed's repair too.

Eras: trl-0.14, today.
Needs: zero3.
"""

import contextlib
import itertools
import os
import pathlib
import subprocess
import sys
import unittest.mock
from collections.abc import Iterator

import frames
import recording
import torch

from failurelab import gradients
from failurelab_course.experiments import models, observe, trainers

KINDS = ("off", "reentrant", "non-reentrant")


def table_checkpoint_errors(folder: pathlib.Path) -> str:
    """LoRA under ZeRO-3 with non-reentrant checkpointing, by DeepSpeed's version and with its repair switched off."""
    body = []
    runs = frames.read_runs(folder, "peft_zero", "ZeRO-3, non-reentrant, LoRA(?P<off>, DeepSpeed's repair off)?")
    for run in runs.to_dict("records"):
        off = ", its repair switched off" if run["off"] else ""
        name = f"DeepSpeed {run['versions']['deepspeed']}{off}"
        body.append([name, frames.reached(run), run["error"].split(":")[0] or "no error"])
    return frames.markdown(["ZeRO-3", "tensors with a gradient", "raised"], sorted(body))


def main() -> None:
    """Run each combination in a process of its own."""
    arguments = recording.begin(__doc__, one={"nargs": 4, "metavar": ("STAGE", "KIND", "TRAINED", "REPAIR")})
    if arguments.one:
        stage, kind, trained, repair = arguments.one
        one(int(stage), kind, trained, repair, arguments.device)
        return
    runs = [(stage, kind, trained, "as released") for stage, kind, trained in itertools.product((2, 3), KINDS, TRAINED)]
    if observe.era() == "today":
        runs.append((3, "non-reentrant", "LoRA", "DeepSpeed's repair off"))
    for stage, kind, trained, repair in runs:
        own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        accelerator = {"DS_ACCELERATOR": "cpu"} if arguments.device == "cpu" else {}
        command = [sys.executable, __file__, "--device", arguments.device, "--one", f"{stage}", kind, trained, repair]
        done = subprocess.run(command, env=os.environ | own | accelerator, capture_output=True, text=True)
        print(stage, kind, trained, repair, done.stdout.strip().splitlines()[-1:], flush=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])


TRAINED = ("full", "LoRA")


def one(stage: int, kind: str, trained: str, repair: str, device: str) -> None:
    """Train three steps under ZeRO and record which tensors a gradient reached, and what was raised."""
    observe.quiet()
    policy, tokenizer = models.load(device=device)
    zero = {
        # a threshold of 0, or the weights of so small a model are never partitioned
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # its own: with Trainer's two groups, one of them empty for LoRA, torch's scheduler of today stops
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}},
    }
    trainer = trainers.grpo(
        policy,
        tokenizer,
        steps=3,
        learning_rate=1e-3,
        prompts_per_step=4,
        deepspeed=zero,
        peft_config=recording.small_lora() if trained == "LoRA" else None,
        **recording.checkpointing(kind),
    )
    asked = trainer.args.gradient_checkpointing_kwargs
    forced = kind == "non-reentrant" and bool(asked["use_reentrant"])
    if forced:
        asked["use_reentrant"] = False
    with contextlib.nullcontext() if repair == "as released" else unrepaired():
        metrics = recording.train_watched(trainer)
    metrics |= {
        "checkpointing": sorted({name for name, _ in gradients.checkpointed(trainer.model)}),
        "trl_forced_reentrant": forced,
    }
    state = "healthy" if metrics["reached"] == metrics["trainable"] and not metrics["error"] else "broken"
    case = f"ZeRO-{stage}, {kind}, {trained}" + ("" if repair == "as released" else f", {repair}")
    observe.record("F2", state, metrics, case=case, seed=0, device=device)
    print(metrics)


@contextlib.contextmanager
def unrepaired() -> Iterator[None]:
    """Let DeepSpeed not know, in a block, that a forward pass is a recomputation inside a backward pass."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    class Inner:
        def __getattr__(self, name: str) -> object:
            return (lambda: -1) if name == "_current_graph_task_id" else getattr(torch._C, name)

    class Outer:
        _C = Inner()

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

    with unittest.mock.patch.object(partitioned_param_coordinator, "torch", Outer()):
        yield


if __name__ == "__main__":
    main()
