"""The atlas: what two releases differ in, which stacks there are, and what is said of what is not there."""

import datetime
import json
import sys

import pytest

from failurelab.failures import atlas
from failurelab_course import eras

sys.path.insert(0, str(eras.root() / "benchmarks" / "atlas"))
import measure
import stacks
import summary

from failurelab.preflight.answer import Answer, Finding


def release(version, day):
    return stacks.Release(stacks.Version(version), datetime.date.fromisoformat(day))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Two releases: one failure goes, one comes, one stays; a row that one of them did not measure tells nothing."""
    rows = [{"id": name, "what": name, "failures": ["F1"]} for name in ("goes", "comes", "stays", "unknown")]
    old, new = ["silent", "F1"], ["no failure", ""]
    columns = [
        {"states": [old, new, old, ["not measured", ""]], "defaults": {"GRPOConfig": {"beta": 0.04, "gone": 1}}},
        {"states": [new, ["loud", "F2"], old, old], "defaults": {"GRPOConfig": {"beta": 0.0, "new": 1}}},
    ]
    for column, version in zip(columns, ("0.19.1", "1.16.0")):
        versions = {"trl": version, "transformers": "4.53.2"}
        column.update(name=f"trl-{version}", versions=versions, day="2025-07-11")
    path = tmp_path / "atlas.json"
    path.write_text(json.dumps({"rows": rows, "columns": columns}))
    monkeypatch.setattr(atlas, "FILE", path)
    atlas.read.cache_clear()
    yield
    atlas.read.cache_clear()


def test_what_an_upgrade_brings(table):
    changes = atlas.compare(atlas.of_release("0.19.1"), atlas.of_release("1.16.0.dev0"))
    ids = [[row.id for row in rows] for rows in (changes.gone, changes.came, changes.stayed)]
    assert ids == [["goes"], ["comes"], ["stays"]]
    assert changes.defaults == (("GRPOConfig", "beta", 0.04, 0.0),)
    assert "loud" in atlas.describe(changes) and "beta: 0.04 -> 0.0" in atlas.describe(changes)


def test_a_stack_is_found_by_both_releases(table):
    found = atlas.find({"trl": "0.19.1", "transformers": "4.53.2"})
    assert found is not None and found.had() == {"F1": {"goes", "stays"}}
    assert atlas.find({"trl": "0.19.1", "transformers": "4.54.0"}) is None
    assert atlas.find({"transformers": "4.53.2"}) is None


def test_another_patch_release_of_transformers_is_near_enough(table):
    near, far = ({"trl": "0.19.1", "transformers": version} for version in ("4.53.9.dev0", "4.52.4"))
    assert atlas.find(near).versions["transformers"] == "4.53.2"
    assert atlas.find(far) is None and atlas.cite(far) == ""


def test_what_was_measured_and_what_an_upgrade_changes_is_one_line(table):
    line = atlas.cite({"trl": "0.19.1", "transformers": "4.53.2"})
    assert line == "trl 0.19.1, transformers 4.53.2, as measured: F1; an upgrade to 1.16.0 brings F2"
    assert "upgrade" not in atlas.cite({"trl": "1.16.0", "transformers": "4.53.2"})


def test_a_table_of_the_releases_that_have_a_failure(table):
    """Set-ups are columns, and releases that were found alike are one row."""
    columns, rows = atlas.table(["F1"])
    assert columns == ["trl", "goes", "comes", "stays", "unknown"]
    assert rows[0] == ["0.19.1", "silent", "no failure", "silent", "not measured"]
    assert rows[1] == ["1.16.0", "no failure", "loud", "silent", "silent"]
    assert atlas.table(["stays", "unknown"])[1][0] == ["0.19.1", "silent", "not measured"]
    assert atlas.table(["stays"])[1] == [["0.19.1 to 1.16.0", "silent"]]
    with pytest.raises(atlas.UnknownRelease, match="no set-up"):
        atlas.table(["F99"])


@pytest.mark.parametrize(("asked", "words"), [("0.19.0", "one of 0.19.1"), ("seven", "is no version")])
def test_a_release_that_was_not_measured_is_said(asked, words, table):
    with pytest.raises(atlas.UnknownRelease, match=words) as raised:
        atlas.of_release(asked)
    assert raised.value.exit_status == 2


def test_the_table_that_ships_can_be_read():
    rows, columns = atlas.read()
    assert {row.id for row in rows} == {probe["id"] for probe in measure.read_probes()}
    assert columns and all(set(column.states) <= {row.id for row in rows} for column in columns)


def test_the_table_and_the_page_are_those_of_the_evidence():
    """They are written by `make atlas`, and by nothing else."""
    records = summary.read_evidence(measure.OUT)
    assert json.loads(atlas.FILE.read_text()) == summary.make_table(records)
    assert summary.PAGE.read_text() == summary.make_page(atlas.read()[0], records)


def test_stacks_are_each_release_of_trl_and_each_minor_one_of_transformers():
    trl = [release("0.14.0", "2025-01-29"), release("0.19.1", "2025-07-08")]
    transformers = [
        release(*each) for each in (("4.45.0", "2024-09-25"), ("4.53.0", "2025-06-26"), ("4.53.2", "2025-07-11"))
    ]
    chosen = {stack.name: stack for stack in stacks.choose(trl, transformers)}
    assert list(chosen) == ["trl-0.14.0", "trl-0.19.1", "transformers-4.45.0", "transformers-4.53.0"]
    assert chosen["transformers-4.45.0"].pinned == {"transformers": "4.45.0", "trl": "0.14.0"}
    assert chosen["trl-0.19.1"].until == datetime.date(2025, 7, 11)


def test_an_index_that_is_not_there(monkeypatch):
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:9")
    with pytest.raises(stacks.IndexUnreadable, match="check the network") as raised:
        stacks.read_index("trl")
    assert raised.value.exit_status == 3


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (Answer(error="probe.py, line 4, ended by itself before training: NOT THERE: RLOOTrainer"), "not there"),
        (Answer(findings=[Finding("F2", "element 0", ends=True)], error="element 0"), "loud"),
        (Answer(findings=[Finding("F1", "24 of 25")]), "silent"),
        (Answer(findings=[Finding.held("F1", "all 26", "planted")]), "no failure"),
        (Answer(findings=[Finding.not_checked("F1", "no step")]), "not measured"),
        (Answer(error="ended in TypeError"), "could not run"),
    ],
)
def test_what_an_answer_makes_of_a_cell(answer, state):
    assert measure.judge(answer, ["F1", "F2"])["state"] == state
