"""The ledger: validated, merged and compared, and the tables and pictures made from it."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from failurelab_course import eras
from failurelab_course.experiments import observe
from failurelab_course.ledger import pages, pictures
from failurelab_course.ledger.compare import compare
from failurelab_course.ledger.records import (
    EvidenceError,
    merge_records,
    read_cards,
    read_ledger,
    validate,
    write_ledger,
)
from failurelab_course.runs import benchmarks

ROOT = eras.root()


@pytest.fixture(scope="module")
def ledger():
    return read_ledger(ROOT / "evidence" / "cpu.json")


def record(**changes):
    made = observe.record("F1", "broken", {"changed": 1, "seconds": 2.0, "learned": False}, case="frozen", seed=0)
    return made | {"source": "benchmarks/one.py"} | changes


def with_metrics(**metrics):
    return record(figures=record()["figures"] | metrics)


def test_a_ledger_keeps_what_was_recorded(tmp_path):
    """Saved and loaded, records are the same; a newer one replaces the same measurement."""
    path = tmp_path / "cpu.json"
    write_ledger(path, merge_records([], [record(), record(seed=1), with_metrics(changed=2)]))
    assert [(made["seed"], made["figures"]["changed"]) for made in read_ledger(path)] == [(0, 2), (1, 1)]


def test_what_a_source_no_longer_measures_is_dropped():
    """A benchmark measured again replaces its old records in that era, whatever cases they had."""
    old = [record(case="gone"), record(era="trl-0.14"), record(source="benchmarks/two.py")]
    assert sorted((made["case"], made["era"], made["source"]) for made in merge_records(old, [record()])) == [
        ("frozen", "today", "benchmarks/one.py"),
        ("frozen", "today", "benchmarks/two.py"),
        ("frozen", "trl-0.14", "benchmarks/one.py"),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"records": [{"schema": 1}]}', '{"records": 3}', "{"],
    ids=["empty", "a list", "no fields", "a number", "half"],
)
def test_what_is_no_ledger_is_refused(tmp_path, text):
    """A file cut short is found, and named; a card's too."""
    path = tmp_path / "h200.json"
    path.write_text(text)
    for read in (lambda: read_ledger(path), lambda: read_cards(tmp_path)):
        with pytest.raises(EvidenceError, match=r"h200\.json"):
            read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "newer"),  # an old package does not misread a newer ledger
        ({"tier": ""}, "a figure without a tier"),
        ({"tier": "fast"}, "a figure without a tier"),
    ],
)
def test_a_record_that_cannot_be_understood_is_refused(tmp_path, changes, message):
    with pytest.raises(EvidenceError, match=message):
        validate(record(**changes))
    with pytest.raises(EvidenceError, match=message):
        write_ledger(tmp_path / "cpu.json", [record(**changes)])
    assert not list(tmp_path.iterdir())


def test_a_ledger_never_mixes_versions(tmp_path):
    """One era on one device was measured with one stack, or the ledger is refused and the old one stays."""
    path = tmp_path / "cpu.json"
    write_ledger(path, [record()])
    before = path.read_text()
    other = record(seed=1, versions=record()["versions"] | {"trl": "9.0"})
    with pytest.raises(EvidenceError, match="would mix versions in era today: trl"):
        write_ledger(path, [record(), other])
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["cpu.json"]
    write_ledger(path, [record(), other | {"device": "another"}])


def test_a_benchmark_that_records_nothing_is_an_error(tmp_path, monkeypatch):
    """A benchmark whose figures are lost must not look recorded."""
    for name in ("eras", "helpers", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / "benchmarks" / "silent.py"
    script.parent.mkdir()
    script.write_text('"""Nothing.\n\nEras: today.\n"""\n')
    monkeypatch.setenv("FAILURELAB_ROOT", str(tmp_path))
    assert benchmarks.benchmarks() == {"silent": ["today"]}
    with pytest.raises(EvidenceError, match="recorded nothing"):
        benchmarks.run_benchmark("silent", "today", tmp_path / "out")
    script.write_text("raise SystemExit('it broke')")
    with pytest.raises(EvidenceError, match="exit status 1"):
        benchmarks.run_benchmark("silent", "today", tmp_path / "out")


# Two ledgers compared


def test_equal_ledgers_hold():
    found = compare([record(), record(seed=1)], [record(seed=1), record()])
    assert (found.same, found.only_old, found.only_new, found.verdicts, found.magnitudes) == (2, [], [], [], [])
    assert found.holds


def test_a_magnitude_may_differ_beyond_the_tolerance_and_a_verdict_may_not():
    """Twice the time on another machine is told; one more tensor, or another answer, is a verdict."""
    for old, new, tolerance, ratios in (
        (2.0, 4.0, 0.1, [2.0]),
        (2.0, 2.1, 0.1, []),
        (2.0, 2.1, 0.01, [1.05]),
        (0.0, 1.0, 0.1, [None]),
    ):
        found = compare([with_metrics(seconds=old)], [with_metrics(seconds=new)], tolerance)
        assert found.holds
        assert [(each.figure, each.ratio) for each in found.magnitudes] == [("seconds", ratio) for ratio in ratios]
    for name, value in (("changed", 2), ("learned", True), ("changed", None)):
        found = compare([record()], [with_metrics(**{name: value})])
        assert not found.holds
        assert [(each.figure, each.new) for each in found.verdicts] == [(name, value)]


def test_what_is_missing_or_new_is_named_with_its_place():
    found = compare([record()], [record(seed=1)])
    assert found.only_old == ["F1 frozen (broken, today, seed 0, benchmarks/one.py)"]
    assert found.only_new == ["F1 frozen (broken, today, seed 1, benchmarks/one.py)"]
    assert not found.holds


def test_versions_and_machines_are_named():
    newer = record(versions=record()["versions"] | {"torch": "9.0"}, device="H100", tier="gpu")
    found = compare([record()], [newer])
    assert [line.partition(" -> ")[2] for line in found.versions] == ["9.0"]
    assert found.machines[1] == f"H100 (tier gpu, {newer['processor']})"
    older = record()
    del older["processor"]  # as it was recorded before processors were named
    found = compare([older], [record()])
    assert found.machines[0] == f"{older['device']} (tier cpu)" and found.holds


def test_the_command_tells_and_its_exit_status_says_so(tmp_path):
    for name, made in (("a", record()), ("b", with_metrics(changed=3, seconds=9.0)), ("c", record())):
        write_ledger(tmp_path / f"{name}.json", [made])

    def compared(*arguments):
        command = [sys.executable, "-m", "failurelab", "evidence", "compare", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = compared("a.json", "b.json")
    assert done.returncode == 1
    assert "changed 1 -> 3" in done.stdout and "1 verdicts and 1 magnitudes differ" in done.stdout
    assert compared("a.json", "c.json").returncode == 0
    found = json.loads(compared("a.json", "b.json", "--json").stdout)
    assert found["holds"] is False and found["magnitudes"][0]["ratio"] == 4.5
    done = compared("a.json", "none.json")
    assert done.returncode == 1 and "no ledger at" in done.stderr and len(done.stderr.splitlines()) <= 2


# Tables and pictures


def test_a_table_that_does_not_exist_is_refused():
    """A typing error in the README is found, not left as it is."""
    with pytest.raises(EvidenceError, match="unknown table 'lerning'"):
        pages.update_tables("<!-- table: lerning -->\n<!-- end table -->", [])


@pytest.mark.parametrize(
    ("processors", "note"),
    [
        (["EPYC, avx2", "EPYC, avx2"], ""),
        ([None, None], ""),
        (
            ["EPYC, avx2", "Xeon, amx_bf16", "EPYC, avx2"],
            "which may round differently: EPYC, avx2 (2); Xeon, amx_bf16 (1).",
        ),
        (["EPYC, avx2", None], "EPYC, avx2 (1), and one that was not recorded (1)."),
    ],
)
def test_a_table_of_several_processors_says_so(tmp_path, processors, note):
    """Old records do not name theirs, and are read as before."""
    runs = []
    for seed, processor in enumerate(processors):
        made = with_metrics(sampled_before=0.4, sampled_after=0.6, seconds=9.0) | {"failure": "ground", "seed": seed}
        runs.append(made | {"case": "GRPO learns sums", "processor": processor})
        if processor is None:
            del runs[-1]["processor"]
    write_ledger(tmp_path / "cpu.json", runs)
    text = pages.update_tables("<!-- table: learning -->\n<!-- end table -->", read_ledger(tmp_path / "cpu.json"))
    assert text.endswith(f"{note}\n<!-- end table -->") and ("processors" in text) == bool(note)


@pytest.mark.parametrize("name", pages.PAGES)
def test_the_tables_of_a_page_are_not_stale(name, ledger):
    """Tables are written from the ledger by `failurelab evidence tables`, and by nothing else."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in page
    assert pages.update_tables(page, ledger) == page


def test_every_table_is_shown():
    """A table that no page shows is no use to anyone."""
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in pages.PAGES)
    assert pages.TABLES and [name for name in pages.TABLES if f"<!-- table: {name} -->" not in text] == []


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_not_stale(name, ledger):
    """It carries a digest of the curves that it shows."""
    assert Image.open(ROOT / "evidence" / name).info["Description"] == pictures.make_digest(name, ledger)


def test_pictures_are_drawn_with_their_digests(tmp_path, ledger):
    pictures.draw_pictures(ledger, tmp_path)
    for name in pictures.PICTURES:
        assert Image.open(tmp_path / name).info["Description"] == pictures.make_digest(name, ledger)


def test_each_card_has_a_table_and_without_one_it_is_not_run(tmp_path):
    """Ledgers of cards are found by their tier; what a card could not run keeps its reason."""
    shape, ways = "2 x (256+768), width 896, tied, bfloat16", "kept, selective_log_softmax"

    def of_card(case, metrics, tier="gpu", device="NVIDIA H200"):
        return record(failure="F3a", state="measured", case=case, figures=metrics, tier=tier, device=device)

    predicted = {"arithmetic_mib": None, "predicted_mib": 20.0, "measured_mib": 16.0, "ratio": 1.25}
    timed = {"seconds": 0.0125, "time_to_kept": 1.5, "peak_mib": 300.4, "memory_to_kept": 0.25}
    assert read_cards(tmp_path) == []
    for name in ("predicted", "card-log-probs"):
        assert "NOT RUN" in pages.TABLES[name]([], [])
    written = [
        of_card("predicted: kept logits", predicted),
        of_card("predicted: full logits", {"predicted_mib": 9.0, "not_run": "too small"}),
        of_card(f"log-probs: {ways}, {shape}", timed),
        of_card(f"log-probs: {ways}, {shape}", {"not_run": "out of memory"}, device="NVIDIA A100"),
        of_card("predicted: simulated", predicted, tier="simulated"),
    ]
    write_ledger(tmp_path / "h200.json", written)
    cards = read_cards(tmp_path)
    assert len(cards) == 4
    table = pages.TABLES["predicted"]([of_card("predicted: kept logits", predicted, "cpu", "a CPU")], cards)
    assert table.index("a CPU (tier: cpu)") < table.index("NVIDIA H200 (tier: gpu)")
    assert "| kept logits |  | 20.0 | 16.0 |  | 1.250 |" in table
    assert "| full logits |  | 9.0 | NOT RUN: too small |  |  |" in table and "simulated |  |" not in table
    table = pages.TABLES["card-log-probs"]([], cards)
    assert f"| {shape} | {ways} | 12.5 | 1.50 | 300 | 0.25 |" in table
    assert f"| {shape} | {ways} | NOT RUN: out of memory |  |  |  |" in table


def test_the_table_of_faults_shows_what_was_not_run():
    """It never counts as tried; a line with a bar or a tag in it stays one cell."""
    seen = {"how": "SIGKILL", "line": "a | <b>", "status": 3, "lost": 0, "left": 0, "again": "PASS"}
    records = [
        record(source="faults", case="fault: killed", figures=seen),
        record(source="faults", case="fault: full", figures={"how": "tmpfs", "not_run": "it needs root"}),
    ]
    made = pages.TABLES["faults"](records)
    assert made.startswith("1 of 2 faults were tried.")
    assert "| killed | SIGKILL | a ¦ &lt;b> | 3 | 0 | 0 | PASS |" in made
    assert "| full | tmpfs | NOT RUN: it needs root |" in made


def test_the_table_of_an_endurance_run_stands_before_and_after():
    held = {f"{name}_{when}": 5 for name in ("processes", "files", "mib", "temporary") for when in ("before", "after")}
    held |= {"done": 40, "asked": 50, "minutes": 2.0, "processes_left": 0, "files_left": 1, "temporary_left": 0}
    made = pages.TABLES["endurance"]([record(source="benchmarks/endurance.py", case="endurance: checks", figures=held)])
    assert "| checks | 40 of 50 | 2.0 | 5 → 5 | 5 → 5 | 5 → 5 | 5 → 5 | 0, 1, 0 |" in made
