"""A new user's script under the guards: chat prompts, two reward functions with weights, LoRA; broken in eight ways.

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

from failurelab import guards
from failurelab_course import eras
from failurelab_course.experiments import models

pytestmark = pytest.mark.filterwarnings("ignore")

SUMS = [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]  # of one length: trl 0.14 has no attention mask


def right(completions, answer, **_):
    return [float(each[0]["content"].strip() == str(wanted)) for each, wanted in zip(completions, answer)]


def right_as_text(completions, answer, **_):
    """Compare a text with the number that the dataset has: never equal."""
    found = [re.search(r"\d+", each[0]["content"]) for each in completions]
    return [2.0 if match and match.group() == wanted else 0.0 for match, wanted in zip(found, answer)]


def only_digits(completions, **_):
    return [0.5 if re.fullmatch(r"\d+", each[0]["content"].strip()) else 0.0 for each in completions]


def tagged(completions, answer, **_):
    found = [re.search(r"<answer>(.*?)</answer>", each[0]["content"]) for each in completions]
    return [float(match is not None and match.group(1) == str(wanted)) for match, wanted in zip(found, answer)]


def always(value):
    return lambda completions, **_: [value] * len(completions)


def build(model, tokenizer, folder, *, functions=(right, only_digits), adapter="config", optimizer=False, **options):
    """Return the script's trainer, not started.

    The adapter is put on by trl (`config`), or loaded for use alone (`frozen`). `optimizer`:
    made by the script, of the model before it has an adapter.
    """
    more = {"callbacks": options.pop("callbacks", None)}
    if optimizer:
        more["optimizers"] = torch.optim.AdamW(model.parameters(), lr=1e-3), None
    if adapter == "frozen":
        with tempfile.TemporaryDirectory() as saved:
            peft.get_peft_model(model, lora_config()).save_pretrained(saved)
            model = peft.PeftModel.from_pretrained(models.load("tiny")[0], saved)
    rows = [([{"role": "user", "content": prompt}], answer) for prompt, answer in SUMS]
    given = {"rewards": functions, "rows": rows, "more": more, "config": lora_config() if adapter == "config" else None}
    options = {
        "max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "gradient_accumulation_steps": 1,
        "gradient_checkpointing": trl.GRPOConfig.gradient_checkpointing, "reward_weights": [1.0, 0.5],
        "logging_steps": 1, "remove_unused_columns": False,
    } | options  # fmt: skip
    return steps.trainer(model, tokenizer, folder, **given, **{name: options[name] for name in options if has(name)})


def watch(trainer, action="warn"):
    """Train under the guards; return them by name, and what they warned of, by guard."""
    own = [guards.GradientGuard(action), guards.UpdateGuard(action), guards.RewardGuard(trainer, action, groups=8)]
    for guard in [*own, guards.StepGuard(trainer, action)]:
        trainer.add_callback(guard)
    with said() as messages:
        trainer.train()
    by_guard = {}
    for text in messages:
        guard, _, message = text.partition(": ")
        by_guard.setdefault(guard, []).append(message)
    return {type(guard).__name__: guard for guard in own}, by_guard


def test_the_healthy_script_is_left_alone(model, tokenizer, tmp_path):
    own, said = watch(build(model, tokenizer, tmp_path))
    assert said == {} and own["GradientGuard"].report.learns
    assert own["RewardGuard"].report.groups >= 8 and own["UpdateGuard"].report.share > 0.99


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"functions": (right_as_text, tagged)},
            "reward_funcs[0] right_as_text gives 0; reward_funcs[1] tagged gives 0.",
        ),
        ({"top_k": 1, "temperature": 0.01}, "all completions of a prompt are the same text"),
        ({"functions": (right, always(1.0)), "reward_weights": [0.0, 1.0]}, "reward_funcs[0] right gives 0 to 1"),
    ],
    ids=["number-text-and-tags", "greedy", "weight"],
)
def test_rewards_that_are_equal_stop_nothing_unasked(model, tokenizer, tmp_path, change, told):
    """One curve, flat, and several causes: what each function pays is told beside."""
    if "reward_weights" in change and not has("reward_weights"):
        pytest.skip("this trl has no reward_weights")
    own, said = watch(build(model, tokenizer, tmp_path, **change))
    assert own["RewardGuard"].report.flat == own["RewardGuard"].report.groups
    (message,) = said["RewardGuard"]
    assert told in message


@pytest.mark.parametrize(
    ("change", "guard"),
    [
        ({"optimizer": True}, "GradientGuard"),
        ({}, None),
    ],
    ids=["optimizer", "healthy"],
)
def test_the_guards_of_the_page_stop_a_run_that_trains_nothing(model, tokenizer, tmp_path, change, guard):
    """The code of docs/repairs.md, as it stands there."""
    page = (eras.root() / "docs" / "repairs.md").read_text()
    (code,) = re.findall(r"```python\n(from failurelab import guards\n.*?)```", page, re.DOTALL)
    options = {"max_steps": 8} | change
    names = {"GRPOTrainer": lambda _, callbacks: build(model, tokenizer, tmp_path, callbacks=callbacks, **options)}
    exec(code, names)
    if guard is None:
        names["trainer"].train()
        return
    with pytest.raises(guards.GuardTripped, match=f"{guard}: "):
        names["trainer"].train()
    assert names["trainer"].state.global_step < 8


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({"optimizer": True}, "warn"),
        ({"adapter": "frozen", "beta": 0.04}, "warn"),
        ({"adapter": "frozen"}, "stop"),
    ],
    ids=["before-trl-wraps", "frozen-with-reference", "frozen, stopped"],
)
def test_an_adapter_that_no_optimizer_holds(model, tokenizer, tmp_path, change, action):
    """Told, or stopped, before the first step."""
    trainer = build(model, tokenizer, tmp_path, **change)
    before = {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters() if "lora" in name}
    if action == "stop":
        with pytest.raises(guards.GuardTripped, match=r"GradientGuard: .*is_trainable=True") as stopped:
            watch(trainer, action)
        assert trainer.state.global_step == 0 and not stopped.value.report.learns
        return
    try:
        _, said = watch(trainer)
    except RuntimeError as error:  # torch's own end of a run without anything to go backward through
        assert "element 0" in str(error) and change["adapter"] == "frozen"  # trl 0.14 with a reference too
        return
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(now[name].detach(), before[name]) for name in before)  # it is what they say
    (message,) = said["GradientGuard"]
    assert "UpdateGuard" not in said
    assert "optimizer" not in change or "the optimizer holds 0 of 8 trainable tensors" in message
