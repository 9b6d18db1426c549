"""The index by symptom: from a line in a log to the failure, made from the registry.

Who meets an error searches for its literal text. `page` writes all of them into one page, docs/symptoms.md, so that a
search finds it; `told` answers for a pasted log.
"""

from failurelab import failures as registry
from failurelab_course.labs import verify as labs

PAGE = "docs/symptoms.md"


def told(text: str) -> str:
    """Return what the failures whose symptoms occur in a pasted log are, and where each is explained and repaired."""
    found = registry.by_symptom(text)
    if not found:
        silent = [
            f"  {failure.id}: {seen}" for failure in registry.all() for seen in failure.seen_as if "reward" in seen
        ]
        return "\n".join(
            [
                "None of the course's literal texts is in it. Some failures are silent. What a reward does in them:",
                *silent,
                f"More in {PAGE}. Which of them your versions have: failurelab doctor --python PATH",
            ]
        )
    return "\n\n".join(_short(failure) for failure in found)


def _short(failure: registry.Failure) -> str:
    lines = [f"{failure.id}: {failure.title}", f"  repair: {failure.fix}"]
    lines += [f"  helper: failurelab.{failure.helper}"] if failure.helper else []
    return "\n".join([*lines, f"  why:    notebooks/{failure.notebook}.ipynb"])


def page() -> str:
    """Return the index as Markdown: literal texts first, then what silent failures look like, then each failure."""
    failures = registry.all()
    lines = [
        "# Index by symptom",
        "",
        "Made from the registry by `failurelab symptoms --write`. Paste a log: `failurelab symptoms < train.log`.",
        "",
        "## Texts in a log",
        "",
    ]
    for failure in failures:
        for symptom in failure.symptoms:
            lines += [f"- `` {symptom} `` → [{failure.title}](#{_anchor(failure)})"]
    lines += ["", "## What is seen where nothing is said", ""]
    for failure in failures:
        lines += [f"- {seen} → [{failure.title}](#{_anchor(failure)})" for seen in failure.seen_as]
    for failure in failures:
        lines += ["", *_section(failure)]
    return "\n".join(lines) + "\n"


def _section(failure: registry.Failure) -> list[str]:
    notebook = f"[{failure.notebook}](../notebooks/{failure.notebook}.ipynb)"
    exercises = [lab for lab in labs.find() if failure.id in lab.failures]
    listed = ", ".join(f"[{lab.number} {lab.title}](../labs/{lab.name}/train.py)" for lab in exercises)
    affected = "<br>".join(f"{stack}: {stack.what}" for stack in failure.affected)
    fixed = "<br>".join(f"{stack}: {stack.what}" for stack in failure.fixed)
    threads = "<br>".join(f"[{each.thread}]({each.url}) {each.what}" for each in failure.threads)
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


def _anchor(failure: registry.Failure) -> str:
    return failure.id.lower()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
