"""The answer of preflight as Markdown for an issue: ids, and what the registry says of them (`failurelab._issue`)."""

from failurelab import _issue, failures
from failurelab.preflight.report.answer import Told, title, verdict


def markdown(told: Told) -> str:
    """Return what is named and suspected, with the registry's repair, and the ids of what held and was not checked."""
    registry = {failure.id: failure for failure in failures.all()}
    parts = {}  # each once: several reward functions may have one failure
    for answers, word in ((told.findings, "named"), (told.suspected, "suspected")):
        for failure in (answer["failure"] for answer in answers):
            lines = parts[f"{failure} {title(failure)}"] = [f"- {word}"]
            if known := registry.get(failure):
                lines += [f"- repair: {known.fix}"]
                lines += [f"- why: notebooks/{known.notebook}.ipynb"] * bool(known.notebook)
    for heading, held in (("Held", told.held), ("Not checked", told.not_checked)):
        parts[heading] = [", ".join(answer["failure"] for answer in held)] * bool(held)
    parts["Error"] = ["The script ended in an error."] * bool(told.error)
    said = verdict(told).removeprefix(f"{told.script}: ")
    return _issue.markdown(f"failurelab preflight: {said}", told.versions, parts.items())
