"""Runs in a process of its own, for there is one DeepSpeed state a process: what ZeRO does here, as one JSON object.

usage: python zero3_child.py QUESTION...
"""

import contextlib
import json
import sys
import tempfile

from failurelab_course.experiments import imports

with imports.uncollected():  # DeepSpeed collects again and again while it makes an engine
    import torch
    import transformers
    from trl import GRPOTrainer  # noqa: F401

    from failurelab import guards, handles, zero3
    from failurelab.rollouts import safe_generation
    from failurelab_course.experiments import deepspeed, models, observe, trainers

observe.quiet()
torch.set_num_threads(1)
PROMPTS = ["3+4=", "7+8="]
# A layer with a bias too: an optimizer group without parameters (that of biases), which DeepSpeed 0.16 drops, makes
# torch's newer schedulers fail.
LORA = {
    "modules_to_save": ["k_proj"],
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}


class Ask(transformers.TrainerCallback):
    """Calls a function once, at an event of training."""

    def __init__(self, event, ask):
        setattr(self, event, lambda args, state, control, **_: self.once(ask))
        self.answer = None

    def once(self, ask):
        self.answer = self.answer or ask()


@contextlib.contextmanager
def trainer_at(stage, *, peft=False, by_path=False, **options):
    """Yield a small GRPO trainer at a ZeRO stage; None is without DeepSpeed."""
    policy, tokenizer = models.load()
    lora = None
    if peft:
        from peft import LoraConfig

        lora = LoraConfig(**LORA)
    with deepspeed.one_process(stage) if stage is not None else contextlib.nullcontext() as config:
        options |= {"deepspeed": config} if config else {}
        yield trainers.grpo(
            str(models.path("tiny")) if by_path else policy,
            tokenizer,
            **{"steps": 2, "prompts_per_step": 4, "num_generations": 4, "peft_config": lora} | options,
        )


def greedy(model, tokenizer):
    batch = tokenizer(PROMPTS, return_tensors="pt")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    return model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **options).tolist()


def placed(model):
    """Every hook of every module, in order, and every shape: what a generation must leave as it was."""
    return [[list(module._forward_pre_hooks), list(module._forward_hooks)] for module in model.modules()], [
        list(parameter.shape) for parameter in model.parameters()
    ]


def ask(trainer):
    model, tokenizer = trainer.model, trainer.processing_class
    before, hooks = placed(model), zero3.hooks(model)
    with zero3.generation_model(trainer) as ready:
        inside = {
            "hooks": zero3.hooks(ready),
            "whole": all(parameter.numel() for parameter in ready.parameters()),
            "generated": greedy(ready, tokenizer),
        }
        with zero3.generation_model(trainer) as again:
            inside["nested"] = again is ready and zero3.hooks(ready) == 0
        inside["still_whole"] = all(parameter.numel() for parameter in ready.parameters())
    raised = False
    try:
        with zero3.generation_model(trainer):
            raise ZeroDivisionError
    except ZeroDivisionError:
        raised = True
    engine = zero3.engine_of(trainer)
    return inside | {
        "engine": type(engine).__name__ if engine is not None else None,
        "engine_is_wrapped": engine is trainer.model_wrapped,
        "hooks_before": hooks,
        "partitioned": len(zero3.partitioned(model)),
        "as_before": placed(model) == before and raised,
    }


def everywhere():
    """generation_model and engine_of: without DeepSpeed and at two stages, at each time, with an adapter."""
    expected = greedy(*models.load())
    answer = {"expected": expected}
    for stage in (None, 0, 3):
        with trainer_at(stage, learning_rate=0.0) as trainer:
            made = {"before": ask(trainer)}
            calls = {
                event: Ask(event, lambda trainer=trainer: ask(trainer)) for event in ("on_train_begin", "on_step_end")
            }
            for call in calls.values():
                trainer.add_callback(call)
            trainer.train()
            made |= {event: call.answer for event, call in calls.items()} | {"after": ask(trainer)}
            answer[str(stage)] = made
    with trainer_at(3, by_path=True, learning_rate=0.0) as trainer:  # partitioned as it is loaded
        answer["by path"] = {"before": ask(trainer)}
        trainer.train()
        answer["by path"]["after"] = ask(trainer)
    with trainer_at(3, peft=True, learning_rate=0.0) as trainer:

        def both():
            with zero3.generation_model(trainer) as model, safe_generation(model):
                safe = greedy(model, trainer.processing_class)
            return ask(trainer) | {"safe": safe}

        call = Ask("on_train_begin", both)
        trainer.add_callback(call)
        trainer.train()
        answer["peft"] = call.answer
    return answer


def bare():
    """The hand-over of the bare model: TRL's own function, at this release, and what the guard says of it."""
    from trl.models.utils import unwrap_model_for_generation

    def by_trl(handed):
        def run(trainer):
            with unwrap_model_for_generation(handed(trainer), trainer.accelerator) as model:
                hooks = zero3.hooks(trainer.model)
                greedy(model, trainer.processing_class)
            return hooks

        return run

    def generate(trainer):
        greedy(trainer.model, trainer.processing_class)
        return zero3.hooks(trainer.model)

    ways = {
        "bare": by_trl(lambda trainer: trainer.model),
        "engine": by_trl(lambda trainer: trainer.model_wrapped),
        "generate": generate,
        "no deepspeed": generate,
        "stopped": generate,
    }
    answer = {}
    for name, way in ways.items():
        with trainer_at(None if name == "no deepspeed" else 3, learning_rate=0.0) as trainer:
            said: list[str] = []
            action = "stop" if name == "stopped" else lambda notice, said=said: said.append(notice.message)
            trainer.add_callback(guards.Zero3Guard(trainer, action))
            call = Ask("on_step_end", lambda way=way, trainer=trainer: {"hooks": way(trainer)})
            trainer.add_callback(call)
            try:
                trainer.train()
            except guards.GuardTripped as error:
                said.append(str(error))
            answer[name] = (call.answer or {}) | {"said": said}
    return answer


def repaired():
    """zero3.repair takes the hooks out of the trainer's own generation, and is gone with its handle."""
    answer = {}
    for name in ("as it is", "repaired"):
        with trainer_at(3) as trainer:
            hooks: list[int] = []

            def look(generate, *args, hooks=hooks, trainer=trainer, **kwargs):
                hooks.append(zero3.hooks(trainer.model))
                return generate(*args, **kwargs)

            handles.wrap_method(trainer.model, "generate", look, "watched")
            handle = zero3.repair(trainer) if name == "repaired" else None
            trainer.train()
            answer[name] = {"hooks": hooks, "rewards": trainers.rewards(trainer), "after": zero3.hooks(trainer.model)}
            if handle:
                handle.remove()
                greedy(trainer.model, trainer.processing_class)
                answer[name]["removed"] = hooks[-1]
    return answer


def evaluated():
    """evaluate() before train(): what train() says, and after release_evaluation_engine."""
    rows = models.rows().select(range(8))
    answer = {}
    for released in (False, True):
        with trainer_at(3) as trainer:
            told = {}
            try:
                trainer.evaluate(rows)
            except AttributeError as error:
                told["evaluate"] = str(error)
            told["ask"] = ask(trainer)
            if released:
                told["released"] = [zero3.release_evaluation_engine(trainer), zero3.release_evaluation_engine(trainer)]
                told["hooks"] = zero3.hooks(trainer.model)
            before = {name: tensor.clone() for name, tensor in models.load()[0].named_parameters()}
            try:
                trainer.train()
                told["error"] = ""
                with zero3.generation_model(trainer) as model:
                    told["changed"] = sum(not torch.equal(before[name], now) for name, now in model.named_parameters())
            except AttributeError as error:
                told["error"] = str(error)
            answer["released" if released else "as it is"] = told
    return answer


def main():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        answers = {name: globals()[name]() for name in sys.argv[1:]}
    print("ANSWER", json.dumps(answers))


if __name__ == "__main__":
    main()
