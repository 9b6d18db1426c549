"""Weights that something else than the optimizer changes once training has begun: F8, F9 and F19 are not held then."""

import pytest
import torch
from steps import trainer
from transformers.trainer_callback import TrainerCallback

from failurelab_preflight.finding import Verdict
from failurelab_preflight.judges.between import BetweenJudge
from failurelab_preflight.judges.textbook import StepJudge
from failurelab_preflight.training import Training

RATE = 1e-4


class Writes(TrainerCallback):
    """A callback of the script's; `does` is asked at one event with each parameter, and what it was at first."""

    def __init__(self, event, does):
        self._does, self._first = does, None
        setattr(self, event, self._called)

    def on_train_begin(self, args, state, control, model=None, **_):
        self._first = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def _called(self, args, state, control, model=None, **_):
        for parameter, first in zip(model.parameters(), self._first):
            self._does(parameter, first)


def taken_back(parameter, first):
    parameter.copy_(first)


def shrunk(parameter, first):
    parameter.mul_(0.99)


def watch(made, *callbacks, **more):
    """Train under the judge, and callbacks that come after it; return what it answers."""
    training = Training(made, {"learning_rate": RATE}, own=lambda file: file == __file__, **more)
    step, between = StepJudge(training), BetweenJudge(training)
    with between.listening(), step.listening():
        for callback in callbacks:
            made.add_callback(callback)
        made.train()
    return list(between.answers())


LOST = {"F9": Verdict.FOUND, "F8": Verdict.NOT_CHECKED, "F19": Verdict.NOT_CHECKED}


@pytest.mark.parametrize(
    ("event", "does", "wanted"),
    [
        ("on_step_end", taken_back, LOST),
        ("on_step_end", shrunk, dict.fromkeys(LOST, Verdict.NOT_CHECKED)),
        ("on_pre_optimizer_step", shrunk, dict.fromkeys(LOST, Verdict.NOT_CHECKED)),
        ("on_step_end", lambda parameter, first: None, {}),
    ],
)
def test_what_a_callback_writes_into_the_weights(event, does, wanted, model, tokenizer, tmp_path):
    """A step that was rounded away behind the optimizer was HELD by the dtype of the load."""
    made = trainer(model, tokenizer, tmp_path, max_steps=3, learning_rate=RATE, lr_scheduler_type="constant")
    made.ref_model = None
    made.add_callback(Writes(event, does))
    told = {answer.failure: answer for answer in watch(made, adapters=["a trained one"])}
    assert {failure: answer.verdict for failure, answer in told.items()} == wanted
    assert not wanted or "Writes" in told["F9"].evidence + told["F9"].why


@pytest.mark.parametrize("synced", [True, False])
def test_a_reference_that_is_changed_on_the_way(synced, model, tokenizer, tmp_path):
    """It was compared as training began."""
    made = trainer(model, tokenizer, tmp_path, beta=0.1)
    seen = BetweenJudge(Training(made, {"learning_rate": RATE, "beta": 0.1}))
    made.ref_model = torch.nn.Linear(2, 2)
    seen.on_train_begin(None, None, None)
    if synced:
        torch.nn.init.zeros_(made.ref_model.weight)
    seen.on_step_begin(None, None, None)
    assert [answer.failure for answer in seen.answers()] == ["F19"] * synced


def test_a_policy_that_a_judge_moves_for_a_step_is_not_the_script_s(model, tokenizer, tmp_path):
    made, moved = trainer(model, tokenizer, tmp_path, max_steps=3, learning_rate=RATE, beta=0.1), []
    looks = Writes("on_pre_optimizer_step", lambda parameter, first: moved.append(parameter.ne(first).any()))
    assert not watch(made, looks) and any(moved)
