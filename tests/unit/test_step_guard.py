"""StepGuard: what it finds stops or warns, and a run with it is the same run."""

import json
import random

import pytest
import torch
import transformers
from small import said
from steps import guarded_and_not, ones, planted, right, trainer

from failurelab import guards, handles, textbook

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


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


def test_the_run_is_the_same_with_and_without_it(trained, tmp_path):
    """Bit-equal weights after three steps, also where rewards are random and a wrong gradient is looked into."""

    def noisy(completions, **_):
        return [random.random() + float(torch.rand(())) for _ in completions]

    def make(policy):
        random.seed(0)
        options = {"kind": planted(loss=torch.neg), "rewards": [ones, noisy], "learning_rate": 1e-3, "max_steps": 3}
        return trainer(policy, trained[1], tmp_path, **options)

    guard, same = guarded_and_not(make, trained[0], every=2)
    assert guard.report.verdict == "FOUND" and same


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
    config = transformers.Qwen2Config(**SMALL, vocab_size=len(tokenizer), num_labels=1, pad_token_id=0)
    judge = transformers.Qwen2ForSequenceClassification(config)
    made = trainer(model, tokenizer, tmp_path, rewards=[judge], more={"reward_processing_classes": tokenizer})
    guard, other = guards.StepGuard(made), guards.RolloutGuard("warn")
    for each in (guard, other) if first else (other, guard):
        made.add_callback(each)
    with said() as messages:
        made.train()
    assert guard.report.verdict == "HELD" and other.report.agrees and not messages
