"""The errors that a user is told in one line: what was found, why it matters, and the next step.

Errors of this package's own, in what a guard or preflight does beside a run, end in "could not check", for they must
end nobody's training. So a defect of ours looks like a run that cannot be judged. With `FAILURELAB_OWN_ERRORS=raise` in
the environment they are raised where they happen: tests of this package, and of a new guard, run so.
"""

import os
from collections.abc import Callable
from typing import Any

OWN_ERRORS = "FAILURELAB_OWN_ERRORS"


def raises_own(error: BaseException) -> bool:
    """Whether an error of this package's own is to be raised; one that says the next step is an answer, and is not."""
    return os.environ.get(OWN_ERRORS) == "raise" and "Next: " not in str(error)


def attempt(work: Callable[..., None], *args: Any) -> str:
    """Do work of this package's own beside a run; return what it raised, such as `rows: KeyError: 'ids'`, or ""."""
    try:
        work(*args)
    except Exception as error:
        if raises_own(error):
            raise
        return f"{work.__name__.strip('_')}: {type(error).__name__}: {error}"
    return ""


class FailureLabError(Exception):
    """Something that a user can mend; the message says what was found and the next step.

    `exit_status` is what the command ends with: 1, a failure; 2, a wrong call; 3, the question could not be asked.
    """

    exit_status = 1

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook: the frames of this package say nothing more."""
        return [f"{type(self).__name__}: {self}"]
