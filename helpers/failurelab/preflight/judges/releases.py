"""Names that the installed release of trl or transformers does not have: which release took them, and what to write.

A keyword that a configuration or a trainer does not take is left out for this run (`stage.releases`), so that all else
is judged; an import, an attribute or a key of a file ends the run, and is undone by an edit in another one. What is
said of releases comes from the table of names (`failures.names`).
"""

import importlib
import inspect
import re
import traceback
import types
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from failurelab.failures import names
from failurelab.preflight import repairs
from failurelab.preflight.answer import Finding
from failurelab.preflight.launcher_line import OF_LAUNCH
from failurelab.preflight.script_error import causes
from failurelab.preflight.stage.releases import LeftOut, installed

FAILURE = "release"
_IMPORT = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'")
_CALL = re.compile(r"(?:got an unexpected keyword argument|takes (?:from \d+ to )?\d+ positional arguments? but \d+)")


def of_keywords(left_out: LeftOut, went_on: bool) -> Iterator[Finding]:
    """Yield what was left out of the script's own calls, a finding for each class.

    Args:
        left_out: what was.
        went_on: whether the script came to its training without it.
    """
    have = ", ".join(f"{package} {version}" for package, version in installed().items())
    for (kind, owner), keywords in left_out.of.items():
        said = dict.fromkeys(said or f"Nothing is known of `{name}`." for name, (_, said) in keywords.items())
        renamed = {old: new for old, (new, _) in keywords.items() if new}
        dropped = [name for name in keywords if name not in renamed]
        write = [f"{new} in the place of {old}" for old, new in renamed.items()]
        repair = [f"write {', '.join(write)}"] * bool(write) + [f"leave out {', '.join(dropped)}"] * bool(dropped)
        went = [f"with {', '.join(write)}"] * bool(write) + [f"without {', '.join(dropped)}"] * bool(dropped)
        yield Finding(
            FAILURE,
            f"{owner} takes no {', '.join(keywords)} here ({have}), and a TypeError ends the run: {' '.join(said)} "
            f"This run goes on {' and '.join(went)}",
            f"{'; '.join(repair).capitalize()}.",
            repairs.Keywords(kind, {old: new for old, (new, _) in keywords.items()}),
            tried="the script comes to its training" if went_on else "",
            ends=True,
            part=owner,
        )


def of_files(left_out: LeftOut) -> Iterator[Finding]:
    """Yield the keys of a file that trl's parser drops without a word, where a release had them, or one is near."""
    for name in dict.fromkeys(left_out.unread):
        said = "" if name in OF_LAUNCH else names.explain(f"not used by the HfArgumentParser: ['{name}']", installed())
        if "went with" in said or "Near to it" in said or "came with" in said:
            yield Finding.suspected(
                FAILURE,
                f"the file has {name}, which no class takes here, and trl trains without it and says nothing: {said}",
                "what it was to do is not known",
                f"Take {name} out, or write what this release has.",
                part=name,
            )


def of_error(error: BaseException, own: Any) -> Iterator[Finding]:
    """Yield what an error of the script says of releases, with the edit that goes on without the name.

    Args:
        error: that ended it.
        own: whether a file of code is the script's own, by its path.
    """
    for link in causes(error):
        text = f"{type(link).__name__}: {link}"
        if said := names.explain(text, installed()):
            first = re.sub(r" \(/[^)]*\)", "", " ".join(str(link).split())[:200])
            repair, undo = _undo(link, text, own)
            repair = repair or _install(said)
            yield Finding(FAILURE, f"{first}. {said}", repair, undo, ends=True, part=_part(text))
            return


def _part(text: str) -> str:
    match = _IMPORT.search(text)
    return match["name"] if match else " ".join(re.findall(r"'(\w+)'", text))[:60]


def _undo(error: BaseException, text: str, own: Any) -> tuple[str, Any]:
    """Return what to do, in words and as an edit; None where there is none."""
    if match := _IMPORT.search(text):
        new = _imported(names.replacement(text), match["name"])
        words = f"from {new} import {match['name']}" if new else ""
        file = _own_line(error, own)[0]
        undo = tuple(repairs.Import(file, match["name"], module) for module in ([new] if new else []) + [None])
        return f"Write {words}." if words else f"Take {match['name']} out of the import, and what uses it.", undo
    if options := names.unused_options(text):
        return f"Take {', '.join(options)} out.", repairs.WithoutSettings(tuple(options))
    function = _function(error, own) if _CALL.search(text) else None
    if function is not None:
        return "Let it take *args and **kwargs, and hand them on.", repairs.AnyKeywords(function, positional=True)
    new, attribute = names.replacement(text), re.search(r"has no attribute '(\w+)'", text)
    if new and attribute:
        return f"Write {new}.", repairs.Attribute(*_own_line(error, own), attribute[1], new)
    return "", None


def _install(said: str) -> str:
    """Return which releases fit each other, where names came with some of them."""
    have, fit = installed(), []
    for package, release in dict.fromkeys(re.findall(r"came with (trl|transformers) (\d[\d.]*\d)", said)):
        newer = Version(have.get(package, "0")) >= Version(release)
        fit.append(f"{package} before {release}" if newer else f"{package} {release} or later")
    if not fit or "went with" in said:
        return "Write what this release has, or install one that has it."
    return f"Install {', or '.join(fit)}."


def _own_line(error: BaseException, own: Any) -> tuple[str, int]:
    """Return the file and the line of the script's own code that an error came out of last."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((place for place in frames[::-1] if own(place[0])), ("", 0))


def _imported(new: str, name: str) -> str:
    """Return the module from which a name can be imported here by what is written in its place; empty if none."""
    module, _, moved = new.rpartition(".")
    if moved == name and module:
        try:
            return module if hasattr(importlib.import_module(module), name) else ""
        except Exception:  # of a library's own: then it is not taken
            return ""
    return ""


def _function(error: BaseException, own: Any) -> Any:
    """Return the function of the script's own that a library called with other arguments; None if there is none."""
    match = re.search(r"(?P<name>[\w.<>]+)\(\) ", str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if match is None or trace is None:
        return None
    name = match["name"].rpartition(".")[2]
    held = {**trace.tb_frame.f_globals, **trace.tb_frame.f_locals}.values()
    for value in held:
        for candidate in (getattr(value, "__func__", value), getattr(type(value), name, None)):
            function = inspect.unwrap(candidate) if isinstance(candidate, types.FunctionType) else None
            if not isinstance(function, types.FunctionType) or function.__name__ != name:
                continue
            if own(function.__code__.co_filename):
                return function
    return None
