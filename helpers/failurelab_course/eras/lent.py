"""Lend the torch of the Python that runs to an environment: a historic stack on a hosted runtime downloads no other."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re

from failurelab_course.eras import EraError


def link_torch(python: pathlib.Path, locked: str) -> str:
    """Let an environment use the torch of the Python that runs: links to its files, and to what it alone needs.

    Args:
        python: the environment's interpreter, of the same minor version.
        locked: the text of the environment's lock; what stands there is not lent.

    Returns:
        The version of torch.

    Raises:
        EraError: this Python has no torch.
    """
    (target,) = python.parent.parent.glob("lib/python*/site-packages")
    own = {normal(match[1]) for match in re.finditer(r"^([\w.-]+)==", locked, re.MULTILINE)}
    for name in sorted(_needs("torch") - own):
        distribution = importlib.metadata.distribution(name)
        for top in sorted({file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}):
            source, link = pathlib.Path(distribution.locate_file(top)), target / top
            if top == "__pycache__" or not source.exists() or link.is_symlink():
                continue
            if link.is_dir() and source.is_dir():  # a namespace that several share, such as nvidia
                for inner in source.iterdir():
                    if not (link / inner.name).exists():
                        (link / inner.name).symlink_to(inner)
            elif source.is_dir() and not (source / "__init__.py").exists() and ".dist-info" not in top:
                link.mkdir()
                for inner in source.iterdir():
                    (link / inner.name).symlink_to(inner)
            else:
                link.symlink_to(source)
    return installed("torch")


def _needs(name: str, known: set[str] | None = None) -> set[str]:
    """Return a distribution, and those that are installed of what it asks for, and so on."""
    known = set() if known is None else known
    try:
        asked = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        if name == "torch":
            raise EraError("this Python has no torch to lend to a historic stack. Next: pip install torch") from None
        return known
    known.add(normal(name))
    for line in asked:
        other = normal(re.match(r"[\w.-]+", line)[0])
        if "extra ==" not in line and other not in known:
            _needs(other, known)
    return known


def installed(name: str) -> str:
    """Return the version of a distribution in the Python that runs; empty if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def normal(name: str) -> str:
    """Return a distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
