"""The atlas: what two releases differ in, which stacks there are, and what is said of what is not there."""

import datetime
import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from unittest import mock

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
        ("generation", [[GOOD], [GOOD | ENDS | {"eval": 1.3}]], "not measured"),
        ("generation", [[GOOD], []], "not measured"),  # of one kind of checkpointing nothing is known
        ("memory", [[PEAK], [PEAK | {"peak": 1040, "tokens": 35}]], "no failure"),  # what the layers keep
        ("memory", [[PEAK], [PEAK | {"peak": 1100, "tokens": 35}]], "silent"),  # the logits of 25 tokens: 100 bytes
        ("memory", [[PEAK], []], "not measured"),
        ("rollouts", [[{"gap": 0.0}, {"gap": 1.0}]], "silent"),
        ("rollouts", [[{"gap": 0.0}, {"gap": 1e-4}]], "no failure"),
        ("rollouts", [[]], "not there"),
        ("rollouts", [[{"gap": 0.0}]], "not measured"),
        ("zero3", [[{"hooks": 0}, {"train": ""}]], "no failure"),
        ("zero3", [[{"hooks": 128}, {"train": ""}]], "silent"),
        ("zero3", [[{"train": "AttributeError: 'NoneType' object has no attribute 'backward'"}]], "loud"),
        ("zero3", [[{"train": "RuntimeError: 'weight' must be 2-D"}]], "could not run"),
        ("zero3", [[{"hooks": 0}]], "could not run"),
        ("evaluation", [[{"evaluate": "AttributeError: 'list' object has no attribute 'get'"}]], "not there"),
        ("evaluation", [[{"evaluate": "AttributeError: 'NoneType' object has no"}]], "could not run"),
        ("tools", [[{"called": 1, "kept": 1}, {"called": 0, "kept": 0}]], "no failure"),
        ("tools", [[{"called": 1, "kept": 1}, {"called": 1, "kept": 0}]], "silent"),
        ("tools", [[{"called": 0, "kept": 0}]], "not measured"),
        ("adapter", [[FROZEN | {"ends": ""}]], "silent"),
        ("adapter", [[FROZEN | {"ends": NO_GRAD}]], "loud"),
        ("adapter", [[FROZEN | {"ends": "TypeError: of another kind"}]], "could not run"),
        ("adapter", [[{"tensors": 8, "trainable": 8, "changed": 8, "ends": ""}]], "no failure"),
        ("tools", [[{"error": "NOT THERE: tools in GRPOTrainer"}]], "not there"),
        ("memory", [[PEAK], [{"error": "it ended without a word"}]], "could not run"),
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


def test_what_the_registry_states_and_nothing_asked_is_told():
    """With its reason; also where a probe is named that told nothing here, if such a stack is asked at all."""
    versions = {"trl": "1.16.0", "transformers": "5.23.0"}
    probes = {"F7 own generate"}
    told = statements.find_unasked({}, versions, probes)
    assert any(line.startswith("F7, ") for line in told["its probe told nothing"])
    assert any(line.startswith("F17, ") for line in told["needs vLLM"])
    told = statements.find_unasked({"F7 own generate": "silent"}, versions, probes)
    assert "its probe told nothing" not in told


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


def test_a_column_that_is_measured_again_takes_its_own_place(tmp_path):
    for name in ("trl-1.10.0", "trl-1.9.0", "transformers-5.1.0", "trl-1.9.0"):
        columns.write({"stack": name, "said": "a\u2028b", "times": len(columns.read(tmp_path))}, tmp_path)
    read = [(record["stack"], record["times"]) for record in columns.read(tmp_path)]
    assert read == [("trl-1.9.0", 3), ("trl-1.10.0", 0), ("transformers-5.1.0", 2)]


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
