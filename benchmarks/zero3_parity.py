"""The same GRPO steps with and without DeepSpeed, on fixed completions: how far apart the gathered parameters end.

Sampling would decide else: one token that rounds the other way, and two runs are two runs. So the trainer generates,
and is handed completions that are given; half of them are right. All else is its own: log-probs, loss, gradients,
optimizer. Stage 3 generates through `zero3.repair`.

Eras: trl-0.14, trl-0.15, today.
Needs: zero3.
"""

import contextlib

import recording
import torch

from failurelab import handles, zero3
from failurelab_course.experiments import deepspeed, models, observe, trainers

STEPS, RATE = 10, 1e-4


def fix(trainer) -> handles.Handle:
    """Replace what the trainer generates by fixed completions, of the same shape for every run."""
    tokenizer, answers = trainer.processing_class, dict(models.sums())

    def around(generate, *args, **kwargs):
        sequences = generate(*args, **kwargs)
        prompts = kwargs.get("input_ids", args[0] if args else None)
        prompts = prompts.repeat_interleave(len(sequences) // len(prompts), 0)  # once for each completion, in trl 0.14
        texts = tokenizer.batch_decode(prompts, skip_special_tokens=True)
        ends = [
            [*tokenizer(answers[text] if row % 2 else "0")["input_ids"], tokenizer.eos_token_id]
            for row, text in enumerate(texts)
        ]
        longest = max(map(len, ends))
        ends = [end + [tokenizer.pad_token_id] * (longest - len(end)) for end in ends]
        return torch.cat([prompts, torch.tensor(ends, device=prompts.device)], 1)

    return handles.wrap_method(trainer.model, "generate", around, "fixed completions")


def run(stage, device) -> tuple[dict, dict]:
    """Train at a ZeRO stage, None without DeepSpeed; return parameters before and after, on the CPU."""
    policy, tokenizer = models.load(device=device)
    start = {name: tensor.detach().cpu().clone() for name, tensor in policy.named_parameters()}
    with deepspeed.one_process(stage) if stage is not None else contextlib.nullcontext() as config:
        more = {"deepspeed": config} if config else {}
        trainer = trainers.grpo(policy, tokenizer, steps=STEPS, learning_rate=RATE, prompts_per_step=8, **more)
        fix(trainer)
        if stage == 3:
            zero3.repair(trainer)
        trainer.train()
        with zero3.generation_model(trainer) as model:
            return start, {name: tensor.detach().cpu().clone() for name, tensor in model.named_parameters()}


def main() -> None:
    """Run all stages, record and print."""
    device = recording.begin(__doc__).device
    torch.set_num_threads(1)
    start, alone = run(None, device)
    moved = {name: float((alone[name] - start[name]).abs().max()) for name in start}
    for stage in deepspeed.STAGES:
        _, end = run(stage, device)
        apart = {name: float((alone[name] - end[name]).abs().max()) for name in start}
        metrics = {
            "largest_change": max(moved.values()),
            "largest_difference": max(apart.values()),
            "where": max(apart, key=apart.get),
            "tensors": len(apart),
            "steps": STEPS,
            "learning_rate": RATE,
        }
        observe.record(
            "F4",
            "right_fix" if stage == 3 else "healthy",
            metrics,
            case=f"parity: stage {stage}",
            seed=0,
            device=device,
        )
        print(f"stage {stage}: {metrics['largest_difference']:.1e} apart, {metrics['largest_change']:.1e} moved")


if __name__ == "__main__":
    main()
