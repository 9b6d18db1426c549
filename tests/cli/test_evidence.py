"""The ledger: validated, merged, and the README's tables made from it."""

import pytest

from failurelab import eras, evidence, observe

ROOT = eras.root()
LEDGER = ROOT / "evidence" / "cpu.json"


def record(**changes):
    return observe.record("F1", "broken", {"changed": 1}, case="frozen", seed=0) | changes


def test_a_ledger_keeps_what_was_recorded(tmp_path):
    """Saved and loaded, records are the same; a newer one replaces the same measurement."""
    path = tmp_path / "cpu.json"
    evidence.save(path, evidence.merge([record(), record(seed=1)], [record(figures={"changed": 2})]))
    assert [(made["seed"], made["figures"]) for made in evidence.load(path)] == [
        (0, {"changed": 2}),
        (1, {"changed": 1}),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"records": [{"schema": 1}]}', '{"records": 3}'],
    ids=["empty", "a list", "no fields", "a number"],
)
def test_what_is_no_ledger_is_refused(tmp_path, text):
    """A file cut short is found, and named."""
    path = tmp_path / "cpu.json"
    path.write_text(text)
    with pytest.raises(evidence.EvidenceError, match=r"cpu\.json"):
        evidence.load(path)


def test_a_newer_schema_is_refused():
    """An old package does not misread a newer ledger."""
    with pytest.raises(evidence.EvidenceError, match="newer"):
        evidence.validate(record(schema=2))


def test_a_table_that_does_not_exist_is_refused():
    """A typing error in the README is found, not left as it is."""
    with pytest.raises(evidence.EvidenceError, match="unknown table 'lerning'"):
        evidence.update_tables("<!-- table: lerning -->\n<!-- end table -->", [])


def test_a_benchmark_that_records_nothing_is_an_error(tmp_path, monkeypatch):
    """A benchmark whose figures are lost must not look recorded."""
    (tmp_path / "eras").symlink_to(ROOT / "eras")
    (tmp_path / "helpers").symlink_to(ROOT / "helpers")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "silent.py").write_text('"""Nothing.\n\nEras: today.\n"""\n')
    monkeypatch.setenv("FAILURELAB_ROOT", str(tmp_path))
    assert evidence.benchmarks() == {"silent": ("today",)}
    with pytest.raises(evidence.EvidenceError, match="recorded nothing"):
        evidence.run_benchmark("silent", "today", tmp_path / "out")
    (tmp_path / "benchmarks" / "silent.py").write_text("raise SystemExit('it broke')")
    with pytest.raises(evidence.EvidenceError, match="exit status 1"):
        evidence.run_benchmark("silent", "today", tmp_path / "out")


def test_the_ledger_in_the_repository_is_valid():
    """Every stored record follows the schema, and comes from a CPU."""
    records = evidence.load(LEDGER)
    assert {made["tier"] for made in records} <= {"cpu", "simulated"}
    assert len({evidence.key(made) for made in records}) == len(records) > 0


def test_the_readme_s_tables_are_not_stale():
    """Tables are written from the ledger by `failurelab evidence tables`, and by nothing else."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("<!-- table: ") >= 1
    assert evidence.update_tables(readme, evidence.load(LEDGER)) == readme


def test_every_table_is_shown():
    """A table that the README does not show is no use to anyone."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in evidence.TABLES if f"<!-- table: {name} -->" not in readme] == []
