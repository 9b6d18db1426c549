"""The atlas: what two releases differ in, how a cell is judged, and that the registry says what was measured."""

import datetime
import json
import re
import sys

import pytest

from failurelab.failures import atlas
from failurelab_course import eras

sys.path.insert(0, str(eras.root() / "benchmarks" / "atlas"))
import columns
import drift
import measure
import stacks
import statements
import summary

from failurelab.failures import symptoms
from failurelab_preflight.answer import Answer
from failurelab_preflight.finding import Finding
from failurelab_preflight.report import terminal


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Two releases: one failure goes, one comes, one stays; a row that one of them did not measure tells nothing."""
    rows = [{"id": name, "what": name, "failures": ["F1"]} for name in ("goes", "comes", "stays", "unknown")]
    rows.append({"id": "asked of one", "what": "of the other nobody knows", "failures": ["F7"]})
    old, new = ["silent", "F1"], ["no failure", ""]
    columns = [
        {
            "states": [old, new, old, ["not measured", ""], ["silent", "F7"]],
            "defaults": {"GRPOConfig": {"beta": 0.04, "gone": 1}},
        },
        {"states": [new, ["loud", "F2"], old, old, None], "defaults": {"GRPOConfig": {"beta": 0.0, "new": 1}}},
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
    assert atlas.describe(changes).endswith("beta: 0.04 -> 0.0")


def test_a_version_that_counts_as_another_is_said(table):
    said = atlas.describe_upgrade("0.19.1", "1.17.0.dev0+g123")
    assert said.startswith("trl 1.17.0.dev0+g123 was not measured, and counts as 1.16.0.\nFrom trl 0.19.1")
    assert atlas.describe_upgrade("0.19.1", "1.16").startswith("From trl 0.19.1")
    for versions in (("0.19.0", "1.16.0"), ("0.19.1", "seven")):
        with pytest.raises(atlas.UnknownRelease):
            atlas.describe_upgrade(*versions)


def test_a_stack_is_found_by_both_releases_and_cited_in_a_line(table):
    """Another patch release of transformers is near enough."""
    versions = {"trl": "0.19.1", "transformers": "4.53.2"}
    found = atlas.find(versions)
    assert found is not None and found.had() == {"F1": {"goes", "stays"}, "F7": {"asked of one"}}
    assert atlas.find(versions | {"transformers": "4.53.9.dev0"}) == found
    for far in (versions | {"transformers": "4.52.4"}, {"transformers": "4.53.2"}):
        assert atlas.find(far) is None and atlas.cite(far) == ""
    line = atlas.cite(versions)
    assert line == "trl 0.19.1, transformers 4.53.2, as measured: F1, F7; an upgrade to 1.16.0 brings F2"
    assert "upgrade" not in atlas.cite(versions | {"trl": "1.16.0"})


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


def test_the_table_and_the_page_are_those_of_the_evidence():
    """They are written by `make atlas`, and by nothing else."""
    records = columns.read(measure.OUT)
    assert json.loads(atlas.FILE.read_text()) == summary.make_table(records)
    rows, _ = atlas.read()
    assert summary.PICTURE.read_text() == summary.draw(rows, records)
    assert summary.PAGE.read_text() == summary.make_page(rows, records)


@pytest.mark.parametrize(
    ("answer", "options", "state"),
    [
        (Answer(error="probe.py, line 4, ended by itself: NOT THERE: RLOOTrainer"), {}, "not there"),
        (Answer(error="ended in ValueError: together with a `peft_config`"), {"refused": "together with"}, "not there"),
        (Answer(error="ended in ValueError: together with a `peft_config`"), {}, "could not run"),
        (Answer(findings=[Finding("F2", "element 0", ends=True)], error="element 0"), {}, "loud"),
        (Answer(findings=[Finding("F2", 'the first backward pass ends in "element 0 of tensors"')]), {}, "loud"),
        (Answer(findings=[Finding("F1", "24 of 25")]), {}, "silent"),
        (Answer(findings=[Finding.held("F1", "all 26", "planted")]), {}, "no failure"),
        (Answer(findings=[Finding.not_checked("F1", "no step")]), {}, "not measured"),
        (Answer(findings=[Finding.not_applicable("F1", "trained in float32")]), {"spared": "in float32"}, "no failure"),
        (Answer(findings=[Finding.not_applicable("F1", "trained in float32")]), {}, "not measured"),
    ],
)
def test_what_an_answer_makes_of_a_cell(answer, options, state):
    assert measure.judge(answer, ["F1", "F2"], **options)["state"] == state


GOOD = {"kind": "reentrant", "train": 1e-6, "ends": "", "eval": 1e-6, "rounding": 0.01, "cache": True, "lengths": 3}
GOOD |= {"planted": [0.3, 3.0]}
PEAK = {"peak": 1000, "rows": 1, "tokens": 10, "vocabulary": 1}
ENDS = {"ends": "RuntimeError: a mask for 8 tokens, of which one is there"}
FROZEN = {"tensors": 8, "trainable": 0, "changed": 0}
NO_GRAD = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"


@pytest.mark.parametrize(
    ("kind", "figures", "state"),
    [
        ("generation", [[GOOD], [GOOD]], "no failure"),
        ("generation", [[GOOD], [GOOD | {"train": 1.3}]], "silent"),
        ("generation", [[GOOD], [GOOD | {"train": 1.3, "eval": 1.3}]], "not measured"),  # eval mode is no measure then
        ("generation", [[GOOD], [GOOD | {"lengths": 1}]], "not measured"),
        ("generation", [[GOOD], [GOOD | {"planted": [1e-3, 3.0]}]], "not measured"),  # it would not have been seen
        ("generation", [[GOOD], [GOOD | {"planted": [0.3, 1e-3]}]], "not measured"),
        ("generation", [[GOOD], [GOOD | ENDS]], "loud"),
        ("generation", [[GOOD], []], "not measured"),  # of one kind of checkpointing nothing is known
        ("memory", [[PEAK], [PEAK | {"peak": 1040, "tokens": 35}]], "no failure"),  # what the layers keep
        ("memory", [[PEAK], [PEAK | {"peak": 1100, "tokens": 35}]], "silent"),  # the logits of 25 tokens: 100 bytes
        ("rollouts", [[{"gap": 0.0}, {"gap": 1.0}]], "silent"),
        ("rollouts", [[{"gap": 0.0}, {"gap": 1e-4}]], "no failure"),
        ("rollouts", [[{"gap": 0.0}]], "not measured"),
        ("zero3", [[{"hooks": 0}, {"train": ""}]], "no failure"),
        ("zero3", [[{"hooks": 128}, {"train": ""}]], "silent"),
        ("zero3", [[{"train": "AttributeError: 'NoneType' object has no attribute 'backward'"}]], "loud"),
        ("zero3", [[{"train": "RuntimeError: 'weight' must be 2-D"}]], "could not run"),
        ("zero3", [[{"hooks": 0}]], "could not run"),
        ("evaluation", [[{"evaluate": "AttributeError: 'list' object has no attribute 'get'"}]], "not there"),
        ("tools", [[{"called": 1, "kept": 1}, {"called": 0, "kept": 0}]], "no failure"),
        ("tools", [[{"called": 1, "kept": 1}, {"called": 1, "kept": 0}]], "silent"),
        ("tools", [[{"called": 0, "kept": 0}]], "not measured"),
        ("adapter", [[FROZEN | {"ends": ""}]], "silent"),
        ("adapter", [[FROZEN | {"ends": NO_GRAD}]], "loud"),
        ("adapter", [[FROZEN | {"ends": "TypeError: of another kind"}]], "could not run"),
        ("adapter", [[{"tensors": 8, "trainable": 8, "changed": 8, "ends": ""}]], "no failure"),
        ("tools", [[{"error": "NOT THERE: tools in GRPOTrainer"}]], "not there"),
    ],
)
def test_what_a_probe_measured_makes_of_a_cell(kind, figures, state):
    assert measure.judge_figures(kind, figures)["state"] == state


def states_of(record):
    return {probe["id"]: probe["state"] for probe in record["probes"]}


def test_the_registry_says_what_was_measured():
    """Each probe shows its failure in the releases that the registry names for it, in no other, and not when mended."""
    measured = [record for record in columns.read(measure.OUT) if "probes" in record]
    wrong = {
        record["stack"]: found
        for record in measured
        if (found := statements.find_contradictions(states_of(record), record["versions"]))
    }
    assert not wrong


def test_each_statement_of_the_registry_was_asked_in_its_releases():
    measured = [record for record in columns.read(measure.OUT) if "probes" in record]
    ids = {probe["id"] for probe in measure.read_probes()}
    for failure, has_it, stack in statements.rows():
        for name in stack.probes:
            assert any(re.fullmatch(name, id) for id in ids), f"{failure} names {name!r}, and no probe is called so"
        expected = statements.FOUND if has_it else (atlas.NONE,)
        told = [
            record["stack"]
            for record in measured
            if stack.holds(record["versions"])
            for probe, state in states_of(record).items()
            if state in expected and stack.asks(probe)
        ]
        assert told or stack.not_measured, f"{failure}, {stack}: {stack.what}: no stack has shown it"


@pytest.mark.parametrize(
    ("transformers", "state", "said"),
    [
        ("5.23.0", "silent", None),
        ("5.24.0", "no failure", None),
        ("5.24.0", "silent", "F7, mended: "),
        ("5.23.0", "no failure", "F7: "),
        ("5.23.0", "could not run", None),
    ],
)
def test_what_a_stack_shows_is_held_to_what_the_registry_states(transformers, state, said):
    versions = {"trl": "1.16.0", "transformers": transformers}
    found = statements.find_contradictions({"F7 own generate": state}, versions).get("F7 own generate")
    assert (found is None) if said is None else found.startswith(said)


def test_a_new_release_with_another_silent_failure_is_no_success(tmp_path, monkeypatch):
    """One that went, or was there before, is told too, and is a success."""
    monkeypatch.setattr(drift, "denials", lambda after: {})  # the registry has no failure of these columns

    def write(minor, **states):
        probes = [{"id": id, "state": state, "said": "so"} for id, state in states.items()]
        versions = {"trl": f"1.{minor}.0", "transformers": "5.1.0"}
        record = {"stack": f"trl-1.{minor}.0", "pinned": {}, "versions": versions, "defaults": {}, "probes": probes}
        columns.write(record, tmp_path)

    write(9, goes="silent", stays="silent", loud="no failure")
    write(10, goes="no failure", stays="silent", loud="loud")
    write(11, goes="silent", stays="silent", loud="loud")
    new = [stacks.Stack(f"trl-1.{minor}.0", {}, datetime.date.today()) for minor in (10, 11)]
    assert drift.tell(new[:1], tmp_path) == 0
    assert drift.tell(new, tmp_path) == 1


def test_the_atlas_is_cited_for_the_versions_at_hand(table):
    """By `symptoms`, `preflight` and `doctor` alike: one line, where there is something to tell."""
    versions = {"trl": "0.19.1", "transformers": "4.53.2"}
    cited = "an upgrade to 1.16.0 brings F2"
    warning = ["None of the inputs have requires_grad=True. Gradients will be None"]
    assert cited in symptoms.describe(warning, versions)
    assert cited not in symptoms.describe(["all is well"], versions)
    accused, well = (
        Answer(versions=versions, findings=found) for found in ([Finding.suspected("F1", "24 of 25", "as it is")], [])
    )
    assert cited in " ".join(terminal.text(accused, everything=True).split()) and cited not in terminal.text(
        well, everything=True
    )
