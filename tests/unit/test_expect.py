"""An expected failure says its reason; its absence, or another failure, is an error."""

import pytest

from failurelab_course.experiments.expect import UnexpectedOutcome, expect_failure


def test_the_expected_failure_is_printed_and_kept(capsys):
    """A learner reads type and message, marked as expected."""
    with expect_failure(RuntimeError, match="element 0") as caught:
        raise RuntimeError("element 0 of tensors does not require grad\nsecond line")
    assert capsys.readouterr().out == "RuntimeError: element 0 of tensors does not require grad (expected)\n"
    assert "second line" in str(caught.error)


def test_nothing_raised_is_an_error():
    """A failure that has gone away must not pass unseen."""
    with pytest.raises(UnexpectedOutcome, match="nothing was raised"), expect_failure(RuntimeError):
        pass


def test_another_type_is_an_error():
    """A typing error in the cell is not the failure under study."""
    with pytest.raises(UnexpectedOutcome, match="NameError was raised") as seen, expect_failure(RuntimeError):
        raise NameError("trainr")
    assert isinstance(seen.value.__cause__, NameError)


def test_another_message_is_an_error():
    """The same type for another reason is not the failure under study."""
    with pytest.raises(UnexpectedOutcome, match="another reason"), expect_failure(RuntimeError, match="element 0"):
        raise RuntimeError("out of memory")


def test_an_interrupt_passes_through():
    """Ctrl-C ends the cell; it is no outcome."""
    with pytest.raises(KeyboardInterrupt), expect_failure(RuntimeError):
        raise KeyboardInterrupt
