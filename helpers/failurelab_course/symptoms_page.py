"""The index by symptom, docs/symptoms.md, made from the registry.

Who meets an error searches for its literal text: all of them stand on this page, so that a search finds it. Causes in
full and what was said in each thread stay in the registry's files, which each failure links.
"""

from collections.abc import Iterable

from failurelab import failures
from failurelab_course.labs import verify as labs

FILES = "../helpers/failurelab/failures"
HEAD = """\
# Index by symptom

Look up an error text or what you see; it leads to the failure, how to check for it, and what repairs it. Made from the
registry by `failurelab symptoms --write`. `failurelab symptoms train.log` looks a log up, `failurelab doctor --python
PATH` tells which failures your versions have, `failurelab preflight train.py` which your script has, and `failurelab
diagnose RUN` which a run has. Names such as `guards.GradientGuard` are in the package `failurelab` ([guards and
repairs](repairs.md)).

## Texts in a log

A star marks a text that has other causes too: there the check decides.
"""


def page() -> str:
    """Return the index as Markdown: literal texts first, then what silent failures look like, then each failure."""
    known = failures.all()
    texts = _list_by_sign((f"`` {text} ``", text, each) for each in known for text in each.symptoms)
    signs = _list_by_sign((sign, sign, each) for each in known for sign in each.seen_as)
    lines = [HEAD, *texts, "", "## What is seen where nothing is said", "", *signs]
    for failure in known:
        lines += ["", *_section(failure)]
    return "\n".join(lines) + "\n"


def _list_by_sign(signs: Iterable[tuple[str, str, failures.Failure]]) -> list[str]:
    """Return a line for each sign (as it is shown, as the registry has it), with the links of all that have it."""
    found: dict[str, list[str]] = {}
    for shown, sign, failure in signs:
        found.setdefault(shown, []).append(f"[{failure.id}](#{_anchor(failure)}){'*' * (sign in failure.notices)}")
    return [f"- {shown} → {', '.join(links)}" for shown, links in found.items()]


def _section(failure: failures.Failure) -> list[str]:
    exercises = [f"[{lab.number}](../labs/{lab.name}/start.py)" for lab in labs.find() if failure.id in lab.failures]
    read = [f"notebook [{failure.notebook[:2]}](../notebooks/{failure.notebook}.ipynb)"] if failure.notebook else []
    read += [f"labs {', '.join(exercises)}"] if exercises else []
    helper = failure.helper and failure.helper not in failure.check + failure.fix
    threads = ", ".join(f"[{thread.thread}]({thread.url})" for thread in failure.threads)
    rows = [
        ("Check", failure.check),
        ("Repair", failure.fix + (f" (`failurelab.{failure.helper}`)" if helper else "")),
        ("Affected", "<br>".join(f"{stack}: {stack.what}" for stack in failure.affected)),
        ("Fixed", "<br>".join(f"{stack}: {stack.what}" for stack in failure.fixed)),
        ("Read", "; ".join(read)),
        ("Cause", f"[{failure.id}.toml]({FILES}/{failure.id}.toml); {threads}"),
    ]
    return [
        f'<a id="{_anchor(failure)}"></a>',
        "",
        f"## {failure.id}: {failure.title}",
        "",
        failure.what_breaks.strip(),
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {_cell(text)} |" for name, text in rows if text),
    ]


def _anchor(failure: failures.Failure) -> str:
    return failure.id.lower()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
