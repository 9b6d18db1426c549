"""`failurelab evidence record`: run everything that measures, and keep it in one ledger.

Benchmarks come first, for they say most in the least time; the ledger is written after each part, so that a cluster's
limit on time, or a crash, costs one part and no more. What this machine cannot run is kept as NOT RUN, with the reason.
"""

import dataclasses
import importlib.util
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator

from failurelab_course import eras
from failurelab_course.experiments import machine
from failurelab_course.labs import verify as labs
from failurelab_course.ledger import records as evidence
from failurelab_course.ledger.records import NotRun
from failurelab_course.runs import benchmarks


@dataclasses.dataclass
class PartResult:
    """What became of one part: its records, what was not run of it, and what failed."""

    records: list[evidence.Record] = dataclasses.field(default_factory=list)
    not_run: list[NotRun] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing to run, and how it is called."""

    name: str
    run: Callable[[], PartResult]


def record(
    out: pathlib.Path,
    *,
    device: str = "cpu",
    only: list[str],
    time_limit: float | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Run benchmarks, notebooks and labs; merge what they recorded into the ledger at `out`.

    Args:
        out: the ledger; records that are measured anew are replaced, others kept.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        only: names of benchmarks, notebooks or labs; empty for all.
        time_limit: minutes after which no new part is started.
        say: is told what runs.

    Raises:
        DeviceError: the device cannot be used; nothing was started.
        EvidenceError: an unknown name, a limit of no time, or something failed or was not reached; what had been
            measured by then is kept.
    """
    start = time.monotonic()
    if time_limit is not None and time_limit <= 0:
        raise evidence.EvidenceError(f"a time limit of {time_limit:g} minutes runs nothing. Next: a number above 0")
    if out.exists():
        evidence.read_ledger(out)  # a ledger that cannot be read is told before hours of runs
    if not out.resolve().parent.is_dir():
        raise evidence.EvidenceError(f"{out.parent} is no folder, so no ledger can be written. Next: make it first")
    parts_of = _choose(only)
    device = machine.describe(device)["device"]
    failed: list[str] = []
    not_run: list[NotRun] = []
    with tempfile.TemporaryDirectory(prefix="failurelab-evidence-") as folder:
        parts = list(_parts(parts_of, device, pathlib.Path(folder), alone=time_limit is not None))
        left = list(parts)
        for part in parts:
            if time_limit is not None and time.monotonic() - start > time_limit * 60:
                break
            left.remove(part)
            say(part.name)
            outcome = part.run()
            keep(out, outcome)
            not_run += outcome.not_run
            failed += outcome.failed
            for reason in outcome.not_run:
                say(str(reason))
    if left:
        failed.append(
            f"the time limit of {time_limit:g} minutes came before {len(left)} of {len(parts)} parts: "
            f"{', '.join(part.name for part in left)}. Next: the same command with --only and these names"
        )
    say(f"{out}: {len(evidence.read_ledger(out)) if out.exists() else 0} records; {len(not_run)} parts NOT RUN here")
    if failed:
        raise evidence.EvidenceError("not everything could be recorded:\n" + "\n".join(failed))


def _choose(only: list[str]) -> dict[str, list[str]]:
    known = {
        "benchmarks": list(benchmarks.benchmarks()),
        "notebooks": [path.stem for path in sorted((eras.root() / "notebooks").glob("[0-9]*.ipynb"))],
        "labs": labs.known(),
    }
    every = [name for names in known.values() for name in names]
    unknown = set(only) - set(every)
    if unknown:
        raise evidence.EvidenceError(f"unknown: {', '.join(sorted(unknown))}. What can be recorded: {', '.join(every)}")
    return {kind: [name for name in names if name in (only or every)] for kind, names in known.items()}


def _parts(chosen: dict[str, list[str]], device: str, folder: pathlib.Path, alone: bool) -> Iterator[Part]:
    """Yield what is to be run, in order. Labs share the import of their era, unless each is a part `alone`."""
    runs = benchmarks.benchmarks()
    for name in chosen["benchmarks"]:
        for era in runs[name]:
            yield Part(f"benchmark {name} in era {era}", lambda n=name, e=era: _benchmark(n, e, folder, device))
    for name in chosen["notebooks"]:
        yield Part(f"notebook {name}", lambda n=name: _notebook(n, device))
    groups = [[name] for name in chosen["labs"]] if alone else [chosen["labs"]]
    for names in filter(None, groups):
        yield Part(f"labs {', '.join(names)}", lambda n=names: _labs(n, device))


def _benchmark(name: str, era: str, folder: pathlib.Path, device: str) -> PartResult:
    if eras.find(era, ready=False).status == "missing":
        reason = f"era {era} is not made here. Next, if it is wanted: failurelab eras create {era}"
        return PartResult(not_run=[NotRun(f"benchmarks/{name}.py", reason, era)])
    try:
        return PartResult(records=benchmarks.run_benchmark(name, era, folder, device))
    except benchmarks.CannotRun as reason:
        return PartResult(not_run=[NotRun(f"benchmarks/{name}.py", str(reason), era)])
    except (evidence.EvidenceError, eras.EraError) as error:
        return PartResult(failed=[str(error)])


def _notebook(name: str, device: str) -> PartResult:
    needed = {"nbformat", "papermill", "nbconvert", "ipykernel"}
    if missing := sorted(each for each in needed if importlib.util.find_spec(each) is None):
        return PartResult(not_run=[NotRun(name, "not installed here: " + ", ".join(missing))])
    from failurelab_course.runs import notebooks as course

    (result,) = course.run([name], device=device, jobs=1, progress=False)
    if result.status == "NOT RUN" or (not result.passed and benchmarks.lacks(result.reason)):
        return PartResult(result.records, [NotRun(name, result.reason)])
    failed = [] if result.passed else [f"notebook {name}: {result.status}, {result.reason}"]
    return PartResult(result.records, failed=failed)


def _labs(names: list[str], device: str) -> PartResult:
    matrix = labs.verify(names, device=device)
    result = PartResult(labs.records(matrix))
    for name in dict.fromkeys(row.lab for row in matrix):
        rows = [row for row in matrix if row.lab == name and row.state != labs.FORM]
        reasons = [row.reason for row in rows if row.result == labs.NOT_RUN or _lacking(row)]
        if reasons:
            result.not_run.append(NotRun(f"labs/{name}", reasons[0]))
    broke = [row for row in matrix if row.result == labs.FAIL or (row.result == labs.ENVIRONMENT and not _lacking(row))]
    result.failed += [f"lab {row.lab} {row.script}: {row.result}, {row.reason}" for row in broke]
    return result


def _lacking(row: labs.Row) -> bool:
    return row.result == labs.ENVIRONMENT and benchmarks.lacks(row.reason)


def keep(out: pathlib.Path, outcome: PartResult) -> None:
    """Merge one part into the ledger at `out`, whole or not at all."""
    old = evidence.read_ledger(out) if out.exists() else []
    merged = evidence.merge_not_run(evidence.read_not_run(out), outcome.not_run, outcome.records)
    evidence.write_ledger(out, evidence.merge_records(old, outcome.records), merged)
