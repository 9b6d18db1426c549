"""An expected failure says its reason; its absence, or another failure, is an error."""

import pytest

from failurelab_course.experiments.expect import UnexpectedOutcome, expect_failure


def test_the_expected_failure_is_printed(capsys):
    with expect_failure(RuntimeError, match="element 0"):
        raise RuntimeError("element 0 of tensors does not require grad\nsecond line")
    assert capsys.readouterr().out == "RuntimeError: element 0 of tensors does not require grad (expected)\n"


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (None, "nothing was raised"),  # a failure that has gone away must not pass unseen
        (NameError("trainr"), "NameError was raised"),  # a typing error in the cell
        (RuntimeError("out of memory"), "another reason"),
    ],
)
def test_another_outcome_is_an_error(raised, says):
    with pytest.raises(UnexpectedOutcome, match=says) as seen, expect_failure(RuntimeError, match="element 0"):
        if raised:
            raise raised
    assert seen.value.__cause__ is raised


def test_an_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt), expect_failure(RuntimeError):
        raise KeyboardInterrupt
