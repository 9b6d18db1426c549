"""GRPO on sums, in one process, in several, on several nodes: the same script, however it is started.

    .venv/bin/python examples/train_grpo.py --deepspeed examples/zero3_cpu.json
    .venv/bin/torchrun --nproc_per_node 2 examples/train_grpo.py --deepspeed examples/zero3_cpu.json
    .venv/bin/accelerate launch --config_file examples/accelerate_cpu.yaml examples/train_grpo.py
    .venv/bin/accelerate launch --config_file examples/accelerate_zero3.yaml examples/train_grpo.py

A callback asks a few sums after training has ended, under `zero3.generation_model`: right without DeepSpeed and at
every stage. Rank 0 prints one line: the number of processes, the steps, the rewards and the answers.
"""

import argparse
import contextlib
import json
import pathlib
import tempfile

import torch
import transformers

from failurelab import zero3
from failurelab_course.experiments import deepspeed, models, observe, trainers


class Quiz(transformers.TrainerCallback):
    """Asks a few sums when training has ended. Every process takes part: gathering takes all of them."""

    def __init__(self, trainer):
        self.trainer, self.answers = trainer, []

    def on_train_end(self, args, state, control, **_):
        """Ask, whatever holds the model."""
        tokenizer = self.trainer.processing_class
        batch = tokenizer(["3+4=", "7+8="], return_tensors="pt").to(args.device)
        with zero3.generation_model(self.trainer) as model, torch.no_grad():
            made = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        self.answers = tokenizer.batch_decode(made, skip_special_tokens=True)


def main():
    """Train as asked, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a hub id")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--deepspeed", type=pathlib.Path, help="DeepSpeed's config; else what accelerate launch says")
    options = parser.parse_args()
    observe.quiet()
    if options.deepspeed:
        print(f"ZeRO stage {deepspeed.check_config(options.deepspeed)}", flush=True)
    ready = deepspeed.ready() if options.deepspeed or deepspeed.launched() else contextlib.nullcontext()
    with ready, tempfile.TemporaryDirectory() as folder:
        policy, tokenizer = models.load(options.model)
        more = {"deepspeed": str(options.deepspeed)} if options.deepspeed else {}
        trainer = trainers.grpo(
            policy,
            tokenizer,
            steps=options.steps,
            prompts_per_step=4,
            num_generations=4,
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            **more,
        )
        quiz = Quiz(trainer)
        trainer.add_callback(quiz)
        trainer.train()
        if trainer.accelerator.is_main_process:
            told = {
                "processes": trainer.accelerator.num_processes,
                "partitioned": len(zero3.partitioned(trainer.model)),
                "steps": trainer.state.global_step,
                "rewards": trainers.rewards(trainer),
                "answers": quiz.answers,
            }
            print("TRAINED", json.dumps(told), flush=True)
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
