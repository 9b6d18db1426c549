"""The command `failurelab`; `python -m failurelab` is the same."""

import importlib.util
import sys


def main() -> int:
    """Run the command line, or say in a line what it needs: the core alone has no command."""
    # Written so that an old Python can read it: whoever starts the course with one is told, and sees no SyntaxError.
    if sys.version_info < (3, 11):  # noqa: UP036
        print(
            f"ERROR Python {sys.version.split()[0]} runs this, and the course needs 3.11 or 3.12. Next: install one of "
            "these, then make setup PYTHON=python3.11, and .venv/bin/failurelab doctor",
            file=sys.stderr,
        )
        return 2
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"ERROR the command failurelab needs {' and '.join(missing)}, which the core alone does not install: "
            "helpers and guards work without. Next: pip install 'failurelab[course]', or make in a clone of the course",
            file=sys.stderr,
        )
        return 2
    from .cli import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
