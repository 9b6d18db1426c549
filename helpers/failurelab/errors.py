"""The errors that a user is told in one line: what was found, why it matters, and the next step."""


class FailureLabError(Exception):
    """Something that a user can mend; the message says what was found and the next step.

    `exit_status` is what the command ends with: 1, a failure; 2, a wrong call; 3, the question could not be asked.
    """

    exit_status = 1

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook: the frames of this package say nothing more."""
        return [f"{type(self).__name__}: {self}"]
