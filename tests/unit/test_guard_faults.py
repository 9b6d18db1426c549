"""What a guard does for itself may fail anywhere: the run goes on, and the guard says once that it could not check.

Faults are injected at lines (`injected`), and then come forwards and trainers as people have them.
"""

import copy
import logging
import re
import types

import injected
import pytest
import torch
import transformers
from small import said

from failurelab import guards, logits

# Where no error is caught, a guard only hands on: to its own check, or to what the run has called.
HANDS_ON = re.compile(r"self\._?check\(|return (await )?(generate|unwrap)\(|batch = generate\(|return batch")


@pytest.mark.parametrize("name", injected.GUARDS)
def test_a_fault_in_a_guard_costs_one_warning_and_no_run(name, own_errors_are_told):
    count, others, outside = injected.inject(name, every=29)
    assert others == {} and count > 2
    assert [line for line in outside if not HANDS_ON.search(line)] == []


def train(model, tokenizer, build=injected.grpo, before=lambda trainer: None):
    model = copy.deepcopy(model)
    with said() as messages:
        trainer = build(model, tokenizer)
        for make, _ in injected.GUARDS.values():
            trainer.add_callback(make(trainer, "stop"))
        before(trainer)
        trainer.train()
    assert trainer.state.global_step == 2
    return messages


def sends_by_itself(trainer):
    """A forward that was replaced: it asks for the last rows, and whoever asks too gives the argument twice."""
    model, name = trainer.model, logits.keep_argument(trainer.model)
    logits._keeps.pop(model)
    forward = model.forward

    def replaced(*args, **options):
        if torch.is_grad_enabled() or options.keys() & {"logits_to_keep", "num_logits_to_keep"}:
            return forward(*args, **options, **{name: 0})
        return forward(*args, **options)

    model.forward = replaced


def supervised(model, tokenizer):
    return injected.late_scores(model, tokenizer, transformers.Trainer)


def test_a_forward_that_sends_the_argument_itself_trains_under_the_guard(trained):
    """Nothing is wrong with such a run: the guard asks the model for nothing. keep_argument says that it takes none."""
    (message,) = train(*trained, build=supervised, before=sends_by_itself)
    assert "RewardGuard: could not check: the trainer has no reward functions" in message
    model = copy.deepcopy(trained[0])
    sends_by_itself(types.SimpleNamespace(model=model))
    assert logits.keep_argument(model) is None


def test_what_is_found_is_told_though_the_cure_cannot_be_asked_for(trained, monkeypatch):
    """The probe for the argument's name raises; the tokens are scored at the wrong place all the same."""
    monkeypatch.setattr(guards.logits, "keep_argument", lambda model: 1 / 0)
    with pytest.raises(guards.GuardTripped, match=r"scored against the token .*could not be found: ZeroDivisionError"):
        trainer = injected.late_scores(copy.deepcopy(trained[0]), trained[1])
        monkeypatch.setattr(guards.logits, "_WASTE", 9)
        trainer.add_callback(guards.LogitsGuard())
        trainer.train()


class Overrides:
    """What people override: each adds nothing but itself, in front of any trainer's."""

    def training_step(self, *args, **options):
        return super().training_step(*args, **options)

    def compute_loss(self, model, inputs, *args, **options):
        return super().compute_loss(model, inputs, *args, **options) * 1.0

    def generate(self, *args, **options):
        raise RuntimeError("of somebody's own, and not called")


def overriding(model, tokenizer):
    trainer = injected.grpo(model, tokenizer)
    trainer.__class__ = type("Own", (Overrides, type(trainer)), {})
    return trainer


class Doubles(transformers.TrainerCallback):
    """Replaces `generate` and `forward` of the model by functions, as patches do."""

    def on_train_begin(self, args, state, control, model=None, **_):
        for name in ("generate", "forward"):
            before = getattr(model, name)
            setattr(model, name, lambda *args, before=before, **options: before(*args, **options))


def test_a_trainer_of_ones_own_trains_under_every_guard_that_says_so(trained, caplog):
    """Methods overridden, and the model's own replaced by plain functions after the guards have begun to listen."""
    with caplog.at_level(logging.INFO, logger="failurelab.guards"):
        assert train(*trained, build=overriding, before=lambda trainer: trainer.add_callback(Doubles())) == []
    told = {record.getMessage().split(":")[0] for record in caplog.records if record.name == "failurelab.guards"}
    assert told == set(injected.GUARDS) and not any("\n" in line for line in caplog.messages)
