"""A new user's script under the guards: chat prompts, two reward functions with weights, LoRA; broken in two ways.

Each row is one change of the healthy script, and what a guard must say of it. In every era, by trl's own classes: what
the course's own trainers spell out is left to the release here.
"""

import re
import tempfile

import peft
import pytest
import steps
import torch
import trl
from small import lora_config, said
from steps import has

from failurelab import gradients, guards
from failurelab_course import eras
from failurelab_course.experiments import models

pytestmark = pytest.mark.filterwarnings("ignore")

SUMS = [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]  # of one length: trl 0.14 has no attention mask


def right(completions, answer, **_):
    return [float(each[0]["content"].strip() == str(wanted)) for each, wanted in zip(completions, answer)]


def only_digits(completions, **_):
    return [0.5 if re.fullmatch(r"\d+", each[0]["content"].strip()) else 0.0 for each in completions]


def build(model, tokenizer, folder, adapted=True, max_steps=4, **more):
    """Return the script's trainer, not started; `more` is for the trainer."""
    rows = [([{"role": "user", "content": prompt}], answer) for prompt, answer in SUMS]
    options = {
        "max_steps": max_steps, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "reward_weights": [1.0, 0.5],
        "gradient_checkpointing": trl.GRPOConfig.gradient_checkpointing, "gradient_accumulation_steps": 1,
        "logging_steps": 1, "remove_unused_columns": False,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if has(name)}
    given = {"rewards": [right, only_digits], "rows": rows, "config": lora_config() if adapted else None, "more": more}
    return steps.trainer(model, tokenizer, folder, **given, **options)


def early_optimizer(model):
    """Return an optimizer that the script makes of the model before it has an adapter, and no schedule."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3), None


def loaded_for_use(model):
    """Return a model with an adapter that was loaded for use alone."""
    with tempfile.TemporaryDirectory() as saved:
        peft.get_peft_model(model, lora_config()).save_pretrained(saved)
        return peft.PeftModel.from_pretrained(models.load("tiny")[0], saved)


def watch(trainer, action="warn"):
    """Train under the guards; return their reports, and what they warned of, by guard."""
    own = [guards.GradientGuard(action), guards.UpdateGuard(action), guards.RewardGuard(trainer, action, groups=8)]
    for guard in [*own, guards.StepGuard(trainer, action)]:
        trainer.add_callback(guard)
    with said() as messages:
        trainer.train()
    return [guard.report for guard in own], [message.partition(": ")[::2] for message in messages]


def test_the_healthy_script_is_left_alone(model, tokenizer, tmp_path):
    (gradient, update, reward), said = watch(build(model, tokenizer, tmp_path))
    assert said == [] and gradient.learns and update.share > 0.99 and reward.groups >= 8


@pytest.mark.parametrize("trains", [False, True])
def test_the_guards_of_the_page_stop_a_run_that_trains_nothing(model, tokenizer, tmp_path, trains):
    """The code of docs/repairs.md, as it stands there."""
    page = (eras.root() / "docs" / "repairs.md").read_text()
    (code,) = re.findall(r"```python\n(from failurelab import guards\n.*?)```", page, re.DOTALL)
    options = {"max_steps": 8} | ({} if trains else {"optimizers": early_optimizer(model)})
    names = {"GRPOTrainer": lambda _, callbacks: build(model, tokenizer, tmp_path, callbacks=callbacks, **options)}
    exec(code, names)
    if trains:
        names["trainer"].train()
        return
    with pytest.raises(guards.GuardTripped, match="GradientGuard: "):
        names["trainer"].train()
    assert names["trainer"].state.global_step < 8


def test_an_adapter_that_no_optimizer_holds_is_told(model, tokenizer, tmp_path):
    trainer = build(model, tokenizer, tmp_path, optimizers=early_optimizer(model))
    before = gradients.snapshot(trainer.model)
    _, ((guard, message),) = watch(trainer)
    assert before.changed(trainer.model) == []  # it is what they say
    assert guard == "GradientGuard" and "the optimizer holds 0 of 8 trainable tensors" in message


def test_an_adapter_that_was_loaded_for_use_alone_stops_before_the_first_step(model, tokenizer, tmp_path):
    trainer = build(loaded_for_use(model), tokenizer, tmp_path, adapted=False)
    with pytest.raises(guards.GuardTripped, match=r"GradientGuard: .*is_trainable=True") as stopped:
        watch(trainer, "stop")
    assert trainer.state.global_step == 0 and not stopped.value.report.learns
