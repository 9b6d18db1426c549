"""StepGuard: what it finds stops or warns, and a run with it is the same run."""

import functools
import json
import random

import pytest
import torch
from engine import Engine, colocate
from small import reward_model, said
from steps import (
    has,
    needs_online_dpo,
    needs_rloo,
    ones,
    online_dpo,
    planted,
    right,
    rloo,
    step_guard,
    train_with_and_without,
    trainer,
)

from failurelab import guards, handles, textbook


def train(made, **options):
    guard = guards.StepGuard(made, **options)
    made.add_callback(guard)
    with said() as messages:
        made.train()
    return guard, messages


def test_a_wrong_gradient_stops_the_run(model, tokenizer, tmp_path):
    made = trainer(model, tokenizer, tmp_path, kind=planted(loss=lambda loss: -loss))
    made.add_callback(guards.StepGuard(made, "stop"))
    with pytest.raises(guards.GuardTripped, match="opposite sign") as stopped:
        made.train()
    assert stopped.value.report.named == "opposite sign"


def noisy(completions, **_):
    return [random.random() + float(torch.rand(())) for _ in completions]


MOVED = {"learning_rate": 1e-3, "max_steps": 3}
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.1, "learning_rate": 1e-2}
needs_sync = pytest.mark.skipif(not has("sync_ref_model"), reason="this release keeps its reference")


@pytest.mark.parametrize(
    ("build", "verdict"),
    [
        # Rewards are random, and a wrong gradient is looked into.
        pytest.param(
            functools.partial(trainer, kind=planted(loss=torch.neg), rewards=[ones, noisy]), "FOUND", id="GRPO"
        ),
        pytest.param(functools.partial(trainer, **SYNCED), "HELD", id="reference", marks=needs_sync),
        pytest.param(trainer, "HELD", id="engine"),
        pytest.param(online_dpo, "HELD", id="Online DPO", marks=needs_online_dpo),
        pytest.param(functools.partial(rloo, beta=0.2), "HELD", id="RLOO", marks=needs_rloo),
    ],
)
def test_a_run_with_the_guard_ends_at_the_same_weights(build, verdict, trained, tmp_path, monkeypatch):
    def make(policy):
        random.seed(0)
        engine = colocate(monkeypatch, Engine(policy, trained[1])) if build is trainer else {}
        return build(policy, trained[1], tmp_path, **MOVED | engine)

    guard, same = train_with_and_without(make, trained[0], step_guard(every=2))
    assert guard.report.verdict == verdict and same


def test_rewards_are_asked_once(model, tokenizer, tmp_path):
    calls = []

    def counted(completions, answer, **_):
        calls.append(len(completions))
        return right(completions, answer)

    _, told = train(trainer(model, tokenizer, tmp_path, rewards=[counted, ones]))
    assert sum(calls) == 32 and not told
    notices = json.loads((tmp_path / "failurelab.json").read_text())["notices"]  # clipping, of ratios that are 1
    kinds = {(notice["kind"], "NOT CHECKED" in notice["message"]) for notice in notices}
    assert kinds == {("n/a", True), ("held", False)}


def test_equal_rewards_are_told_in_words_of_f10(model, tokenizer, tmp_path):
    made = trainer(model, tokenizer, tmp_path, rewards=[lambda completions, **_: [1.0] * len(completions)])
    guard, told = train(made)
    assert guard.report.verdict == "NO GRADIENT" and any("every advantage is 0" in line for line in told)


def test_another_trainer_is_told_in_one_line():
    state = type("State", (), {"global_step": 0})()
    guard = guards.StepGuard(other := type("SFTTrainer", (), {})())
    with pytest.warns(guards.GuardWarning, match="no textbook here for SFTTrainer"):
        guard.on_train_begin(None, state, None)
    assert other and guard.report is None


def test_every_nth_step_is_compared(model, tokenizer, tmp_path, monkeypatch):
    steps, compare_step = [], textbook.compare_step
    monkeypatch.setattr(
        textbook,
        "compare_step",
        lambda made, *rest, **options: steps.append(made.state.global_step + 1) or compare_step(made, *rest, **options),
    )
    train(trainer(model, tokenizer, tmp_path, max_steps=5), every=2)
    assert steps == [1, 2, 4]


def test_other_guards_do_not_listen_to_its_own_passes(model, tokenizer, tmp_path):
    """LogitsGuard judged the textbook's forward pass in place of the trainer's, and said HELD of it."""
    heard = []

    class Listening(guards.LogitsGuard):
        def _listen(self, *called):
            heard.append(handles.is_unseen())

    made = trainer(model, tokenizer, tmp_path)
    made.add_callback(Listening())
    guard, told = train(made)
    assert guard.report.verdict == "HELD" and not told and heard and not any(heard)


@pytest.mark.parametrize("first", [True, False])
def test_what_other_guards_generate_is_no_draw_of_the_trainer(first, model, tokenizer, tmp_path):
    """RolloutGuard generates twice through the trainer's own `generate`, which the recorder may have wrapped before it.

    A reward model is not given the tokens by which a function's draws are found.
    """
    more = {"reward_processing_classes": tokenizer}
    made = trainer(model, tokenizer, tmp_path, rewards=[reward_model(tokenizer)], more=more)
    guard, other = guards.StepGuard(made), guards.RolloutGuard("warn")
    for each in (guard, other) if first else (other, guard):
        made.add_callback(each)
    with said() as messages:
        made.train()
    assert guard.report.verdict == "HELD" and other.report.agrees and not messages
