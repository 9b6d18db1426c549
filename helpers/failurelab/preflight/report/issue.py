"""The answer of preflight as Markdown for an issue: ids, and what the registry says of them (`failurelab._issue`)."""

from failurelab import _issue, failures
from failurelab.preflight.answer import Answer
from failurelab.preflight.report.terminal import title, verdict


def markdown(answer: Answer) -> str:
    """Return what is named and suspected, with the registry's repair, and the ids of what held and was not checked."""
    registry = {failure.id: failure for failure in failures.all()}
    parts = {}  # each once: several reward functions may have one failure
    for finding in answer.accusations:
        lines = parts[f"{finding.failure} {title(finding.failure)}"] = [f"- {finding.verdict.value.lower()}"]
        if known := registry.get(finding.failure):
            lines += [f"- repair: {known.fix}"]
            lines += [f"- why: notebooks/{known.notebook}.ipynb"] * bool(known.notebook)
    for heading, findings in (("Held", answer.held), ("Not checked", answer.not_checked)):
        parts[heading] = [", ".join(finding.failure for finding in findings)] * bool(findings)
    parts["Error"] = ["The script ended in an error."] * bool(answer.error)
    said = verdict(answer).removeprefix(f"{answer.script}: ")
    return _issue.markdown(f"failurelab preflight: {said}", answer.versions, parts.items())
