"""`failurelab evidence record`: run everything that measures, and keep it in one ledger."""

import pathlib
from collections.abc import Callable

from . import course, eras, evidence, labs


def record(out: pathlib.Path, *, device: str = "cpu", only: list[str], say: Callable[[str], None] = print) -> None:
    """Run benchmarks, notebooks and labs; merge what they recorded into the ledger at `out`.

    Args:
        out: the ledger; records that are measured anew are replaced, others kept.
        device: `cpu` or `cuda`.
        only: names of benchmarks, notebooks or labs; empty for all.
        say: is told what runs.

    Raises:
        evidence.EvidenceError: an unknown name, or something failed; what had been measured by then is kept.
    """
    benchmarks = evidence.benchmarks()
    notebooks = course.known()
    all_labs = labs.known()
    chosen = set(only) or {*benchmarks, *notebooks, *all_labs}
    unknown = chosen - {*benchmarks, *notebooks, *all_labs}
    if unknown:
        raise evidence.EvidenceError(
            f"unknown: {', '.join(sorted(unknown))}. What can be recorded: "
            f"{', '.join([*benchmarks, *notebooks, *all_labs])}"
        )
    failed = []
    with evidence.temporary_folder() as folder:
        for name in [each for each in benchmarks if each in chosen]:
            for era in benchmarks[name]:
                say(f"benchmark {name} in era {era}")
                try:
                    _keep(out, evidence.run_benchmark(name, era, folder, device))
                except (evidence.EvidenceError, eras.EraError) as error:
                    failed.append(str(error))
        if names := [each for each in notebooks if each in chosen]:
            results = course.run(names, device=device, jobs=1)
            for result in results:
                _keep(out, result.records)
            failed += [f"notebook {each.name}: {each.status}, {each.reason}" for each in results if not each.passed]
        if names := [each for each in all_labs if each in chosen]:
            say(f"labs {', '.join(names)}")
            matrix = labs.verify(names)
            _keep(out, labs.records(matrix))
            if labs.exit_status(matrix):
                failed.append("not every lab held its three states: failurelab verify")
    say(f"{out}: {len(evidence.load(out))} records")
    if failed:
        raise evidence.EvidenceError("not everything could be recorded:\n" + "\n".join(failed))


def _keep(out: pathlib.Path, records: list[evidence.Record]) -> None:
    old = evidence.load(out) if out.exists() else []
    evidence.save(out, evidence.replace(old, records))
