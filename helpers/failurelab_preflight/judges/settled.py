"""What the registry says of figures that a judge has measured, as a finding."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from failurelab import failures
from failurelab.failures import verdicts
from failurelab.failures.loader import Failure, Stack
from failurelab_preflight.finding import Finding


def settle(
    id: str,
    places: Sequence[verdicts.Figures],
    controls: Mapping[str, verdicts.Figures],
    evidence: str,
    mechanism: str = "",
    **more: Any,
) -> Finding | None:
    """Return what is to be said of a failure that was looked for; None where it is found: the judge tells how.

    Args:
        id: of the registry.
        places: figures, as `verdicts.judge` takes them.
        controls: figures with each mechanism planted.
        evidence: what was seen, for a reader.
        mechanism: of the failure, where one alone is judged here.
        more: of the finding.
    """
    failure = alone(id, mechanism)
    judged = verdicts.judge(failure, places, controls)
    if judged.verdict == verdicts.FOUND:
        return None
    if judged.verdict == verdicts.NOT_APPLICABLE:
        return Finding.not_applicable(id, evidence)
    if judged.verdict == verdicts.NOT_CHECKED:
        return Finding.not_checked(id, f"{evidence}; {judged.missing}", **more)
    seen = {}
    for each in failure.mechanisms:
        planted = {**places[-1], **controls.get(each.control, {})}
        if verdicts.holds((*each.applies, *each.found), planted):
            seen[verdicts.say(each, planted)] = each.control
    return Finding.held(id, evidence, "; ".join(f"with {name} planted, {said}" for said, name in seen.items()), **more)


def alone(id: str, mechanism: str) -> Failure:
    """Return a failure of the registry with one of its mechanisms; with all where none is named."""
    failure = failures.get(id)
    own = tuple(each for each in failure.mechanisms if mechanism in ("", each.name))
    return dataclasses.replace(failure, mechanisms=own)


def of_release(id: str) -> list[Stack]:
    """Return what the registry says of a failure in the releases that are installed here."""
    installed = {name: importlib.metadata.version(name) for name in ("trl", "transformers")}
    return [stack for stack in failures.get(id).affected if stack.holds(installed)]


def forgiven(id: str) -> str:
    """Return why a run learns with what the installed release does, by the registry; "" where it does not say so."""
    return next((stack.forgiven for stack in of_release(id) if stack.forgiven), "")
