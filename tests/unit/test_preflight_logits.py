"""The judge of rows of logits (F3a), alone: the whole of it runs in tests of scripts."""

import types

import pytest
import torch

from failurelab.preflight.judges.logits import LogitsJudge


@pytest.mark.parametrize(("made", "verdict"), [(12, "FOUND"), (5, "NOT CHECKED")], ids=["all rows", "last rows"])
def test_rows_that_a_layer_of_the_script_keeps_are_not_the_whole_sequence(made, verdict):
    """A head that is cut to as many rows as the longest completion needs makes more than shorter ones ask for."""
    trainer = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    judge = LogitsJudge(types.SimpleNamespace(trainer=trainer, arguments={}))
    given = {"input_ids": torch.zeros(2, 12, dtype=torch.long), "logits_to_keep": 3}
    judge._note_rows(trainer.model, (), given, types.SimpleNamespace(logits=torch.zeros(2, made, 7)))
    finding = judge._judge_rows(None)
    assert (finding.failure, finding.verdict.value) == ("F3a", verdict)
