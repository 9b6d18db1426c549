"""Names that the installed release of trl or transformers does not have, and arguments that the libraries refuse.

A keyword that a configuration or a trainer does not take is left out for this run (`stage.releases`), so that all else
is judged; an import, an attribute or a key of a file ends the run, and is undone by an edit in another one. What is
said of releases comes from the table of names (`failures.names`).
"""

import dataclasses
import difflib
import importlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

from failurelab.failures import names
from failurelab_preflight.finding import RELEASE, Finding
from failurelab_preflight.launcher_line import OF_LAUNCH
from failurelab_preflight.script_error import causes
from failurelab_preflight.stage.releases import LeftOut, installed

FAILURE = "release"
_OTHERWISE = "Write what this release has, or install one that has it."
_IMPORT = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'")
_CALL = re.compile(r"(?:got an unexpected keyword argument|takes (?:from \d+ to )?\d+ positional arguments? but \d+)")


def of_keywords(left_out: LeftOut, went_on: bool) -> Iterator[Finding]:
    """Yield what was left out of the script's own calls, a finding for each class.

    Args:
        left_out: what was.
        went_on: whether the script came to its training without it.
    """
    have = ", ".join(f"{package} {version}" for package, version in installed().items())
    for (_, owner), keywords in left_out.of.items():
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
            tried="the script comes to its training" if went_on else "",
            ends=True,
            part=owner,
            origin=RELEASE,
        )


def of_files(left_out: LeftOut) -> Iterator[Finding]:
    """Yield the keys of a file that trl's parser drops without a word, where a release had them, or one is near."""
    for name in dict.fromkeys(left_out.unread):
        if name not in OF_LAUNCH and _is_known(name):
            said = names.explain(f"not used by the HfArgumentParser: ['{name}']", installed())
            yield Finding.suspected(
                FAILURE,
                f"the file has {name}, which no class takes here, and trl trains without it and says nothing: {said}",
                "what it was to do is not known",
                f"Take {name} out, or write what this release has.",
                part=name,
                origin=RELEASE,
            )


def _is_known(option: str) -> bool:
    """Whether a release has an option of this name, or this one of a name near to it."""
    import transformers  # not above: this module tells of a Python without it, too

    taken = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    listed = any(names.find(owner, option) for owner in ("GRPOConfig", "TrainingArguments"))
    return listed or bool(difflib.get_close_matches(option, taken, n=1))


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
            repair = _repair(link, text, own) or _OTHERWISE
            yield Finding(FAILURE, f"{first}. {said}", repair, ends=True, part=_part(text), origin=RELEASE)
            return


def refused(error: BaseException) -> Iterator[Finding]:
    """Yield what an error says that refuses training arguments while they are made."""
    through = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, ValueError) and "__post_init__" in through:
        said = f"these training arguments are refused: {' '.join(str(error).split())}"
        yield Finding("given", said, "Set them as it asks for.", ends=True, part="arguments")


def _part(text: str) -> str:
    match = _IMPORT.search(text)
    return match["name"] if match else " ".join(re.findall(r"'(\w+)'", text))[:60]


def _repair(error: BaseException, text: str, own: Any) -> str:
    """Return what to do; empty where it is not known."""
    new = names.replacement(text)
    if match := _IMPORT.search(text):
        module = _imported(new, match["name"])
        words = f"Write from {module} import {match['name']}." if module else ""
        return words or f"Take {match['name']} out of the import, and what uses it."
    if options := names.unused_options(text):
        return f"Take {', '.join(options)} out."
    trace = list(traceback.walk_tb(error.__traceback__))
    if _CALL.search(text) and trace and not own(trace[-1][0].f_code.co_filename):
        return "Let your function of this name, if it is yours, take *args and **kwargs, and hand them on."
    return f"Write {new}." if new and "has no attribute" in text else ""


def _imported(new: str, name: str) -> str:
    """Return the module from which a name can be imported here by what is written in its place; empty if none."""
    module, _, moved = new.rpartition(".")
    if moved == name and module:
        try:
            return module if hasattr(importlib.import_module(module), name) else ""
        except Exception:  # of a library's own: then it is not taken
            return ""
    return ""
