"""Known gradients in other libraries: each release by group of cases, what differs by name, and twenty planted bugs.

    python benchmarks/known_gradients.py [--parts libraries planted drift] [--sources FOLDER] [--names verl trl ...]

FOLDER has ADAPTER/RELEASE, each with a library's code. What the package index has is put there; a checkout lies there
already (with a file COMMIT), or is NOT RUN. Each release is measured by a process of its own, in this environment: its
requirements are not installed, and its adapter says what stands in for them. `planted` are the twenty bugs of
tests/unit/planted_losses.py, and beside them what polgrad says of each, as the loss of one batch. `drift` asks the
package index for releases that the evidence lacks, and tells what is otherwise in the newest; the status is 1 where a
case differs, or a library that ran does not run, that did not do so before. It keeps nothing.

Eras: today.
"""

import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import frames
import pandas
import recording
import torch
import transformers  # noqa: F401 - several libraries import it, each in a fork of this process
from packaging.version import Version

from failurelab import known_gradients
from failurelab.known_gradients import check
from failurelab_course.experiments import observe

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "unit"), str(ROOT / "benchmarks" / "atlas")]
PARTS = ("libraries", "planted")
# Of the index: adapter, its package, and releases of the last year.
INDEX = {
    "verl": ("verl", "0.6.1 0.7.1 0.8.0 0.9.0 0.9.1"),
    "openrlhf": ("openrlhf", "0.9.0 0.9.10 0.10.4 0.11.0 0.11.2"),
    "liger": ("liger-kernel", "0.6.4 0.7.0 0.8.0 0.8.5"),
    "unsloth_zoo": ("unsloth_zoo", "2026.7.7 2026.8.17 2026.9.9 2026.10.9"),
    "skyrl": ("skyrl", "0.1.0 0.2.0 0.3.0 0.4.0"),
    "trl": ("trl", "1.0.0 1.4.0 1.9.2 1.12.0 1.16.0"),
    "trl_async": ("trl", "1.16.0"),
}
CHECKOUTS = ("areal", "nemo_rl", "open_instruct", "prime_rl", "slime", "torchforge")
GROUPS = ("clip", "objectives", "kl", "engine", "cut", "masks", "logits", "advantages", "wiring")
POLGRAD = "0.2.1"
FORKS = multiprocessing.get_context("fork")  # torch and transformers are imported once


def fetch(package: str, release: str, folder: pathlib.Path) -> None:
    """Put a release of the index into a folder, without what it requires.

    Raises:
        recording.CannotRun: the index does not give it.
    """
    if folder.exists():
        return
    variables = os.environ | {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    words = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    words += ["--python-version", "3.13"]  # its files are read, and its own interpreter is not asked for
    if subprocess.run([*words, f"{package}=={release}"], env=variables).returncode:
        shutil.rmtree(folder, ignore_errors=True)  # empty, and taken for the library another time
        raise recording.CannotRun(f"the package index does not give {package} {release}")


def check_source(adapter: str, source: pathlib.Path) -> dict[str, Any]:
    """Hold one release against the cases, in this process."""
    return known_gradients.check_adapter(check.find_adapter(adapter), str(source)).to_json()


def measure(adapter: str, source: pathlib.Path) -> dict[str, Any]:
    """Hold one release against the cases, in a process of its own, and return its figures."""
    began = time.perf_counter()
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=lambda: there.send(check_source(adapter, source)))
    process.start()
    there.close()
    try:
        report = here.recv()
    except EOFError:
        raise recording.BenchmarkError(f"{adapter} {source.name}: its process ended by itself") from None
    process.join()
    figures: dict[str, Any] = {"version": report["version"], "seconds": time.perf_counter() - began}
    cases = pandas.DataFrame(report["cases"])
    for status in (check.AGREES, check.OTHER, check.DIFFERS, check.BROKEN, check.NOT_RUN):
        figures[status] = [int(((cases.group == group) & (cases.status == status)).sum()) for group in GROUPS]
    for status in (check.OTHER, check.DIFFERS, check.BROKEN):
        figures[f"{status}: lines"] = [f"{case.id}: {case.line}" for case in cases[cases.status == status].itertuples()]
    figures["reason"] = cases.line[0] if (cases.status == check.NOT_RUN).all() else ""
    return figures


def by_age(folder: pathlib.Path) -> tuple[bool, str]:
    """Return a key that sorts releases, then commits behind them."""
    return not folder.name.startswith("v"), folder.name


def record_libraries(sources: pathlib.Path, names: list[str]) -> None:
    """Measure every release."""
    for adapter, (package, releases) in INDEX.items():
        for release in releases.split() if adapter in names or not names else ():
            folder = sources / package / release
            fetch(package, release, folder)
            observe.record("ground", "measured", measure(adapter, folder), case=f"library: {adapter} {release}")
            print(f"{adapter} {release}", flush=True)
    for adapter in CHECKOUTS:
        for folder in sorted((sources / adapter).glob("*"), key=by_age) if adapter in names or not names else ():
            observe.record("ground", "measured", measure(adapter, folder), case=f"library: {adapter} {folder.name}")
            print(f"{adapter} {folder.name}", flush=True)


def find_new(package: str, known: str) -> str | None:
    """Return the newest release of the index, where it is newer than those that are known."""
    import stacks

    last = max(release.version for release in stacks.read_index(package))
    return str(last) if last > max(map(Version, known.split())) else None


def compare(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], bool]:
    """Return what a release does otherwise than one before it, a line each, and whether something is worse."""
    if now["reason"]:
        return [f"NOT RUN: {now['reason']}"], not before["reason"]
    statuses = (check.BROKEN, check.DIFFERS, check.OTHER)
    then, after = (
        {case: f"{status}, {said.partition(': cosine')[0]}" for status in statuses
         for case, _, said in (line.partition(": ") for line in figures[f"{status}: lines"] or ())}
        for figures in (before, now)
    )  # fmt: skip
    came = [case for case in after if after[case] != then.get(case)]
    lines = [f"{case}: {then.get(case, 'agreed, or was not asked')}; now {after[case]}" for case in came]
    lines += [f"{case}: {then[case]}; now it agrees, or is not asked" for case in then if case not in after]
    lines += [
        f"{group}: {ran[0]} cases ran, now {ran[1]}"
        for place, group in enumerate(GROUPS)
        if len(set(ran := [sum(figures[status][place] for status in (check.AGREES, *statuses))
                           for figures in (before, now)])) > 1
    ]  # fmt: skip
    return lines, any(after[case].startswith((check.BROKEN, check.DIFFERS)) for case in came)


def tell_drift(sources: pathlib.Path, names: list[str], evidence: pathlib.Path) -> int:
    """Print what the newest releases do otherwise, into a workflow's summary too; return 1 if something is worse."""
    parts, worse = [], False
    before = {run["adapter"]: run for run in newest(read_libraries(evidence)).to_dict("records")}
    for adapter, (package, known) in INDEX.items():
        release = find_new(package, known) if adapter in names or not names else None
        if release is None:
            continue
        try:
            fetch(package, release, sources / package / release)
            lines, is_worse = compare(before[adapter], measure(adapter, sources / package / release))
        except (recording.CannotRun, recording.BenchmarkError) as reason:
            lines, is_worse = [str(reason)], True
        worse |= is_worse
        parts.append(f"### Known gradients: {adapter} {release}, beside {before[adapter]['release']}\n")
        parts += [f"- {line}" for line in lines] or ["Nothing is otherwise."]
    text = "\n".join(parts or ["### Known gradients: no release is new."]) + "\n"
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(text)
    return int(worse)


def ask_polgrad(planted: Any, polgrad: Any, testing: Any) -> str:
    """Return which of polgrad's references a planted loss, called once for a batch, does not conform to."""
    names = polgrad.ALGORITHMS
    sums = dataclasses.replace(names["dapo"].loss, aggregation=polgrad.Aggregation.SEQ_MEAN_TOKEN_SUM)
    references: dict[str, tuple[Any, str, str]] = {
        "token mean": (names["dapo"].loss, "token", "token_mean"),
        "sequence mean": (names["grpo"].loss, "token", "sequence_mean"),
        "constant": (dataclasses.replace(names["dr_grpo"].loss, norm_len=16), "token", "constant"),
        "gspo": (names["gspo"].loss, "sequence", "sequence_mean"),
        "sums of rows": (sums, "token", "sequence_sum"),
    }
    failed = []
    for name, (reference, level, how) in references.items():
        clip = reference.clip

        def loss(
            logprobs: Any, old_logprobs: Any, advantages: Any, response_mask: Any, given: Any = (level, how, clip)
        ) -> Any:
            level, how, clip = given
            mask, rows = response_mask.to(logprobs.dtype), list(range(len(logprobs)))
            inputs = (logprobs, old_logprobs, old_logprobs, old_logprobs, mask, advantages, advantages, advantages)
            counts = dict.fromkeys(("step_tokens", "turn_tokens", "rank_tokens"), mask.sum())
            one = {"rows": rows, "step_rows": len(rows), "ranks": 1, "micros": 1}
            part = known_gradients.Part(*inputs, cut=[[rows]], **counts, **one)
            ratio = planted.ratio(logprobs, old_logprobs, mask, level)
            terms = planted.policy(ratio, advantages[:, None], clip.eps_low, clip.eps_high)
            return planted.finish(planted.divide(terms, part, how, 16), part)

        try:
            testing.assert_conforms(loss, reference)
        except AssertionError:
            failed.append(name)
    return ", ".join(failed)


def record_planted(sources: pathlib.Path) -> None:
    """Ask the cases and polgrad about each planted bug, and about the loss that is right."""
    import planted_losses

    fetch("polgrad", POLGRAD, sources / "polgrad" / POLGRAD)
    sys.path.insert(0, str(sources / "polgrad" / POLGRAD))
    cases = known_gradients.read_cases()
    polgrad, testing = importlib.import_module("polgrad"), importlib.import_module("polgrad.testing")
    for kind in (planted_losses.Loss, *planted_losses.PLANTED):
        began = time.perf_counter()
        report = known_gradients.check_adapter(kind(), chosen=cases)
        seconds = time.perf_counter() - began
        found = [result for result in report.results if result.status == check.DIFFERS]
        called = sorted({result.name for result in found if result.group != "wiring"})
        cut = [result.group == "cut" for result in found if result.group != "wiring"]
        figures = {
            "source": kind.SOURCE, "found": len(found), "broken": report.count(check.BROKEN), "names": called,
            "named": len(called) == 1 and kind.CALLED in called[0], "seconds": seconds,
            "only_cut": bool(cut) and all(cut), "polgrad": ask_polgrad(kind(), polgrad, testing),
        }  # fmt: skip
        observe.record("ground", "measured", figures, case=f"planted: {kind.__name__}")
        print(kind.__name__, len(found), called, figures["polgrad"], flush=True)


def read_libraries(folder: pathlib.Path) -> pandas.DataFrame:
    """Return the releases, by adapter and release."""
    return frames.read_runs(folder, "known_gradients", r"library: (?P<adapter>\S+) (?P<release>\S+)")


def newest(runs: pandas.DataFrame) -> pandas.DataFrame:
    """Return the last release of each adapter."""
    return runs.groupby("adapter", sort=False).tail(1)


def table_losses_releases(folder: pathlib.Path) -> str:
    """Which releases of each library ran, and which did not."""
    lines = []
    for adapter, runs in read_libraries(folder).groupby("adapter", sort=False):
        ran, not_run = (list(runs.release[runs.reason.astype(bool) == flag]) for flag in (False, True))
        lines.append(f"- {adapter}: {', '.join(ran)}" + f" (NOT RUN: {', '.join(not_run)})" * bool(not_run))
    return "\n".join(lines)


def list_lines(runs: pandas.DataFrame, status: str, example: bool) -> str:
    """Return what has a status, by library and name: the releases that have it, and perhaps a case of the last."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for run in runs.to_dict("records"):
        for line in run[f"{status}: lines"] or ():
            case, _, said = line.partition(": ")
            name = re.split(": cosine|; the gradient", said)[0]
            source = said.partition("(declared: ")[2].rstrip(")")
            measured = said.partition(": cosine ")[2].partition(" (declared")[0]
            measured = measured.replace(", size", " /").replace(", no gradient is due", " / none is due")
            shown = f"{case} ({measured})" if measured else case
            releases = found.setdefault((run["adapter"], f"{name} ({source})" if source else name), {})
            releases.setdefault(run["release"], []).append(shown)
    lines = []
    for (adapter, name), releases in found.items():
        first, *others = list(releases.values())[-1]
        more = f" and {len(others)} more" if others else ""
        lines.append(f"- **{adapter}** {', '.join(releases)}: {name}" + f": {first}{more}" * example)
    return "\n".join(lines)


def table_losses_differ(folder: pathlib.Path) -> str:
    """What differs from what is asked, and is documented nowhere that was found; of all releases."""
    return list_lines(read_libraries(folder), check.DIFFERS, example=True)


def table_losses_other(folder: pathlib.Path) -> str:
    """What the newest releases document as another objective."""
    return list_lines(newest(read_libraries(folder)), check.OTHER, example=False)


def table_planted_losses(folder: pathlib.Path) -> str:
    """The twenty bugs: how many are found and named, and how many polgrad finds."""
    runs = frames.read_runs(folder, "known_gradients", r"planted: (?P<kind>\w+)")
    bugs = runs[runs.kind != "Loss"]
    found, named, polgrad = (int(bugs[column].astype(bool).sum()) for column in ("found", "named", "polgrad"))
    return (
        f"{found} of {len(bugs)} are found, {named} of {len(bugs)} rightly named; polgrad {POLGRAD} finds {polgrad}: "
        f"{', '.join(bugs.source)}."
    )


def main() -> None:
    """Measure what is asked for, and record it."""
    arguments = recording.begin(
        __doc__,
        parts={"nargs": "+", "choices": (*PARTS, "drift"), "default": PARTS},
        sources={"type": pathlib.Path, "default": ROOT / ".course" / "losses"},
        names={"nargs": "*", "default": []},
    )
    torch.set_num_threads(1)
    if "drift" in arguments.parts:
        sys.exit(tell_drift(arguments.sources, arguments.names, ROOT / "evidence" / "cpu"))
    try:
        if "libraries" in arguments.parts:
            record_libraries(arguments.sources, arguments.names)
        if "planted" in arguments.parts:
            record_planted(arguments.sources)
    except recording.CannotRun as reason:
        recording.end_not_run(str(reason))


if __name__ == "__main__":
    main()
