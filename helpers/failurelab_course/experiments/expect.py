"""Failures that are expected, so that their absence is an error.

A notebook that shows an exception needs it to be raised, and for the stated reason. A cell tag (`raises-exception`)
cannot say the reason, and papermill ignores it; this context manager says both and works everywhere.
"""

import contextlib
import re
from collections.abc import Iterator


class UnexpectedOutcome(AssertionError):
    """Nothing was raised where a failure was expected, or another failure was raised."""


@contextlib.contextmanager
def expect_failure(kind: type[BaseException], match: str = "") -> Iterator[None]:
    """Run a block that must raise `kind`, or a subclass, with a message that `match`, an expression, finds.

    Prints the first line of the message as `Type: message (expected)`.

    Raises:
        UnexpectedOutcome: nothing was raised, or the type or message is another one; the original is its cause.
    """
    try:
        yield
    except BaseException as error:
        text = str(error)
        if not isinstance(error, kind):
            if not isinstance(error, Exception):
                raise  # an interrupt or an exit asked for from outside is no outcome of the block
            raise UnexpectedOutcome(
                f"expected {kind.__name__}, but {type(error).__name__} was raised: {_first_line(text)}"
            ) from error
        if not re.search(match, text):
            raise UnexpectedOutcome(
                f"{kind.__name__} was raised as expected, but for another reason: {_first_line(text)!r} "
                f"does not match {match!r}"
            ) from error
        print(f"{type(error).__name__}: {_first_line(text)} (expected)")
    else:
        raise UnexpectedOutcome(f"expected {kind.__name__} matching {match!r}, but nothing was raised")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
