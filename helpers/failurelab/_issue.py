"""Markdown to paste into an issue, without what is private: `--report FILE` of preflight and of diagnose.

An issue is public, and an answer repeats what it saw: a path in an error, a token in a line of the script, a host in a
log. A list of what is secret is never complete, so little is copied: of a diff the changed lines without the script's
comments and strings, of a log and of the script's own error no text at all. What is copied is cleaned.
"""

import functools
import getpass
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence

from failurelab import __version__

_PUBLIC = {"auto", "cuda", "false", "none", "root", "true", "localhost"}
_PATTERNS = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\w+://[^\s'\"]+", "<url>"),
        (r"[\w.+-]+@[\w-]+(\.[\w-]+)*", "<address>"),
        (r"\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b", "<host>"),
        (r"\b([\w-]+\.)+(com|org|net|io|internal|local|lan|corp|cloud|intra|home)\b(:\d+)?", "<host>"),
        (r"\b[A-Za-z]:\\[^\s'\"]+", "<path>"),
        (r"(?<![\w.)\]])~?/[\w.~@%+-][^\s'\",;:()]*", "<path>"),  # from the root or a home on
        # a folder and what lies in it, a model's name on a hub; metrics are called so too
        (r"(?<![\w.])(?!(completions|clip_ratio|sampling)/)[\w.-]*[A-Za-z][\w.-]*/[\w./-]*[A-Za-z][\w./-]*", "<path>"),
        (
            r"(?i)\b(\w*(passw|secret|credential|api_?key|(hf|hub|api|access)_token)\w*\s*[=:]\s*)\S+",
            r"\1<secret>",
        ),
        (r"\b(hf|sk|pk|gh[pousr]|glpat|xox[abp])[_-][\w-]{16,}", "<token>"),
        (r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{20,}|\b[A-Za-z\d]{32,}\b", "<token>"),
        (r"(?<!\w)'[^'\n]{25,}'(?!\w)", "'…'"),  # a row of the data
    )
]
_PIECE = re.compile(r"(\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')|\s*#.*|[\"'].*")


def private_words(words: Iterable[str] = ()) -> list[str]:
    """Return what is private on this machine, the longest first: its environment, its names, and `words`, options."""
    try:
        names = [getpass.getuser()]
    except (KeyError, OSError):  # a container's user that has no name
        names = []
    names += [platform.node(), platform.node().partition(".")[0], str(pathlib.Path.home())]
    found = {value for value in os.environ.values() if len(value) > 5} | {name for name in names if len(name) > 1}
    found |= {part for word in words for part in (word, *word.split("=")) if len(part) > 3 and part[0] != "-"}
    plain = re.compile(r"[\d.,:eE+-]*")
    return sorted((word for word in found if word.lower() not in _PUBLIC and not plain.fullmatch(word)), key=len)[::-1]


def clean(text: str, private: Sequence[str]) -> str:
    """Return a text without private words, and without what looks like a token, a path, an address or a host."""
    for word in private:
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "<private>", text)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


def changes(diff: str, private: Sequence[str]) -> list[str]:
    """Return the changed lines of a diff, without comments and the script's own strings: `…` stands in their place."""
    lines = [line for line in diff.splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]
    old = "\n".join(line for line in lines if line[0] == "-")

    def shorten(match: re.Match[str], line: str) -> str:
        if match[1] is None:
            return "" if match[0].lstrip()[0] == "#" else "…"
        return match[1] if line[0] == "+" and match[1][1:-1] not in old and len(match[1]) < 27 else "…"

    return [clean(_PIECE.sub(functools.partial(shorten, line=line), line), private) for line in lines]


def markdown(title: str, versions: Mapping[str, str], parts: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return the report; each part is a heading and lines that are clean, and is left out where it has none."""
    # a local build's label may name a company's index; CPU and CUDA are what torch itself says
    known = {name: re.sub(r"\+(?!cpu$|cu\d+$).*", "", version) for name, version in versions.items()}
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [f"### {title}", "", f"failurelab {__version__}, {system}", "", "| library | version |", "| --- | --- |"]
    lines += [f"| {name} | {version} |" for name, version in known.items()]
    for heading, text in parts:
        lines += ["", f"#### {heading}", "", *text] if text else []
    left = "Left out: paths, names, the environment, options, comments, strings and unchanged lines of the script."
    return "\n".join([*lines, "", f"{left} Read it before you paste it.", ""])
