"""Markdown to paste into an issue: `--report FILE` of preflight.

An issue is public, and an answer repeats what it saw: a path in an error, a token in a line of the script, a host in a
log. A list of what is secret is never complete, so what is written is chosen: ids, what the registry says of
them, and versions. Nothing is copied of the script, its data, its log or the command line.
"""

import platform
import re
from collections.abc import Iterable, Mapping, Sequence

from failurelab import __version__
from failurelab.failures.loader import PACKAGES

# Without a local build's label, which may name a company's index; CPU and CUDA are what torch itself says.
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)*(\+(cpu|cu\d+)(?![\w.]))?")


def markdown(title: str, versions: Mapping[str, str], parts: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return the report, with the versions of the libraries under study.

    Args:
        title: the verdict, in ids.
        versions: package to version; of other packages nothing is said.
        parts: a heading and its lines each, of this package's own words; left out where it has no lines.
    """
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [f"### {title}", "", f"failurelab {__version__}, {system}", "", "| library | version |", "| --- | --- |"]
    for name in PACKAGES:
        if name in versions:
            known = _VERSION.match(versions[name])
            lines.append(f"| {name} | {known[0] if known else 'unknown'} |")
    for heading, text in parts:
        lines += ["", f"#### {heading}", "", *text] if text else []
    return "\n".join([*lines, "", "Figures and diffs stand in the answer itself: add those that you may show.", ""])
