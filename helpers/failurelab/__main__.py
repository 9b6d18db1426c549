"""The command `failurelab`; `python -m failurelab` is the same."""

import importlib.util
import sys


def main() -> int:
    """Run the command line, or say in a line what it needs: the core alone has no command."""
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
