"""`logits.repair`: a request for the last rows of logits is heard by either name, and the repair can be taken back."""

import pytest
import torch
from small import other_keep_argument, qwen2

from failurelab import logits

IDS = torch.arange(3, 9)[None]


@pytest.fixture
def model():
    return qwen2()


def rows(model, **keep):
    with torch.no_grad():
        return model(IDS, **keep).logits


def test_the_swallowed_name_is_heard(model):
    """Broken: all six rows come. Repaired: two, and they are the last two."""
    asked = {other_keep_argument(model): 2}
    every = rows(model)
    assert rows(model, **asked).shape[1] == 6
    with logits.repair(model):
        torch.testing.assert_close(rows(model, **asked), every[:, -2:])
        assert rows(model, **{logits.keep_argument(model): 3}).shape[1] == 3
        assert rows(model).shape[1] == 6
    assert rows(model, **asked).shape[1] == 6


def test_a_model_that_cannot_be_asked_is_refused(model):
    """Its forward names no such argument, so there is none to pass on."""

    class Deaf(type(model)):
        def forward(self, input_ids=None, attention_mask=None):
            return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    model.__class__ = Deaf
    with pytest.raises(ValueError, match=r"Deaf makes logits .* Next: score with logits\.completion_logps"):
        logits.repair(model)
