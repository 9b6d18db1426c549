"""Reading TOML files that people write: a slip of the pen is said, with its place, and never passed over."""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: pathlib.Path) -> dict[str, Any]:
    """Return what a TOML file holds, unchecked."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


class Table:
    """A TOML table that is taken apart key by key, so that what is missing, of another type or unknown is said."""

    def __init__(self, file: str, content: Mapping[str, Any], error: type[Exception], where: str = ""):
        self.file, self.where, self.rest, self.kind = file, where, dict(content), error

    @classmethod
    def read(cls, path: pathlib.Path, error: type[Exception], name: str = "") -> "Table":
        """Read a whole file; `name` is what messages call it, else the file's own name."""
        name = name or path.name
        try:
            return cls(name, read_toml(path), error)
        except OSError as reason:
            raise error(f"{path} cannot be read: {reason.strerror}") from reason
        except tomllib.TOMLDecodeError as reason:
            raise error(f"{name} is no TOML: {reason}") from reason

    def error(self, key: str, problem: str) -> Exception:
        """Return the exception that says what is wrong with `key`, and where."""
        return self.kind(f"{self.file}: {self.where}{key}: {problem}")

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """Return and remove the value of `key`; without a default it must be there."""
        if key not in self.rest:
            if default is not None:
                return default
            raise self.error(key, f"it is missing (a {kind.__name__})")
        value = self.rest.pop(key)
        if type(value) is not kind:
            raise self.error(key, f"it is {value!r}, a {kind.__name__} is needed")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text that is not empty, or the default."""
        value: str = self.take(key, str, default)
        if default is None and not value.strip():
            raise self.error(key, "it is empty")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return a list of texts, none of them empty."""
        values = self.take(key, list, default)
        for value in values:
            if not isinstance(value, str) or not value.strip():
                raise self.error(key, f"{value!r} is no text")
        return tuple(values)

    def tables(self, key: str) -> list["Table"]:
        """Return an array of tables, each to be taken apart in turn; an absent one is empty."""
        values = self.take(key, list, [])
        for value in values:
            if not isinstance(value, dict):
                raise self.error(key, f"{value!r} is no table")
        return [
            Table(self.file, value, self.kind, f"{self.where}{key} {number}: ")
            for number, value in enumerate(values, start=1)
        ]

    def done(self) -> None:
        """Find keys that nobody asked for: a slip of the pen would go unnoticed."""
        if self.rest:
            raise self.error(next(iter(self.rest)), "no such key is known")
