"""The index by symptom, docs/symptoms.md, made from the registry.

Who meets an error searches for its literal text: all of them stand on this page, so that a search finds it.
"""

from failurelab import failures
from failurelab_course.labs import verify as labs


def page() -> str:
    """Return the index as Markdown: literal texts first, then what silent failures look like, then each failure."""
    known = failures.all()
    lines = [
        "# Index by symptom",
        "",
        "Made from the registry by `failurelab symptoms --write`. Paste a log: `failurelab symptoms < train.log`.",
        "",
        "## Texts in a log",
        "",
    ]
    for failure in known:
        for symptom in failure.symptoms:
            lines += [f"- `` {symptom} `` → [{failure.title}](#{_anchor(failure)})"]
    lines += ["", "## What is seen where nothing is said", ""]
    for failure in known:
        lines += [f"- {seen} → [{failure.title}](#{_anchor(failure)})" for seen in failure.seen_as]
    for failure in known:
        lines += ["", *_section(failure)]
    return "\n".join(lines) + "\n"


def _section(failure: failures.Failure) -> list[str]:
    notebook = f"[{failure.notebook}](../notebooks/{failure.notebook}.ipynb)" if failure.notebook else ""
    exercises = [lab for lab in labs.find() if failure.id in lab.failures]
    listed = ", ".join(f"[{lab.number} {lab.title}](../labs/{lab.name}/start.py)" for lab in exercises)
    affected = "<br>".join(f"{stack}: {stack.what}" for stack in failure.affected)
    fixed = "<br>".join(f"{stack}: {stack.what}" for stack in failure.fixed)
    threads = "<br>".join(f"[{thread.thread}]({thread.url}) {thread.what}" for thread in failure.threads)
    rows = [
        ("Notebook", notebook),
        ("Labs", listed),
        ("Affected", affected),
        ("Fixed", fixed),
        ("Repair", failure.fix),
        ("Helper", f"`failurelab.{failure.helper}`" if failure.helper else ""),
        ("Threads", threads),
    ]
    return [
        f'<a id="{_anchor(failure)}"></a>',
        "",
        f"## {failure.id}: {failure.title}",
        "",
        failure.what_breaks.strip(),
        "",
        " ".join(failure.root_cause.split()),
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {_cell(text)} |" for name, text in rows if text),
    ]


def _anchor(failure: failures.Failure) -> str:
    return failure.id.lower()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
