"""The answer of preflight as Markdown for an issue; see `failurelab._issue` for what is left out."""

from collections.abc import Sequence

from failurelab import _issue
from failurelab.preflight.report.answer import Told, title, verdict


def markdown(told: Told, options: Sequence[str]) -> str:
    """Return an answer as Markdown, without what is private, such as all words of the command line, `options`."""
    private = _issue.private_words([*options, told.script])
    parts = []
    for answers, word in ((told.findings, "named"), (told.suspected, "suspected")):
        for answer in answers:
            lines = [f"- found: {answer['evidence']}"]
            lines += [f"- with this repair: {answer['tried']} (tried)"] if answer.get("tried") else []
            lines += [f"- not named: {answer['why']}"] if answer.get("why") else []
            lines += [f"- repair: {answer['repair']}"] if answer["repair"] else []
            lines = [_issue.clean(line, private) for line in lines]
            diff = _issue.changes(answer.get("diff", ""), private)
            lines += ["", "```diff", *diff, "```"] if diff else []
            lines += ["", f"Why: notebooks/{answer['notebook']}.ipynb"] if answer.get("notebook") else []
            parts.append((f"{answer['failure']} {title(answer['failure'])}: {word}", lines))
    parts += [
        ("Held", [", ".join(answer["failure"] for answer in told.held)] if told.held else []),
        ("Not checked", [_issue.clean(f"- {each['failure']}: {each['why']}", private) for each in told.not_checked]),
        ("Cut", [_issue.clean(f"- {what}", private) for what in told.cut]),
        ("Error", ["The script ended in an error. Its text is the script's own, and left out."] if told.error else []),
    ]
    said = verdict(told).removeprefix(f"{told.script}: ")
    return _issue.markdown(f"failurelab preflight: {said}", told.versions, parts)
