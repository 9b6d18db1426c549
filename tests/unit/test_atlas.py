"""The atlas: what two releases differ in, which stacks there are, and what is said of what is not there."""

import datetime
import functools
import http.server
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from unittest import mock
from xml.etree import ElementTree

import matplotlib.font_manager
import matplotlib.textpath
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

from failurelab import failures
from failurelab.failures import symptoms
from failurelab_preflight.answer import Answer
from failurelab_preflight.finding import Finding
from failurelab_preflight.report import terminal


def release(version, day):
    return stacks.Release(stacks.Version(version), datetime.date.fromisoformat(day))


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
    assert "loud" in atlas.describe(changes) and "beta: 0.04 -> 0.0" in atlas.describe(changes)


def test_a_version_that_counts_as_another_is_said(table):
    said = atlas.describe_upgrade("0.19.1", "1.17.0.dev0+g123")
    assert said.startswith("trl 1.17.0.dev0+g123 was not measured, and counts as 1.16.0.\nFrom trl 0.19.1")
    assert atlas.describe_upgrade("0.19.1", "1.16").startswith("From trl 0.19.1")
    for versions in (("0.19.0", "1.16.0"), ("0.19.1", "seven")):
        with pytest.raises(atlas.UnknownRelease):
            atlas.describe_upgrade(*versions)


def test_a_stack_is_found_by_both_releases(table):
    found = atlas.find({"trl": "0.19.1", "transformers": "4.53.2"})
    assert found is not None and found.had() == {"F1": {"goes", "stays"}, "F7": {"asked of one"}}
    assert atlas.find({"trl": "0.19.1", "transformers": "4.54.0"}) is None
    assert atlas.find({"transformers": "4.53.2"}) is None


def test_another_patch_release_of_transformers_is_near_enough(table):
    near, far = ({"trl": "0.19.1", "transformers": version} for version in ("4.53.9.dev0", "4.52.4"))
    assert atlas.find(near).versions["transformers"] == "4.53.2"
    assert atlas.find(far) is None and atlas.cite(far) == ""


def test_what_was_measured_and_what_an_upgrade_changes_is_one_line(table):
    line = atlas.cite({"trl": "0.19.1", "transformers": "4.53.2"})
    assert line == "trl 0.19.1, transformers 4.53.2, as measured: F1, F7; an upgrade to 1.16.0 brings F2"
    assert "upgrade" not in atlas.cite({"trl": "1.16.0", "transformers": "4.53.2"})


def test_an_upgrade_does_not_heal_what_the_script_itself_makes():
    versions = {"trl": "0.22.2", "transformers": "4.56.1"}
    assert "F21" in atlas.cite(versions).partition("heals")[2].split(" and ")[0]
    assert "F21" not in atlas.cite(versions, {"F21"}).partition("heals")[2].split(" and ")[0]


def test_a_table_by_releases_of_transformers():
    """A failure of transformers is there in some of its releases, whichever trl goes with them."""
    columns, rows = atlas.table(["F7 checkpointing"], "transformers")
    assert columns == ["transformers", "F7 checkpointing"]
    assert [state for _, state in rows] == ["silent", "no failure", "silent", "no failure"]
    assert rows[1][0] == "4.49.0 to 4.52.1"


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
    records = columns.read(measure.OUT)
    assert json.loads(atlas.FILE.read_text()) == summary.make_table(records)
    rows, _ = atlas.read()
    assert summary.PICTURE.read_text() == summary.draw(rows, records)
    assert summary.PAGE.read_text() == summary.make_page(rows, records)


def test_which_passes_warn():
    """Only passes of training count, the last number."""
    said = {"0.14.0": "9/0/0, 9/0/6, 1/2/2", "0.15.0": "9/0/0, 9/0/6, 1/2/0"}
    records = [
        {
            "stack": f"trl-{trl}",
            "pinned": {"trl": trl},
            "probes": [{"id": summary.WARNING, "state": "no failure", "said": counts}],
        }
        for trl, counts in said.items()
    ]
    assert summary._warned(records)[1:] == ["- frozen embeddings: 0.14.0 to 0.15.0", "- `peft_config`: 0.14.0"]


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
        (Answer(findings=[Finding("F2", '8 of 8: the first backward pass ends in "element 0 of tensors"')]), "loud"),
        (Answer(findings=[Finding.held("F1", "all 26", "planted")]), "no failure"),
        (Answer(findings=[Finding.not_checked("F1", "no step")]), "not measured"),
        (Answer(error="ended in TypeError"), "could not run"),
    ],
)
def test_what_an_answer_makes_of_a_cell(answer, state):
    assert measure.judge(answer, ["F1", "F2"])["state"] == state


SIZE = 8  # pixels of a letter's height in the picture
LETTERS = matplotlib.font_manager.FontProperties(family="DejaVu Sans")  # the widest of those that viewers take


def extent(element, turned):
    """Return where a label of the picture begins and ends, in pixels: from left to right, or where turned upwards."""
    path = matplotlib.textpath.TextPath((0, 0), element.text, size=SIZE, prop=LETTERS)
    width = path.get_extents().width
    if turned:
        start = float(re.search(r"translate\(\S+ (\S+)\)", element.get("transform"))[1])
        return start - width, start
    start = float(element.get("x")) - width * (element.get("text-anchor") == "end")
    return start, start + width


def test_every_label_of_the_picture_lies_within_it():
    """Three were cut off at the left: those of the set-ups with the most options."""
    picture = ElementTree.parse(summary.PICTURE).getroot()
    width, height = map(float, picture.get("viewBox").split()[2:])
    labels = [element for element in picture.iter() if element.tag.endswith("text")]
    assert len(labels) > 100
    for element in labels:
        turned = "transform" in element.attrib
        start, end = extent(element, turned)
        assert start >= 0 and end <= (height if turned else width), element.text


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
    """A probe that is named is there, and was run in a release that the statement is about, with that outcome."""
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
        ("5.23.0", "not there", None),
        ("5.23.0", "could not run", None),
    ],
)
def test_what_a_stack_shows_is_held_to_what_the_registry_states(transformers, state, said):
    versions = {"trl": "1.16.0", "transformers": transformers}
    found = statements.find_contradictions({"F7 own generate": state}, versions).get("F7 own generate")
    assert (found is None) if said is None else found.startswith(said)


def test_a_failure_that_no_row_of_the_registry_states_is_told():
    versions = {"trl": "1.16.0", "transformers": "5.24.0"}
    states = {"F2 peft_config, non-reentrant": "loud", "F9 bfloat16": "silent"}
    assert list(statements.find_contradictions(states, versions)) == ["F2 peft_config, non-reentrant"]


def test_what_the_registry_states_and_nothing_asked_is_told():
    """With its reason; also where a probe is named that told nothing here, if such a stack is asked at all."""
    versions = {"trl": "1.16.0", "transformers": "5.23.0"}
    probes = {"F7 own generate"}
    told = statements.find_unasked({}, versions, probes)
    assert any(line.startswith("F7, ") for line in told["its probe told nothing"])
    assert any(line.startswith("F17, ") for line in told["needs vLLM"])
    told = statements.find_unasked({"F7 own generate": "silent"}, versions, probes)
    assert "its probe told nothing" not in told


GOOD = {"kind": "reentrant", "train": 1e-6, "ends": "", "eval": 1e-6, "rounding": 0.01, "cache": True, "lengths": 3}


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "no failure"),
        ({"train": 1.3}, "silent"),
        ({"train": 1.3, "eval": 1.3}, "not measured"),  # eval mode is no measure then
        ({"lengths": 1}, "not measured"),
        ({"planted": [1e-3, 3.0]}, "not measured"),  # neither way to go wrong may be invisible
        ({"planted": [0.3, 1e-3]}, "not measured"),
        ({"lengths": 1, "train": 1.3}, "silent"),
        ({"ends": "RuntimeError: a mask for 8 tokens, of which one is there"}, "loud"),
        ({"ends": "RuntimeError: a mask for 8 tokens, of which one is there", "eval": 1.3}, "not measured"),
    ],
)
def test_generation_in_train_mode_is_right_where_it_could_have_been_seen_to_be_wrong(changed, state):
    run = GOOD | {"planted": [0.3, 3.0]} | changed
    assert measure.judge_generation([[GOOD | {"planted": [0.3, 3.0]}], [run]])["state"] == state


def test_generation_of_which_one_kind_of_checkpointing_was_not_run():
    assert measure.judge_generation([[GOOD | {"planted": [0.3, 3.0]}], []])["state"] == "not measured"
    assert measure.judge_generation([[{"error": "it ended without a word"}]])["state"] == "could not run"


@pytest.mark.parametrize(
    ("grown", "state"), [(0, "no failure"), (40, "no failure"), (100, "silent")], ids=["flat", "layers", "logits"]
)
def test_memory_that_grows_as_the_prompts_logits_would(grown, state):
    """What the layers keep of a longer prompt is no failure."""
    short = {"peak": 1000, "rows": 1, "tokens": 10, "vocabulary": 1}
    long = short | {"peak": 1000 + grown, "tokens": 35}  # logits of 25 tokens: 100 bytes
    assert measure.judge_memory([[short], [long]])["state"] == state
    assert measure.judge_memory([[short], []])["state"] == "not measured"


@pytest.mark.parametrize(
    ("gaps", "state"), [([0.0, 1.0], "silent"), ([0.0, 1e-4], "no failure"), ([], "not there"), ([0.0], "not measured")]
)
def test_an_engine_that_nobody_sends_the_weights_to(gaps, state):
    assert measure.judge_rollouts([[{"gap": gap} for gap in gaps]])["state"] == state


def test_a_set_up_that_a_release_refuses_is_not_there():
    answer = Answer(error="ended in ValueError: together with a `peft_config`")
    assert measure.judge(answer, ["F8"], "together with")["state"] == "not there"
    assert measure.judge(answer, ["F8"])["state"] == "could not run"


STACK = stacks.Stack("trl-0.19.1", {"trl": "0.19.1"}, datetime.date(2025, 7, 11))


def test_a_new_probe_costs_a_stack_that_probe_alone(tmp_path):
    every = [probe["id"] for probe in measure.asked_of("trl")]
    assert [probe["id"] for probe in measure.lacking(STACK, tmp_path)] == every
    record = {"stack": STACK.name, "probes": [{"id": id, "state": "loud", "said": "so"} for id in every[1:]]}
    columns.write(record, tmp_path)
    assert [probe["id"] for probe in measure.lacking(STACK, tmp_path)] == every[:1]
    assert [probe["id"] for probe in measure.lacking(STACK, tmp_path, ["F19", "F7"])] == [
        id for id in every if "F19" in id or "F7" in id
    ]
    columns.write({"stack": STACK.name, "could_not_be_installed": "No solution found"}, tmp_path)
    assert measure.lacking(STACK, tmp_path) == [] and measure.lacking(STACK, tmp_path, again=True)


def write_columns(folder, package, minors):
    for minor in minors:
        columns.write({"stack": f"{package}-1.{minor}.0", "seconds": minor, "said": "a\u2028b" * 1000}, folder)


def test_jobs_that_write_at_once_lose_no_line_of_each_other(tmp_path):
    """Each stack is there once, by its release; who reads meanwhile finds whole lines."""
    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=write_columns, args=(tmp_path, "trl", range(odd, 24, 2))) for odd in (0, 1)]
    for job in jobs:
        job.start()
    while any(job.is_alive() for job in jobs):
        assert all(len(record["said"]) == 3000 for record in columns.read(tmp_path))
    columns.write({"stack": "trl-1.7.0", "seconds": 0}, tmp_path)  # measured again
    write_columns(tmp_path, "transformers", [1])
    read = columns.read(tmp_path)
    assert [record["stack"] for record in read] == [*(f"trl-1.{minor}.0" for minor in range(24)), "transformers-1.1.0"]
    assert [record["seconds"] for record in read if record["stack"].startswith("trl")] == [*range(7), 0, *range(8, 24)]
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {"trl.jsonl", "transformers.jsonl"}


def test_a_job_that_is_cut_off_while_it_writes_leaves_what_was_there(tmp_path):
    """It dies with half of its text on the disk; the same command goes on, with the stack that is not there."""
    write_columns(tmp_path, "trl", [1, 2])

    def dies():
        os.fsync = lambda file: os._exit(9)
        write_columns(tmp_path, "trl", [3])

    job = multiprocessing.get_context("fork").Process(target=dies)
    job.start()
    job.join()
    assert job.exitcode == 9
    assert [record["stack"] for record in columns.read(tmp_path)] == ["trl-1.1.0", "trl-1.2.0"]
    stack = stacks.Stack("trl-1.3.0", {}, datetime.date.today())
    assert columns.read_stack(stack.name, tmp_path) == {} and measure.lacking(stack, tmp_path)
    write_columns(tmp_path, "trl", [3])
    assert [record["stack"] for record in columns.read(tmp_path)] == ["trl-1.1.0", "trl-1.2.0", "trl-1.3.0"]


@pytest.mark.parametrize(
    ("said", "recorded"),
    [
        ("error: No solution found when resolving dependencies", True),
        ("error: Failed to fetch: `https://example.org`: dns error", False),
        ("error: No space left on device (os error 28)", False),
    ],
)
def test_what_is_no_matter_of_releases_is_tried_again(said, recorded, tmp_path, monkeypatch):
    """Without a network or space nothing is recorded, so that the next run measures it."""
    monkeypatch.setattr(measure, "_install", mock.Mock(side_effect=measure.NotInstalled(said)))
    if recorded:
        assert measure.measure(STACK, [], tmp_path / "env")["could_not_be_installed"] == said
        return
    with pytest.raises(measure.NotInstalled) as raised:
        measure.measure(STACK, [], tmp_path / "env")
    assert raised.value.exit_status == 3


@pytest.mark.parametrize(("said", "goes_on"), [("No solution found when resolving", True), ("dns error", False)])
def test_a_package_that_a_probe_needs_and_that_does_not_go_with_the_stack(said, goes_on, monkeypatch):
    """The probe says that it misses it; what fails for want of a network is tried again, with the stack."""
    monkeypatch.setattr(measure.versions, "ask_versions", lambda python: {"trl": "0.19.1", "torch": "2.13.0"})
    monkeypatch.setattr(measure, "_run_uv", mock.Mock(side_effect=measure.NotInstalled(said)))
    probes = [{"id": "x", "needs": ["deepspeed"]}]
    if goes_on:
        measure._install_beside(probes, sys.executable, STACK)
        return
    with pytest.raises(measure.NotInstalled):
        measure._install_beside(probes, sys.executable, STACK)


@pytest.fixture
def index(monkeypatch):
    """An index on this machine, which answers what it is given; proxies of the environment are left aside."""
    answers = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"files": answers}).encode())

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("UV_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield answers
    server.shutdown()
    server.server_close()


def wheel(version, **more):
    return {"filename": f"trl-{version}-py3-none-any.whl", "upload-time": "2025-07-08T10:00:00Z"} | more


def test_a_release_that_was_taken_back_is_no_stack(index):
    index += [wheel("0.19.0", yanked="broken"), wheel("0.19.1"), wheel("0.20.0rc1"), wheel("0.13.0")]
    assert [str(each.version) for each in stacks.read_index("trl")] == ["0.19.1"]


def write_column(folder, name, trl, transformers, **states):
    probes = [{"id": id, "state": state, "said": "so"} for id, state in states.items()]
    defaults = {"GRPOConfig": {"beta": trl}}
    versions = {"trl": trl, "transformers": transformers}
    record = {"stack": name, "pinned": {}, "versions": versions, "defaults": defaults, "probes": probes}
    columns.write(record, folder)


@pytest.fixture
def no_registry(monkeypatch):
    """The rows of these columns are of no failure that the registry has."""
    monkeypatch.setattr(drift, "denials", lambda after: {})


def test_what_a_new_release_changed(tmp_path, capsys, monkeypatch, no_registry):
    """A silent failure that is new is status 1, told in the workflow's summary; one that went, or was there, is not."""
    write = functools.partial(write_column, tmp_path)
    write("trl-1.8.0", "1.8.0", "5.1.0", goes="no failure")
    write("trl-1.9.0", "1.9.0", "5.1.1", goes="silent", stays="silent", loud="no failure", unknown="not measured")
    write("trl-1.10.0", "1.10.0", "5.1.3", goes="no failure", stays="silent", loud="loud", unknown="silent")
    write("trl-1.11.0", "1.11.0", "5.1.3", goes="silent", stays="silent", loud="loud", new="silent")
    summary_of_job = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary_of_job))
    new = [stacks.Stack(f"trl-{version}", {}, datetime.date.today()) for version in ("1.10.0", "1.11.0", "1.12.0")]
    assert drift.tell(new[:1], tmp_path) == 0
    told = capsys.readouterr().out
    assert "trl-1.10.0 (trl 1.10.0, transformers 5.1.3), beside trl-1.9.0" in told
    assert "| loud | no failure, trl-1.9.0 | **loud** |" in told and "beta: '1.9.0', now '1.10.0'" in told
    assert "unknown" not in told and summary_of_job.read_text() in told
    assert drift.tell(new, tmp_path) == 1
    told = capsys.readouterr().out
    assert "| goes | no failure, trl-1.10.0 | **silent** |" in told and "trl-1.12.0\n\nnot measured" in told


def test_a_release_is_compared_with_what_differs_in_it_alone(tmp_path, capsys, no_registry):
    """What a newer trl brought is no news of the transformers that was measured with it; nor the other way round."""
    write = functools.partial(write_column, tmp_path)
    write("transformers-5.3.0", "1.9.0", "5.3.0", of_trl="no failure", of_transformers="no failure")
    write("trl-1.10.0", "1.10.0", "5.2.0", of_trl="silent", of_transformers="no failure", only_trl="no failure")
    write("transformers-5.4.0", "1.10.0", "5.4.0", of_trl="silent", of_transformers="no failure")
    write("trl-1.11.0", "1.11.0", "5.4.1", of_trl="silent", of_transformers="silent", only_trl="silent")
    new = [stacks.Stack(name, {}, datetime.date.today()) for name in ("transformers-5.4.0", "trl-1.11.0")]
    assert drift.tell(new[:1], tmp_path) == 0
    assert "No row differs" in capsys.readouterr().out
    assert drift.tell(new[1:], tmp_path) == 1
    told = capsys.readouterr().out
    assert "| of_transformers | no failure, transformers-5.4.0 | **silent** |" in told
    assert "| only_trl | no failure, trl-1.10.0 | **silent** |" in told and "| of_trl |" not in told


def test_a_row_is_compared_with_the_last_column_that_tells_something_of_it(tmp_path, capsys, no_registry):
    """One that could not run says nothing: what came with the release after it went by unseen."""
    write = functools.partial(write_column, tmp_path)
    write("trl-1.8.0", "1.8.0", "5.1.0", x="no failure")
    write("trl-1.9.0", "1.9.0", "5.1.0", x="could not run")
    write("trl-1.9.1", "1.9.1", "5.1.0", x="could not run")
    write("trl-1.10.0", "1.10.0", "5.1.0", x="silent")
    new = [stacks.Stack(f"trl-{version}", {}, datetime.date.today()) for version in ("1.9.0", "1.9.1", "1.10.0")]
    told = [(drift.tell([stack], tmp_path), capsys.readouterr().out) for stack in new]
    assert [status for status, _ in told] == [0, 0, 1]
    assert "| x | no failure, trl-1.8.0 | **could not run** |" in told[0][1]
    assert "No row differs" in told[1][1]
    assert "| x | no failure, trl-1.8.0 | **silent** |" in told[2][1]


@pytest.mark.parametrize(
    ("state", "status", "told"),
    [
        ("silent", 0, r"No row differs\."),
        ("no failure", 1, r"the registry denies that F7 own generate is \*\*no failure\*\*: F7: a generate\(\)"),
        ("could not run", 0, r"not asked \(its probe told nothing\): .*F7, a generate\(\)"),
    ],
)
def test_a_failure_that_has_gone_is_told_where_the_registry_still_states_it(state, status, told, tmp_path, capsys):
    """A release healed what the registry, which had no end for it, still stated, and nothing told."""
    write = functools.partial(write_column, tmp_path)
    for minor, own in (("22", "silent"), ("23", state)):
        write(f"transformers-5.{minor}.0", "1.16.0", f"5.{minor}.0", **{"F7 own generate": own})
    assert drift.tell([stacks.Stack("transformers-5.23.0", {}, datetime.date.today())], tmp_path) == status
    said = capsys.readouterr().out
    assert re.search(told, said) and "(needs vLLM): F17, " in said


def test_the_main_branch_is_beside_the_newest_release(tmp_path):
    for name, trl in (("trl-1.9.0", "1.9.0"), ("trl-1.10.0", "1.10.0"), ("trl-main", "1.11.0.dev0")):
        write_column(tmp_path, name, trl, "5.1.0", x="loud")
    after = columns.read_stack("trl-main", tmp_path)
    assert [column["stack"] for column in columns.read(tmp_path)] == ["trl-1.9.0", "trl-1.10.0"]
    assert [column["stack"] for column in drift.read_before(after, tmp_path)] == ["trl-1.10.0", "trl-1.9.0"]
    every = [stacks.Stack(f"trl-1.{minor}.0", {}, datetime.date.today()) for minor in range(8, 13)]
    assert [stack.name for stack in drift.missing(every, tmp_path)] == ["trl-1.11.0", "trl-1.12.0"]


def test_the_main_branch_of_a_folder_is_as_of_its_last_commit(tmp_path):
    """A repository on this machine stands for upstream's; a folder without one is a line that says so."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    with pytest.raises(stacks.IndexUnreadable, match="no commit of trl") as raised:
        stacks.main(str(tmp_path))
    assert raised.value.exit_status == 3 and "\n" not in str(raised.value)
    day = {"GIT_COMMITTER_DATE": "2026-07-24T09:41:29Z"}
    for line in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *line], check=True, env=os.environ | day)
    stack = stacks.main(str(tmp_path))
    assert stack.until == datetime.date(2026, 7, 27) and stack.source.startswith(f"git+file://{tmp_path.resolve()}@")
    assert stacks.main().source == "git+https://github.com/huggingface/trl@main"


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ([{"hooks": 0}, {"train": ""}], "no failure"),
        ([{"hooks": 128}, {"train": ""}], "silent"),
        ([{"train": "AttributeError: 'NoneType' object has no attribute 'backward'"}], "loud"),
        ([{"train": "RuntimeError: 'weight' must be 2-D"}], "could not run"),
        ([{"evaluate": "AttributeError: 'list' object has no attribute 'get'"}, {"train": ""}], "not there"),
        ([{"evaluate": "AttributeError: 'NoneType' object has no attribute 'apply'"}], "could not run"),
        ([{"error": "ModuleNotFoundError: No module named 'deepspeed'"}], "could not run"),
        ([{"hooks": 0}], "could not run"),
    ],
)
def test_training_in_partitions(entries, state):
    assert measure.judge_partitions([entries])["state"] == state


def test_a_call_of_a_tool_that_is_encoded_again():
    kept, others, without = ({"called": called, "kept": same} for called, same in ((1, 1), (1, 0), (0, 0)))
    states = [measure.judge_calls([run])["state"] for run in ([kept, without], [kept, others], [without])]
    assert states == ["no failure", "silent", "not measured"]
    assert measure.judge_calls([[{"error": "NOT THERE: tools in GRPOTrainer"}]])["state"] == "not there"


@pytest.mark.parametrize(
    ("run", "state", "failure"),
    [
        ({"trainable": 0, "changed": 0, "ends": ""}, "silent", "F23"),
        (
            {
                "trainable": 0,
                "changed": 0,
                "ends": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
            },
            "loud",
            "F2",
        ),
        ({"trainable": 8, "changed": 8, "ends": ""}, "no failure", None),
        ({"trainable": 0, "changed": 0, "ends": "TypeError: of another kind"}, "could not run", None),
    ],
)
def test_an_adapter_that_is_loaded_frozen_is_silent_or_loud(run, state, failure):
    """By a training, not by what preflight says, which makes no backward pass that would end in an error."""
    record = measure.judge_adapter([[{"tensors": 8, **run}]])
    assert (record["state"], record.get("failure")) == (state, failure)
    assert measure.judge_adapter([[{"error": "NOT THERE: GRPOTrainer"}]])["state"] == "not there"


def test_a_release_that_is_spared_has_no_failure():
    answer = Answer(findings=[Finding.not_applicable("F9", "the adapter is trained in float32")])
    assert measure.judge(answer, ["F9"], spared="in float32")["state"] == "no failure"
    assert measure.judge(answer, ["F9"])["state"] == "not measured"


@pytest.mark.parametrize(
    ("version", "holds"), [("0.15.0.dev0", True), ("0.15.1+git.abc", True), ("1.17.0.dev0", False), ("0.14.9", False)]
)
def test_a_development_version_is_in_the_release_that_it_precedes(version, holds):
    stack = failures.Stack("", {"trl": ">=0.15,<0.16"})
    assert stack.holds({"trl": version}) == holds


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
