"""The command `failurelab`; `python -m failurelab` is the same.

Its verbs are those of the course, where the course is installed: they are found by the entry-point group
`failurelab.commands`, for this package imports nothing of the course.
"""

import importlib.metadata
import importlib.util
import sys

GROUP = "failurelab.commands"


def main() -> int:
    """Run the command line, or say in a line what it needs: the take-home package alone has no command."""
    # Written so that an old Python can read it: whoever starts the course with one is told, and sees no SyntaxError.
    if sys.version_info < (3, 11):  # noqa: UP036
        print(
            f"ERROR Python {sys.version.split()[0]} runs this, and the course needs 3.11 or 3.12. Next: install one of "
            "these, then make setup PYTHON=python3.11, and .venv/bin/failurelab doctor",
            file=sys.stderr,
        )
        return 2
    commands = list(importlib.metadata.entry_points(group=GROUP))
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing or not commands:
        needed = " and ".join(missing or ["the course"])
        print(
            f"ERROR the command failurelab needs {needed}, which grpo-failurelab alone does not install: "
            "helpers and guards work without. Next: make in a clone of the course",
            file=sys.stderr,
        )
        return 2
    return commands[0].load()()


if __name__ == "__main__":
    sys.exit(main())
