"""Two ledgers compared, and what a ledger refuses to hold."""

import json
import subprocess
import sys

import pytest

from failurelab_course.experiments import observe
from failurelab_course.ledger import compare as ledger_compare
from failurelab_course.ledger import records as evidence


def record(**changes):
    made = observe.record("F1", "broken", {"changed": 1, "seconds": 2.0, "learned": False}, case="frozen", seed=0)
    return made | {"source": "benchmarks/one.py"} | changes


def with_figures(**figures):
    return record(figures=record()["figures"] | figures)


def test_equal_ledgers_hold():
    found = ledger_compare.compare([record(), record(seed=1)], [record(seed=1), record()])
    assert (found.same, found.only_old, found.only_new, found.verdicts, found.magnitudes) == (2, [], [], [], [])
    assert found.holds


def test_a_magnitude_may_differ_and_a_verdict_may_not():
    """Twice the time on another machine is told; one more tensor, or another answer, is a verdict."""
    found = ledger_compare.compare([record()], [with_figures(seconds=4.0)])
    assert found.holds
    assert [(each.figure, each.ratio) for each in found.magnitudes] == [("seconds", 2.0)]
    for name, value in (("changed", 2), ("learned", True), ("changed", None)):
        found = ledger_compare.compare([record()], [with_figures(**{name: value})])
        assert not found.holds
        assert [(each.figure, each.new) for each in found.verdicts] == [(name, value)]


def test_small_differences_are_passed_over_up_to_the_tolerance():
    assert ledger_compare.compare([record()], [with_figures(seconds=2.1)]).magnitudes == []
    assert len(ledger_compare.compare([record()], [with_figures(seconds=2.1)], tolerance=0.01).magnitudes) == 1
    found = ledger_compare.compare([with_figures(seconds=0.0)], [with_figures(seconds=1.0)])
    assert found.magnitudes[0].ratio is None


def test_what_is_missing_or_new_is_named_with_its_place():
    found = ledger_compare.compare([record()], [record(seed=1)])
    assert found.only_old == ["F1 frozen (broken, today, seed 0, benchmarks/one.py)"]
    assert found.only_new == ["F1 frozen (broken, today, seed 1, benchmarks/one.py)"]
    assert not found.holds


def test_versions_and_machines_are_named():
    newer = record(versions=record()["versions"] | {"torch": "9.0"}, device="H100", tier="gpu")
    found = ledger_compare.compare([record()], [newer])
    assert [line.partition(" -> ")[2] for line in found.versions] == ["9.0"]
    assert found.machines[1] == "H100 (tier gpu)"


def test_the_command_tells_and_its_exit_status_says_so(tmp_path):
    for name, made in (("a", record()), ("b", with_figures(changed=3, seconds=9.0)), ("c", record())):
        evidence.save(tmp_path / f"{name}.json", [made])

    def compared(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "failurelab", "evidence", "compare", *map(str, arguments)],
            capture_output=True,
            text=True,
        )

    done = compared(tmp_path / "a.json", tmp_path / "b.json")
    assert done.returncode == 1
    assert "changed 1 -> 3" in done.stdout and "1 verdicts and 1 magnitudes differ" in done.stdout
    assert compared(tmp_path / "a.json", tmp_path / "c.json").returncode == 0
    found = json.loads(compared(tmp_path / "a.json", tmp_path / "b.json", "--json").stdout)
    assert found["holds"] is False and found["magnitudes"][0]["ratio"] == 4.5
    done = compared(tmp_path / "a.json", tmp_path / "none.json")
    assert done.returncode == 1 and "no ledger at" in done.stderr and len(done.stderr.splitlines()) <= 2


def test_a_ledger_never_mixes_versions(tmp_path):
    """One era on one device was measured with one stack, or the ledger is refused and the old one stays."""
    path = tmp_path / "cpu.json"
    evidence.save(path, [record()])
    before = path.read_text()
    other = record(seed=1, versions=record()["versions"] | {"trl": "9.0"})
    with pytest.raises(evidence.EvidenceError, match="would mix versions in era today: trl"):
        evidence.save(path, [record(), other])
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["cpu.json"]
    evidence.save(path, [record(), other | {"device": "another"}])


@pytest.mark.parametrize("tier", ["", "fast"])
def test_figures_without_a_tier_are_refused(tmp_path, tier):
    with pytest.raises(evidence.EvidenceError, match="a figure without a tier"):
        evidence.save(tmp_path / "cpu.json", [record(tier=tier)])
    assert not list(tmp_path.iterdir())


def test_what_a_source_no_longer_measures_is_dropped():
    """A benchmark measured again replaces its old records in that era, whatever cases they had."""
    old = [record(case="gone"), record(era="trl-0.14"), record(source="benchmarks/two.py")]
    kept = evidence.replace(old, [record()])
    assert sorted((made["case"], made["era"], made["source"]) for made in kept) == [
        ("frozen", "today", "benchmarks/one.py"),
        ("frozen", "today", "benchmarks/two.py"),
        ("frozen", "trl-0.14", "benchmarks/one.py"),
    ]
