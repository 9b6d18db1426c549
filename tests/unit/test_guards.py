"""Guards: they stop a run that trains nothing or trains on garbage, name what they found, leave healthy runs alone.

The five trainers, plain, with frozen embeddings and with LoRA, under each kind of checkpointing, in the stack at hand.
What a guard says is held against what the run then did.
"""

import dataclasses
import types
import warnings
from typing import ClassVar
from unittest import mock

import datasets
import peft
import pytest
import torch
import transformers
import trl
from packaging.version import Version
from small import alternate, checkpoint, lora_config
from steps import NO_ONLINE_DPO, online_dpo

from failurelab import gradients, guards, rollouts
from failurelab_course.experiments import models, trainers

pytestmark = pytest.mark.filterwarnings("ignore")

installed = Version(transformers.__version__)

# GRPO in every way; of the others what its own code decides: the input hook, and whether the model generates.
CASES = [
    ("grpo", "full", "off"),
    *(("grpo", mode, "reentrant") for mode in ("full", "frozen", "lora")),
    *((kind, "frozen", "reentrant") for kind in ("trainer", "sft", "dpo", "online_dpo")),
    *(("grpo", "lora", "non-reentrant"), ("sft", "lora", "reentrant"), ("online_dpo", "lora", "reentrant")),
]
SQUARE_MASK = installed < Version("4.49")
DROPPED_CACHE = Version("4.53") <= installed < Version("5.24")
BARE_GENERATE_IS_WRONG = SQUARE_MASK or DROPPED_CACHE


def checkpointing_options(kind: str) -> dict:
    if kind == "off":
        return {"gradient_checkpointing": False}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": kind == "reentrant"}}


def config(of: type, folder, **options):
    names = {field.name for field in dataclasses.fields(of)}
    if "activation_checkpointing" in names:
        options = {key.replace("gradient_checkpointing", "activation_checkpointing"): options[key] for key in options}
    common = {
        "output_dir": str(folder),
        "max_steps": 2,
        "learning_rate": 1e-2,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": of is not transformers.TrainingArguments,
    }
    return of(**(common | {key: options[key] for key in options if key in names}))


def plain_trainer(of, model, tokenizer, folder, callbacks, **options):
    rows = []
    for prompt, answer in models.sums()[150:166]:
        if len(prompt) == 4:
            ids = tokenizer(f"{prompt}{answer:>2}")["input_ids"]
            rows.append({"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)})
    return of(
        model=model,
        args=config(transformers.TrainingArguments, folder, **options),
        train_dataset=rows * 4,
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def make(kind, model, tokenizer, folder, callbacks, peft_config=None, **options):
    options.setdefault("gradient_checkpointing", False)
    if kind in ("grpo", "online_dpo"):
        steps = options.pop("max_steps", 2)
        if kind == "grpo":
            own = {"steps": steps, "prompts_per_step": 4, "learning_rate": 1e-2, "num_generations": 4}
            trainer = trainers.grpo(model, tokenizer, peft_config=peft_config, reward=alternate, **own, **options)
        else:
            own = {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
            trainer = online_dpo(model, tokenizer, folder, config=peft_config, **own, **options)
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer
    sums = models.sums()[150:166]
    if kind == "trainer":
        model = peft.get_peft_model(model, peft_config) if peft_config else model
        return plain_trainer(transformers.Trainer, model, tokenizer, folder, callbacks, **options)
    if kind == "sft":
        rows = [{"text": prompt + answer} for prompt, answer in sums]
        trainer, arguments = trl.SFTTrainer, trl.SFTConfig
    else:
        rows = [{"prompt": prompt, "chosen": answer, "rejected": answer + "0"} for prompt, answer in sums]
        trainer, arguments = trl.DPOTrainer, trl.DPOConfig
    return trainer(
        model=model,
        args=config(arguments, folder, max_seq_length=32, max_length=32, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=callbacks,
    )


@pytest.mark.parametrize(("kind", "mode", "checkpointing"), CASES)
def test_what_the_gradient_guard_says_is_what_the_run_did(kind, mode, checkpointing, model, tokenizer, tmp_path):
    """Parameters it names stay as they are; all others move. Which stack fails so, labs and notebooks hold."""
    if kind == "online_dpo" and NO_ONLINE_DPO:
        pytest.skip("OnlineDPOTrainer cannot train in this stack at all")
    if mode == "frozen":
        model.get_input_embeddings().requires_grad_(False)
    guard, watcher = guards.GradientGuard("warn"), guards.RolloutGuard("warn")
    trainer = make(
        kind,
        model,
        tokenizer,
        tmp_path,
        [guard, watcher],
        lora_config(lora_dropout=0.2) if mode == "lora" else None,
        **checkpointing_options(checkpointing),
    )
    before = gradients.snapshot(trainer.model)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.train()
        except RuntimeError as raised:
            error = str(raised)
    alarms = [str(each.message) for each in caught if issubclass(each.category, guards.GuardWarning)]
    gradient_alarms = [text for text in alarms if text.startswith("GradientGuard")]
    if error:  # told beforehand: nothing would get a gradient
        assert error.startswith("element 0") and guard.report.without_gradient == tuple(before.values)
        assert len(gradient_alarms) == 1 and "the first backward pass will end in" in gradient_alarms[0]
    else:
        still = set(before.values) - set(before.changed(trainer.model))
        assert set(guard.report.without_gradient) == still
        assert len(gradient_alarms) == bool(still)
        assert all(name in gradient_alarms[0] for name in sorted(still, key=list(before.values).index)[:3])
    assert len(alarms) - len(gradient_alarms) == rollouts_are_wrong(kind, checkpointing)
    assert (watcher.report is not None) == (kind in ("grpo", "online_dpo"))
    if watcher.report:
        assert watcher.report.agrees != rollouts_are_wrong(kind, checkpointing)
        assert watcher.report.dropout == (mode == "lora" and kind == "grpo")  # OnlineDPO switches dropout off itself
    assert all(not parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters()) or error


def rollouts_are_wrong(kind: str, checkpointing: str) -> bool:
    """Among these trainers only GRPOTrainer before trl 0.22 generates with the cache under checkpointing."""
    return kind == "grpo" and checkpointing != "off" and SQUARE_MASK


def healed(model, tokenizer, folder):
    """Train with the repair; return the report of the guard."""
    gradients.require_input_grads(model)
    guard = guards.GradientGuard()
    make("trainer", model, tokenizer, folder, [guard]).train()
    return guard.report


def test_the_gradient_guard_stops_before_anything_is_trained(model, tokenizer, tmp_path):
    """In every stack: reentrant checkpointing with frozen embeddings and no hook."""
    model.get_input_embeddings().requires_grad_(False)
    checkpoint(model, reentrant=True)
    trainer = make("trainer", model, tokenizer, tmp_path, [guards.GradientGuard()])
    before = gradients.snapshot(model)
    with pytest.raises(guards.GuardTripped, match=r"after step 1, 24 of 25 .*require_input_grads") as trip:
        trainer.train()
    assert before.changed(model) == []
    assert trip.value.report.without_gradient[0] == "model.layers.0.self_attn.q_proj.weight"
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert healed(model, tokenizer, tmp_path).learns and len(before.changed(model)) == 25


def test_lora_is_told_before_the_first_backward_pass(model, tokenizer, tmp_path):
    """In every stack: torch's bare "element 0" comes after the guard's word, or not at all."""
    model = peft.get_peft_model(model, lora_config())
    checkpoint(model, reentrant=True)
    trainer = make("trainer", model, tokenizer, tmp_path, [guards.GradientGuard()])
    message = "the first backward pass will end in .element 0.*8 of 8 .*enable_input_require_grads"
    with pytest.raises(guards.GuardTripped, match=message) as trip:
        trainer.train()
    assert trip.value.report.without_gradient == tuple(gradients.snapshot(model).values)
    assert healed(model, tokenizer, tmp_path).learns


class Sometimes(torch.nn.Module):
    """A part that takes part in every second step, as an expert does."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.steps = model, model.config, 0
        self.expert = torch.nn.Linear(1, 1)

    def forward(self, **inputs):
        self.steps += 1
        out = self.model(**inputs)
        if self.steps % 2 == 0:
            out.loss = out.loss + self.expert(torch.ones(1, 1)).sum()
        return out


@pytest.mark.parametrize("steps", [1, 2])
def test_parts_that_rightly_get_no_gradient_in_a_step_can_be_waited_for(model, tokenizer, tmp_path, steps):
    """An expert that no token was routed to is no failure: wait for more steps."""
    guard = guards.GradientGuard(steps=steps)
    trainer = make("trainer", Sometimes(model), tokenizer, tmp_path, [guard])
    with pytest.raises(ValueError, match="unknown action 'explode'"):
        guards.GradientGuard("explode")
    if steps == 1:
        with pytest.raises(guards.GuardTripped, match=r"2 of 28 trainable tensors have no gradient: expert.weight"):
            trainer.train()
    else:
        trainer.train()
        assert guard.report.trainable


class Generating(transformers.Trainer):
    """A trainer of somebody's own: it calls generate before each step, with checkpointing on, as trl did."""

    prompts = ("3+4=", "12+19=", "5+11=", "0+0=", "17+2=", "13+14=", "9+9=", "10+10=")
    mode = True
    made: ClassVar[list] = []

    def training_step(self, model, inputs, *rest):
        model.train(self.mode)
        batch = self.processing_class(list(self.prompts), return_tensors="pt", padding=True)
        self.made.append(model.generate(**batch, max_new_tokens=4, do_sample=True, top_k=0))
        return super().training_step(model, inputs, *rest)


def generating(model, tokenizer, folder, callbacks, **options):
    options |= checkpointing_options("non-reentrant")
    trainer = plain_trainer(Generating, model, tokenizer, folder, callbacks, **options)
    trainer.made = []
    return trainer


def test_the_rollout_guard_stops_before_anything_is_trained(model, tokenizer, tmp_path):
    """Bare generate under checkpointing, in any trainer, LoRA with dropout; and how it is healed."""
    model = peft.get_peft_model(model, lora_config(lora_dropout=0.2))
    before = gradients.snapshot(model)
    guard = guards.RolloutGuard()
    trainer = generating(model, tokenizer, tmp_path, [guard])
    if not BARE_GENERATE_IS_WRONG:
        trainer.train()
        assert guard.report.agrees and guard.report.checkpointing == "non-reentrant"
        return
    with pytest.raises(guards.GuardTripped, match=r"RolloutGuard: generation in train mode .*does not draw") as trip:
        trainer.train()
    assert before.changed(model) == [] and trainer.made == []
    assert not trip.value.report.agrees and trip.value.report.dropout
    assert "generate" not in vars(model)
    handle = rollouts.repair(model)
    healed = guards.RolloutGuard()
    generating(model, tokenizer, tmp_path, [healed]).train()
    assert healed.report.agrees and healed.report.checkpointing == "non-reentrant"
    handle.remove()
    assert "generate" not in vars(model)


def test_the_rollout_guard_stops_a_gpt2(tokenizer, tmp_path):
    """Its model drops the cache in each release from transformers 4.53 on, also where other models are healed."""
    model = models.untrained(transformers.GPT2Config, vocab_size=len(tokenizer))
    trainer = generating(model, tokenizer, tmp_path, [guards.RolloutGuard()])
    if installed < Version("4.53"):
        trainer.train()
    else:
        with pytest.raises(guards.GuardTripped, match=r"RolloutGuard: generation in train mode .*does not draw"):
            trainer.train()
    assert len(trainer.made) == (2 if installed < Version("4.53") else 0)


def test_a_batch_without_padding_is_not_the_last_word(model, tokenizer, tmp_path):
    """Up to transformers 4.48 only padded batches go wrong: the guard waits for one. Eval mode has no such fault."""
    guard = guards.RolloutGuard()
    trainer = generating(model, tokenizer, tmp_path, [guard])
    trainer.mode = False
    trainer.train()
    assert guard.report is None and "generate" not in vars(model) and len(trainer.made) == 2
    guard = guards.RolloutGuard("warn")
    trainer = generating(model, tokenizer, tmp_path, [guard], max_steps=3)
    batches = iter([("12+19=", "13+14="), ("13+12=", "14+14="), Generating.prompts])
    reports = []
    original = trainer.training_step

    def step(*args):
        trainer.prompts = next(batches)
        loss = original(*args)
        reports.append(guard.report)
        return loss

    trainer.training_step = step
    trainer.train()
    assert len(reports[0].rollouts) == 2
    if SQUARE_MASK:
        assert reports[0].agrees and reports[1] is reports[0] and not reports[2].agrees
    elif DROPPED_CACHE:
        assert not reports[0].agrees and reports[2] is reports[0]
    else:
        assert reports[0].agrees and reports[1] is reports[0] and len(reports[2].rollouts) == 8
    assert "generate" not in vars(model)


def test_bf16_of_the_launcher_is_no_garbage(model, tokenizer, tmp_path, monkeypatch):
    """`accelerate launch --mixed_precision bf16`: the run computes in 16 bits, and its arguments do not know."""
    guard = guards.RolloutGuard()
    trainer = make("grpo", model, tokenizer, tmp_path, [guard], bf16=True)
    trainer.args.bf16 = False
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setitem(rollouts.ROUNDING, 4, -1.0)  # judged as float32, every run would be stopped
    trainer.train()
    assert guard.report.agrees


def test_a_mock_of_generate_is_said_to_be_none_that_can_be_judged(model, tokenizer, own_errors_are_told):
    """Tests of trl's own put one there, and the line was a raw AttributeError: 'Tensor' has no attribute 'logits'."""
    notices = []
    guard = guards.RolloutGuard(notices.append, tokenizer=tokenizer)
    model.generate = mock.MagicMock(return_value=torch.ones(2, 6, dtype=torch.long))
    model.train()
    args = types.SimpleNamespace(bf16=False, fp16=False, output_dir=None)
    guard.on_train_begin(args, None, None, model=model)
    ids = torch.ones(2, 3, dtype=torch.long)
    assert model.generate(input_ids=ids, attention_mask=ids).shape == (2, 6)
    guard.on_train_end(args, None, None)
    (notice,) = notices
    assert notice.kind == "not checked" and "Error" not in notice.message
    assert "a mock" in notice.message and "Next: " in notice.message
