"""Generation under ZeRO-3 with the engine's hooks on and off: seconds, in turn, in one run.

The trainer's model generates the same tokens four ways: without DeepSpeed; handed over as the engine
(`zero3.generation_model`: gathered once, hooks out); handed over as the bare model as trl 0.15 does it (gathered once,
hooks on, so that each forward pass partitions and gathers again); and `model.generate` by itself, as a callback calls
it. One process: on several, each gathering is communication as well.

Eras: trl-0.14, trl-0.15, today.
Needs: zero3.
"""

import contextlib
import statistics
import time

import recording
import torch

from failurelab import zero3
from failurelab_course.experiments import deepspeed, models, observe, trainers

ROUNDS, TOKENS = 9, 32
PROMPTS = [prompt for prompt, _ in models.sums()[:400:50]]


def hooks_on(trainer):
    """Gather as trl 0.15 does, and leave the hooks where they are."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(trainer.model.parameters()))


WAYS = {
    "engine handed over, hooks off": zero3.generation_model,
    "bare model handed over, hooks on": hooks_on,
    "model.generate by itself": lambda trainer: contextlib.nullcontext(),
}


def generate(trainer, device) -> tuple[float, int, list]:
    """Return seconds, ZeRO-3's hooks meanwhile, and the tokens."""
    tokenizer, model = trainer.processing_class, trainer.model
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left").to(device)
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    start = time.perf_counter()
    ids = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    ids = ids.tolist()  # waits for the device
    return time.perf_counter() - start, zero3.hooks(model), ids


def main() -> None:
    """Measure all in turn, record and print."""
    device = recording.begin(__doc__).device
    torch.set_num_threads(1)
    policy, tokenizer = models.load(device=device)
    plain = trainers.grpo(policy, tokenizer, steps=1)
    policy, tokenizer = models.load(device=device)
    with deepspeed.one_process(3) as config:
        trainer = trainers.grpo(policy, tokenizer, steps=2, prompts_per_step=4, num_generations=4, deepspeed=config)
        trainer.train()
        # The weights have moved by two steps: the plain model gets them, so that all generate the same.
        with zero3.generation_model(trainer) as model:
            plain.model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        seconds = {"without DeepSpeed": [], **{name: [] for name in WAYS}}
        hooks, tokens = {}, {}
        for _ in range(ROUNDS + 1):
            for name in seconds:
                if name == "without DeepSpeed":
                    took, hooks[name], tokens[name] = generate(plain, device)
                else:
                    with WAYS[name](trainer):
                        took, hooks[name], tokens[name] = generate(trainer, device)
                seconds[name].append(took)
    base = statistics.median(seconds["engine handed over, hooks off"][1:])  # the first round warms up
    for name, all_of_it in seconds.items():
        metrics = {
            "seconds": statistics.median(all_of_it[1:]),
            "least": min(all_of_it[1:]),
            "ratio": statistics.median(all_of_it[1:]) / base,
            "hooks": hooks[name],
            "same_tokens": tokens[name] == tokens["without DeepSpeed"],
            "rounds": ROUNDS,
            "new_tokens": TOKENS,
            "completions": len(PROMPTS),
        }
        state = "broken" if hooks[name] else "healthy"
        observe.record("F4", state, metrics, case=f"generation: {name}", seed=0, device=device)
        print(f"{name:34s} {metrics['seconds']:.3f} s, {metrics['ratio']:.2f} times, {hooks[name]} hooks")


if __name__ == "__main__":
    main()
