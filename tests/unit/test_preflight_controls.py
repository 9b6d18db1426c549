"""What a judge of logits takes for the whole sequence, and what stays frozen."""

import types

import pytest
import small
import torch

from failurelab import handles
from failurelab_preflight.finding import Verdict
from failurelab_preflight.judges.logits import LogitsJudge
from failurelab_preflight.training import Training


def test_what_is_frozen_stays_frozen():
    """PEFT's disable_adapter switches requires_grad on when it is left."""
    model = small.lora(small.qwen2())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with handles.keep_requires_grad(model), model.disable_adapter():
        pass
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("made", "noted"), [(12, True), (5, False), (3, False)], ids=["all", "last", "asked for"])
def test_rows_that_a_layer_of_the_script_keeps_are_not_the_whole_sequence(made, noted):
    """A head that is cut to as many rows as the longest completion needs makes more than shorter ones ask for."""
    trainer = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    judge = LogitsJudge(Training(trainer, {}))
    given = {"input_ids": torch.zeros(2, 12, dtype=torch.long), "logits_to_keep": 3}
    judge._note_rows(trainer.model, (), given, types.SimpleNamespace(logits=torch.zeros(2, made, 7)))
    answers = list(judge.answers())
    assert not [answer for answer in answers if answer.accuses]
    assert [answer.failure for answer in answers if answer.verdict is Verdict.NOTED] == ["F3a"] * noted
