"""What each process of two holds at each stage of ZeRO: elements of parameters, of gradients and of optimizer state.

Two processes on this machine, started by torchrun, train two steps; each counts what it holds when the optimizer steps.
A model of N parameters has N gradients, and 2 N elements of state with AdamW.

Eras: today.
Needs: zero3.
"""

import json
import os
import subprocess
import sys
import time

import recording
import torch

from failurelab import zero3
from failurelab_course.experiments import deepspeed, models, observe, trainers

PROCESSES = 2


def held(engine) -> dict[str, int]:
    """Return how many elements this process holds, each storage counted once."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    averaged = getattr(optimizer, "averaged_gradients", None) or {}
    kept = [gradient for group in averaged.values() for gradient in (group or [])]
    gradients = [grad for grad in [*(parameter.grad for parameter in parameters), *kept] if grad is not None]
    state = getattr(optimizer, "optimizer", optimizer).state
    return {
        "parameters": sum(getattr(parameter, "ds_tensor", parameter).numel() for parameter in parameters),
        "gradients": sum({gradient.data_ptr(): gradient.numel() for gradient in gradients}.values()),
        "state": sum(
            tensor.numel()
            for row in state.values()
            for tensor in row.values()
            if torch.is_tensor(tensor) and tensor.numel() > 1
        ),
    }


def child(stage: int, device: str) -> None:
    """Train two steps as one process of the group, and print what it holds."""
    observe.quiet()
    torch.set_num_threads(1)
    with deepspeed.ready():
        policy, tokenizer = models.load(device=device)
        config = deepspeed.config(stage)
        trainer = trainers.grpo(policy, tokenizer, steps=2, prompts_per_step=4, num_generations=4, deepspeed=config)
        seen = {}

        def look(trainer=trainer, seen=seen):
            engine = zero3.engine_of(trainer)
            step = engine.optimizer.step

            def counted(*args, **kwargs):
                gradients = held(engine)["gradients"]
                output = step(*args, **kwargs)
                seen.update(held(engine), gradients=gradients)
                return output

            engine.optimizer.step = counted

        import transformers

        class Begin(transformers.TrainerCallback):
            """Looks at the optimizer's steps from the first on."""

            def on_train_begin(self, *_, **__):
                look()

        trainer.add_callback(Begin())
        trainer.train()
        # Rank 0 alone prints: the others hold as much, to the rounding of an odd count.
        if os.environ["RANK"] == "0":
            print("HELD", json.dumps(seen), flush=True)


def main() -> None:
    """Start two processes for each stage, record and print."""
    options = recording.begin(__doc__, stage={"type": int})
    if options.stage is not None:
        child(options.stage, options.device if options.device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
        return
    if options.device != "cpu" and torch.cuda.device_count() < PROCESSES:
        # NCCL refuses two processes on one card
        recording.end_not_run(f"{PROCESSES} processes need a GPU each, and {torch.cuda.device_count()} is there")
    deepspeed.check()
    whole = sum(parameter.numel() for parameter in models.load()[0].parameters())
    for stage in deepspeed.STAGES:
        start = time.perf_counter()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(PROCESSES)),
                *("--master_port", str(deepspeed.free_port())),
                *(__file__, "--stage", str(stage), "--device", options.device),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(deepspeed.extensions())},
            capture_output=True,
            text=True,
            timeout=300,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("HELD ")]
        if done.returncode or not lines:
            raise SystemExit(f"stage {stage} failed:\n{done.stderr[-2000:]}")
        metrics = json.loads(lines[0].removeprefix("HELD "))
        metrics |= {"whole_model": whole, "processes": PROCESSES}
        observe.record(
            "F4", "measured", metrics, case=f"held by one of two: stage {stage}", seed=0, device=options.device
        )
        print(f"stage {stage}: {metrics}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
