"""Names of modules, and short texts for reports and messages."""

from collections.abc import Container, Sequence
from typing import Any


def list_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are: `a, b, c and 4 more`; an empty name is the whole model."""
    more = len(names) - 3
    return ", ".join(name or "the whole model" for name in names[:3]) + (f" and {more} more" if more > 0 else "")


def enclosing_name(name: str, names: Container[str]) -> str | None:
    """Return the nearest of `names` that is `name` or a module around it ("" is the whole model); None if none is."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name if name in names else None


def dtype_name(dtype: Any) -> str:
    """Return the name of torch's dtype without its module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
