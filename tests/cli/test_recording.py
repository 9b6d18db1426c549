"""What `evidence record` does with a machine that lacks something, and with little time."""

import contextlib
import json
import re
import subprocess
import types

import pytest

from failurelab_course import eras
from failurelab_course.experiments import machine, observe
from failurelab_course.labs import verify as labs
from failurelab_course.ledger.compare import compare
from failurelab_course.ledger.records import EvidenceError, NotRun, read_ledger, read_not_run, write_ledger
from failurelab_course.runs import benchmarks
from failurelab_course.runs import notebooks as course
from failurelab_course.runs import record as recording


def record(name="benchmarks/one.py", **changes):
    return observe.record("F1", "broken", {"changed": 1}, case=name, seed=0) | {"source": name} | changes


def result(**became):
    return course.Result(name="00_start_here", of=1, parameters={}, copy=None, html=None, log=None, **became)


@pytest.fixture
def parts(monkeypatch):
    """Two benchmarks, a notebook and two labs, that run in no time; the names of what ran."""
    ran = []
    monkeypatch.setattr(benchmarks, "benchmarks", lambda: {"one": ("today",), "two": ("today", "trl-0.14")})
    monkeypatch.setattr(machine, "describe", lambda device: {"device": device})

    def benchmark(name, era, folder, device):
        ran.append(f"{name} {era}")
        return [record(f"benchmarks/{name}.py", era=era)]

    def notebook(names, **options):
        ran.append(names[0])
        return [result(status="PASS", reason="", records=[record(names[0])])]

    def verify(names, **options):
        ran.extend(names)
        return [labs.Row(name, labs.BROKEN, "start", labs.PASS, records=[record(f"labs/{name}")]) for name in names]

    monkeypatch.setattr(benchmarks, "run_benchmark", benchmark)
    monkeypatch.setattr(course, "run", notebook)
    monkeypatch.setattr(labs, "verify", verify)
    monkeypatch.setattr(labs, "known", lambda: ["01_a", "02_b"])
    return ran


def record_parts(path, *only, say=lambda text: None, **options):
    recording.record(path, only=list(only), say=say, **options)


ONLY = ["one", "two", "00_start_here", "01_a", "02_b"]


def test_benchmarks_come_first_and_all_is_kept(parts, tmp_path):
    record_parts(tmp_path / "x.json", *ONLY)
    assert parts == ["one today", "two today", "two trl-0.14", "00_start_here", "01_a", "02_b"]
    assert len(read_ledger(tmp_path / "x.json")) == 6


def test_a_limit_on_time_keeps_what_there_is(parts, tmp_path, monkeypatch):
    """No new part is started after it; the line names what is left, and the exit status is not 0."""
    clock = iter(range(0, 600, 30))
    monkeypatch.setattr(recording, "time", types.SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(EvidenceError, match=r"limit of 1 minutes came before 4 of 6 parts: bench"):
        record_parts(tmp_path / "x.json", *ONLY, time_limit=1)
    assert parts == ["one today", "two today"]
    assert len(read_ledger(tmp_path / "x.json")) == 2
    with pytest.raises(EvidenceError, match="a number above 0"):
        record_parts(tmp_path / "x.json", *ONLY, time_limit=0)


def test_what_a_machine_lacks_is_kept_with_its_reason_and_no_failure(parts, tmp_path, monkeypatch):
    """NOT RUN stands in the ledger until the part has run; what fails is a failure all the same."""
    good = benchmarks.run_benchmark

    def lacks(name, era, folder, device):
        if name == "one":
            raise benchmarks.CannotRun("era today was made without deepspeed")
        return good(name, era, folder, device)

    path, said = tmp_path / "x.json", []
    monkeypatch.setattr(benchmarks, "run_benchmark", lacks)
    record_parts(path, "one", "two", say=said.append)
    assert "NOT RUN benchmarks/one.py in era today: era today was made without deepspeed" in said
    assert read_not_run(path) == [NotRun("benchmarks/one.py", "era today was made without deepspeed", "today")]
    write_ledger(path, read_ledger(path))
    assert len(read_not_run(path)) == 1
    monkeypatch.setattr(benchmarks, "run_benchmark", good)
    record_parts(path, "one", say=said.append)
    assert read_not_run(path) == [] and len(read_ledger(path)) == 3

    def fails(name, era, folder, device):
        raise EvidenceError("it broke")

    monkeypatch.setattr(benchmarks, "run_benchmark", fails)
    with pytest.raises(EvidenceError, match="it broke"):
        record_parts(path, "one", say=said.append)


def test_a_benchmark_of_an_era_that_was_not_made_is_not_run(parts, tmp_path, monkeypatch):
    """A cluster may have room for one era only; that is no failure, and it is said."""
    find = eras.find

    def found(name, ready=True):
        return types.SimpleNamespace(status="missing") if name == "trl-0.14" else find(name, ready=ready)

    monkeypatch.setattr(eras, "find", found)
    out = tmp_path / "ledger.json"
    record_parts(out, "two")
    (left,) = read_not_run(out)
    assert (left.name, left.era) == ("benchmarks/two.py", "trl-0.14")
    assert left.reason.startswith("era trl-0.14 is not made here. Next")


def test_without_the_course_s_packages_notebooks_are_not_run(parts, tmp_path, monkeypatch):
    """A cluster's wheels may hold no Jupyter: benchmarks and labs are recorded all the same."""
    monkeypatch.setattr(recording.importlib.util, "find_spec", lambda name: None if name == "papermill" else name)
    record_parts(tmp_path / "x.json", "one", "00_start_here", "01_a")
    assert parts == ["one today", "01_a"]
    (kept,) = read_not_run(tmp_path / "x.json")
    assert (kept.name, kept.reason) == ("00_start_here", "not installed here: papermill")


@pytest.mark.parametrize(
    ("part", "status", "reason", "failed"),
    [
        ("00_start_here", "NOT RUN", "no GPU is found", False),
        ("00_start_here", "FAIL", "In [4]: EraCellError: ModuleNotFoundError: No module named 'deepspeed'", False),
        ("00_start_here", "FAIL", "In [4]: AssertionError: 0.3", True),
        ("00_start_here", "ENVIRONMENT", "era trl-0.14 is missing", True),
        ("labs/01_a", "NOT RUN", "it uses no GPU", False),
        ("labs/01_a", "ENVIRONMENT", "era today does not import deepspeed: No module named 'deepspeed'", False),
        ("labs/01_a", "ENVIRONMENT", "era trl-0.14 is missing", True),
        ("labs/01_a", "FAIL", "it is already solved", True),
    ],
)
def test_what_cannot_run_is_told_from_what_fails(parts, tmp_path, monkeypatch, part, status, reason, failed):
    row = labs.Row("01_a", labs.BROKEN, "start", status, reason)
    monkeypatch.setattr(course, "run", lambda names, **options: [result(status=status, reason=reason)])
    monkeypatch.setattr(labs, "verify", lambda names, **options: [row])
    path, name = tmp_path / "x.json", part.removeprefix("labs/")
    message = rf"{name}.*: {status}, {re.escape(reason)}"
    with pytest.raises(EvidenceError, match=message) if failed else contextlib.nullcontext():
        record_parts(path, name)
    assert failed or read_not_run(path) == [NotRun(part, reason)]


@pytest.mark.parametrize(
    ("output", "status", "reason"),
    [
        ("| a table |\nNOT RUN: no package index is reached", 4, "no package index is reached"),
        ("Traceback\nModuleNotFoundError: No module named 'deepspeed'", 1, "No module named 'deepspeed'"),
        ("deepspeed.ops.MissingCUDAException: CUDA_HOME does not exist, unable to compile", 1, "CUDA_HOME"),
        ("ModuleNotFoundError: No module named 'failurelab.nothing'", 1, ""),
        ("No module named 'deepspeed'\nAssertionError: 0.3", 1, ""),
        ("NOT RUN: said, and ended as a failure", 1, ""),
        ("", 1, ""),
    ],
)
def test_only_what_is_lacking_is_no_failure(output, status, reason):
    """A benchmark that breaks in another way must not pass for one that could not run."""
    found = benchmarks.why(output, status)
    assert (reason in found) if reason else found == ""


def test_a_benchmark_s_needs_are_asked_of_the_era(tmp_path, monkeypatch):
    era = eras.Era("old", "old", tmp_path / "old.txt", tmp_path)
    (tmp_path / eras.MARKER).write_text(json.dumps({"zero3": False}))
    assert "is not built in era old" in benchmarks.unmet(["zero3"], era, "cpu")
    assert benchmarks.unmet(["zero3"], era, "cuda") == ""
    (tmp_path / eras.MARKER).write_text(json.dumps({"zero3": True}))
    assert benchmarks.unmet(["zero3", "bitsandbytes"], era, "cpu") == ""


def test_needs_are_known_words():
    """A typing error in a docstring would let a benchmark fail where it cannot run."""
    needs = {need for name in benchmarks.benchmarks() for need in benchmarks.needs(name)}
    assert needs <= {"zero3", "deepspeed", "bitsandbytes"} and "zero3" in needs


def test_what_was_not_run_is_not_missing_from_a_comparison():
    """A second machine may say why it lacks a measurement; without a reason the ledgers do not hold."""
    old = [record(), record("labs/01_a", era="trl-0.14")]
    reasons = [NotRun("benchmarks/one.py", "no compiler", "today"), NotRun("labs/01_a", "no GPU")]
    found = compare(old, [], not_run=reasons)
    assert found.holds and [line.rpartition(": ")[2] for line in found.not_run] == ["no compiler", "no GPU"]
    assert not compare(old, [], not_run=reasons[:1]).holds
    elsewhere = [NotRun("benchmarks/one.py", "no compiler", "trl-0.15"), reasons[1]]
    assert not compare(old, [], not_run=elsewhere).holds


def test_an_entry_without_a_reason_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"schema": 1, "records": [], "not_run": [{"name": "labs/01"}]}')
    with pytest.raises(EvidenceError, match="no name or no reason"):
        read_not_run(path)


def test_a_ledger_that_cannot_be_written_is_told_before_hours_of_runs(parts, tmp_path):
    with pytest.raises(EvidenceError, match="is no folder, so no ledger can be written"):
        record_parts(tmp_path / "nowhere" / "x.json", "one")
    (tmp_path / "x.json").write_text("half a led")
    with pytest.raises(EvidenceError, match="is not a ledger"):
        record_parts(tmp_path / "x.json", "one")
    assert parts == []


def test_show_prints_what_was_not_run(tmp_path):
    path = tmp_path / "x.json"
    write_ledger(path, [record()], [NotRun("benchmarks/two.py", "no compiler", "today")])
    command = [str(eras.find(eras.TODAY).python), "-m", "failurelab", "evidence", "show", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "NOT RUN benchmarks/two.py in era today: no compiler" in printed
