"""What the registry states of the releases of a stack, beside what its probes showed there.

Each `[[affected]]` and `[[fixed]]` row of the registry names the probes that hold it, or says why none does. A probe
shows a failure where the releases are those of an affected row that names it, and nowhere else.
"""

from collections.abc import Iterator, Mapping, Set

from failurelab import failures
from failurelab.failures import Stack
from failurelab.failures.atlas import LOUD, NONE, SILENT

FOUND = (LOUD, SILENT)
BY_CHOICE = {"F9 bfloat16"}  # what a person chooses, in every release: the registry names no releases for it


def rows() -> Iterator[tuple[str, bool, Stack]]:
    """Yield the statements: failure, whether these releases have it, and which these are."""
    for failure in failures.all():
        for has_it, stacks in ((True, failure.affected), (False, failure.fixed)):
            for stack in stacks:
                yield failure.id, has_it, stack


def find_contradictions(states: Mapping[str, str], versions: Mapping[str, str]) -> dict[str, str]:
    """Return the probes that showed what the registry denies, or not what it states; each with what is stated.

    Args:
        states: of each probe, what was measured.
        versions: of the stack, package to version.
    """
    wrong = {}
    for probe, state in states.items():
        if state not in (*FOUND, NONE) or probe in BY_CHOICE:
            continue
        named = [(id, has_it, stack) for id, has_it, stack in rows() if stack.asks(probe) and stack.holds(versions)]
        affected = [f"{id}: {stack.what} ({stack})" for id, has_it, stack in named if has_it]
        fixed = [f"{id}, mended: {stack.what} ({stack})" for id, has_it, stack in named if not has_it]
        if state == NONE and affected:
            wrong[probe] = affected[0]
        elif state in FOUND and (fixed or not affected):
            wrong[probe] = (fixed or ["no affected release is here"])[0]
    return wrong


def find_unasked(states: Mapping[str, str], versions: Mapping[str, str], probes: Set[str]) -> dict[str, list[str]]:
    """Return, by the reason, what the registry says that these releases have, and no probe showed or denied here.

    Args:
        states: of each probe, what was measured.
        versions: of the stack, package to version.
        probes: all that are asked of such a stack; what only others hold is not looked for.
    """
    unasked: dict[str, list[str]] = {}
    for id, has_it, stack in rows():
        if not has_it or not stack.holds(versions):
            continue
        named = {probe for probe in probes if stack.asks(probe)}
        if named and not any(states.get(probe) in (*FOUND, NONE) for probe in named):
            unasked.setdefault("its probe told nothing", []).append(f"{id}, {stack.what}")
        elif stack.not_measured:
            unasked.setdefault(stack.not_measured, []).append(f"{id}, {stack.what}")
    return unasked
