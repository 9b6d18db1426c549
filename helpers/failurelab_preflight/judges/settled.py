"""What the registry says of figures that a judge has measured, as a finding."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from failurelab import failures
from failurelab.failures import verdicts
from failurelab.failures.predicates import fields, fill
from failurelab_preflight.answer import Finding


def settle(
    id: str,
    places: Sequence[verdicts.Figures],
    controls: Mapping[str, verdicts.Figures],
    evidence: str,
    **more: Any,
) -> Finding | None:
    """Return what is to be said of a failure that was looked for; None where it is found: the judge tells how.

    Args:
        id: of the registry.
        places: figures, as `verdicts.judge` takes them.
        controls: figures with each mechanism planted.
        evidence: what was seen, for a reader.
        more: of the finding.
    """
    failure = failures.get(id)
    judged = verdicts.judge(failure, places, controls)
    if judged.verdict == verdicts.FOUND:
        return None
    if judged.verdict == verdicts.NOT_APPLICABLE:
        return Finding.not_applicable(id, evidence)
    if judged.verdict == verdicts.NOT_CHECKED:
        return Finding.not_checked(id, f"{evidence}; {judged.missing}", **more)
    seen = {}
    for mechanism in failure.mechanisms:
        planted = {**places[-1], **controls.get(mechanism.control, {})}
        alone = dataclasses.replace(failure, mechanisms=(mechanism,))
        if verdicts.judge(alone, [planted]).verdict == verdicts.FOUND:
            seen[fill(mechanism.says, dict.fromkeys(fields(mechanism.says)) | planted)] = mechanism.control
    return Finding.held(id, evidence, "; ".join(f"with {name} planted, {said}" for said, name in seen.items()), **more)
