"""From a pasted log to the failures whose literal texts occur in it; `failurelab symptoms`."""

from failurelab import failures

PAGE = "docs/symptoms.md"


def describe(text: str) -> str:
    """Return the failures whose symptoms occur in a log, and where each is explained and repaired."""
    known = failures.by_symptom(text)
    if known:
        return "\n\n".join(_describe_failure(failure) for failure in known)
    silent = [f"  {failure.id}: {seen}" for failure in failures.all() for seen in failure.seen_as if "reward" in seen]
    return "\n".join(
        [
            "None of the course's literal texts is in it. Some failures are silent. What a reward does in them:",
            *silent,
            f"More in {PAGE}. Which of them your versions have: failurelab doctor --python PATH",
        ]
    )


def _describe_failure(failure: failures.Failure) -> str:
    lines = [f"{failure.id}: {failure.title}", f"  repair: {failure.fix}"]
    lines += [f"  helper: failurelab.{failure.helper}"] if failure.helper else []
    return "\n".join([*lines, f"  why:    notebooks/{failure.notebook}.ipynb"])
