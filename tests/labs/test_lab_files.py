"""The rules that all labs keep, and how a run is judged: on measured metrics that are made up here."""

import contextlib
import dataclasses
import re
import shutil
import subprocess
import threading

import pytest

from failurelab.failures import toml_table as tables
from failurelab_course import eras
from failurelab_course.labs import definition as lab_files
from failurelab_course.labs import metrics
from failurelab_course.labs import verify as labs
from failurelab_course.labs.checker import client as check_client

LABS = eras.root() / "labs"
HEALED = {
    "error": "",
    "error_stage": "",
    "answer": "",
    "answer_claims": 0,
    "answer_wrong": 0,
    "checkpointing": True,
    "steps_done": 70,
    "learning_rate": 5e-4,
    "tensors_total": 26,
    "tensors_trainable": 25,
    "tensors_frozen": 1,
    "tensors_without_gradient": 0,
    "tensors_zero_gradient": 0,
    "tensors_changed": 25,
    "elements_changed": 1.0,
    "embeddings_changed": False,
    "weights_bits": 32,
    "frozen_changed": 0,
    "warnings": 230,
    "rollouts": 6720,
    "reward_first": 0.48,
    "reward_last": 0.51,
    "accuracy_before": 0.44,
    "accuracy_after": 0.56,
    "accuracy_gain": 0.12,
    "accuracy_there": 0.49,
    "overrun_first": 0.0,
    "rollout_gap": 0.01,
    "finite": True,
    "loss_first": 0.0,
    "loss_last": 0.01,
}
SILENT = HEALED | {
    "tensors_without_gradient": 24,
    "tensors_changed": 1,
    "reward_last": 0.42,
    "accuracy_after": 0.44,
    "accuracy_gain": 0.0,
}


@pytest.fixture
def lab(tmp_path):
    """A copy of lab 01, to be spoilt."""
    folder = tmp_path / "01_frozen_embeddings"
    shutil.copytree(LABS / folder.name, folder)
    return lab_files.load(folder)


def judged(lab, state, measured, *, refused="", environment=""):
    """Return the row of a run that measured these metrics."""
    declared = {"broken": lab.broken, "wrong_fix": lab.wrong_fixes[0]}.get(state)
    row = labs.Row(lab.name, state, "script.py")
    content = {"metrics": measured, "refused": refused, "environment": environment, "traceback": "", "records": []}
    content["cpu_seconds"] = 0.5
    labs._judge(labs._Task(lab, lab.start, row, declared), {"seconds": 1, "output": "", "measured": content})
    return row


def test_made_up_metrics_are_those_that_are_measured():
    assert set(HEALED) == set(metrics.of("trainer"))


def test_a_healed_run_passes_and_a_silent_failure_does_not(lab):
    assert judged(lab, "right_fix", HEALED).result == "PASS"
    row = judged(lab, "check", SILENT)
    assert row.result == "FAIL"
    assert row.reason.startswith("24 of 25 tensors still have no gradient")


@pytest.mark.parametrize(
    "change",
    [
        {"steps_done": 69},
        {"learning_rate": 0.0},
        {"checkpointing": False},
        {"tensors_frozen": 0},
        {"frozen_changed": 1},
        {"tensors_without_gradient": 1},
        {"tensors_changed": 24},
        {"rollout_gap": 0.2},
        {"accuracy_gain": 0.01},
        {"reward_last": 0.3},
        {"finite": False},
        {"accuracy_gain": None},
        {"accuracy_gain": float("nan")},
        {"error": "ValueError: x", "error_stage": "train"},
    ],
    ids=str,
)
def test_every_part_of_healed_is_needed(lab, change):
    assert judged(lab, "right_fix", HEALED | change).result == "FAIL"


def test_a_failure_for_another_reason_is_no_pass(lab):
    """The broken script crashes where it should fail silently: the lab proves nothing, and says so."""
    assert judged(lab, "broken", SILENT).result == "PASS"
    crashed = dict.fromkeys(HEALED) | {"error": "ImportError: no", "error_stage": "build", "warnings": 0}
    row = judged(lab, "broken", crashed)
    assert row.result == "FAIL"
    assert "for another reason than declared: build_trainer raised ImportError: no" in row.reason
    row = judged(lab, "broken", SILENT | {"tensors_without_gradient": 3})
    assert row.result == "FAIL"
    assert "tensors_without_gradient == 24 (3)" in row.reason
    # the declared figures, and an error beside them
    assert judged(lab, "broken", SILENT | {"error": "ValueError: x", "error_stage": "measure"}).result == "FAIL"
    assert judged(lab, "broken", SILENT, refused="the trainer is another").result == "FAIL"


def test_a_wrong_fix_is_stopped_where_its_first_steps_prove_it(lab):
    """Without gradients after ten steps it fails as declared, of which no later step is asked; with them it is none."""
    hidden, off = (
        next(fix for fix in lab.wrong_fixes if fix.name == name) for name in ("filter_warnings", "checkpointing_off")
    )

    def judge(declared, measured):
        task = labs._Task(lab, lab.start, labs.Row(lab.name, "wrong_fix", declared.name), declared)
        content = {"metrics": measured, "refused": "", "environment": "", "traceback": "", "records": []}
        labs._judge(task, {"seconds": 1, "output": "", "measured": content | {"cpu_seconds": 0.5}})
        return task.is_early, task.row.result

    silent, healed = (metrics_ | {"steps_done": 10, "warnings": 0} for metrics_ in (SILENT, HEALED))
    assert judge(hidden, silent) == (True, "PASS")
    assert judge(hidden, healed) == (True, "FAIL")
    assert judge(off, healed) == (False, "FAIL")  # what it is declared to show is the accuracy at the end
    started = labs._Task(lab, lab.start, labs.Row(lab.name, "broken", "start"), lab.broken)
    assert not started.is_early


def test_a_lab_that_is_solved_is_no_lab(lab):
    row = judged(lab, "broken", HEALED)
    assert (row.result, "already solved" in row.reason) == ("FAIL", True)
    row = judged(lab, "wrong_fix", HEALED)
    assert (row.result, "no wrong one" in row.reason) == ("FAIL", True)


def test_the_environment_comes_before_all(lab):
    row = judged(lab, "broken", dict.fromkeys(HEALED), environment="no space")
    assert (row.result, row.reason) == ("ENVIRONMENT", "no space")


@pytest.mark.parametrize(
    ("results", "status"),
    [
        (["PASS", "PASS"], 0),
        (["PASS", "NOT RUN"], 0),
        (["NOT RUN"], 3),
        ([], 3),
        (["PASS", "ENVIRONMENT"], 3),
        (["ENVIRONMENT", "FAIL"], 1),
    ],
)
def test_exit_status(results, status):
    assert labs.exit_status([labs.Row("l", "check", "s", result) for result in results]) == status


def test_a_fact_is_proved_against_the_broken_run(lab):
    """What ANSWER is compared with must be what the script measures before its repair; other facts are beliefs."""
    lab = dataclasses.replace(lab, facts={"tensors_changed": 1, "undone_by": "a function"})
    assert judged(lab, "broken", SILENT).result == "PASS"
    lab = dataclasses.replace(lab, facts={"tensors_changed": 2})
    row = judged(lab, "broken", SILENT)
    assert (row.result, row.reason) == ("FAIL", "facts of lab.toml are not so: tensors_changed is 1, lab.toml says 2")


@pytest.mark.parametrize(
    ("claimed", "measured", "agree"),
    [
        (0.52, 0.55, True),
        (0.4, 0.55, False),
        (0, 0, True),
        (1, 0, False),
        (3, None, False),
        (" Reentrant", "reentrant", True),
        ("0.26", "0.26.0", False),
        ("3", 3, True),
    ],
)
def test_a_claim_is_right_to_a_tenth_and_a_text_to_its_words(claimed, measured, agree):
    assert metrics.agree(claimed, measured) == agree


def test_the_next_era_s_imports_begin_while_this_one_is_asked(lab, monkeypatch):
    """An era that does not start is its own labs' trouble; every other is asked, and ended."""
    log, begun = [], threading.Event()

    @contextlib.contextmanager
    def start(era, needs, jobs, device):
        log.append(f"start {era}")
        if era == "second":
            begun.set()
        if era == "third":
            raise check_client.EnvironmentBroken("no third")
        yield era
        log.append(f"end {era}")

    def ask(server, waiting, done):
        assert server != "first" or begun.wait(60)
        waiting.clear()

    monkeypatch.setattr(check_client, "start", start)
    monkeypatch.setattr(labs, "_ask", ask)
    eras_asked = ("first", "second", "third", "fourth")
    rows = [labs.Row(lab.name, "check", "script.py") for _ in eras_asked]
    tasks = [labs._Task(dataclasses.replace(lab, era=era), lab.start, row) for era, row in zip(eras_asked, rows)]
    labs._run(tasks, 1, lambda row: None)
    assert [row.reason for row in rows] == ["", "", "no third", ""]
    assert rows[2].result == "ENVIRONMENT"
    assert log.index("start second") < log.index("end first")
    assert sorted(log) == sorted([*(f"start {era}" for era in eras_asked), "end first", "end second", "end fourth"])


def test_a_number_is_never_used_again(lab):
    """A retired lab is named with the one to take instead, and its id cannot come back."""
    register = lab.folder.parent / "retired.toml"
    register.write_text('[L77]\nwhy = "it repeated lab 01"\ninstead = "L01"\n')
    with pytest.raises(labs.LabError, match=r"lab 77 is retired: it repeated lab 01\. Next: lab 01"):
        labs.find(["77"], lab.folder.parent)
    with pytest.raises(labs.LabError, match="lab 77 is retired"):
        labs.find(["77_some_name"], lab.folder.parent)
    register.write_text(register.read_text().replace("L77", "L01"))
    with pytest.raises(labs.LabError, match="L01 is retired, and a number is never used again"):
        lab_files.load(lab.folder)


def test_the_register_here_names_labs_that_are_there():
    there = {lab.id for lab in labs.find()}
    for id, message in lab_files.retired().items():
        assert id not in there and f"L{message[-2:]}" in there


def test_the_labs_here_keep_the_rules():
    assert len(labs.known()) >= 3
    for lab in labs.find():
        assert lab_files.broken_rules(lab) == []
    assert [lab.id for lab in labs.find()] == [f"L{name[:2]}" for name in labs.known()]


def test_a_learner_s_script_is_a_copy_that_git_ignores(lab):
    """Made once, and then the learner's: a later use does not write over it."""
    assert lab_files.learner_script(lab).read_bytes() == lab.start.read_bytes()
    lab.train.write_text("mine = 1\n")
    assert lab_files.learner_script(lab).read_text() == "mine = 1\n"
    assert sorted(path.name for path in lab.folder.glob("*.p*")) == ["start.py", "train.py"]
    paths = [str(lab.train) for lab in labs.find()]
    ignored = subprocess.run(["git", "check-ignore", "--no-index", *paths], cwd=LABS, capture_output=True, text=True)
    assert ignored.stdout.splitlines() == paths
    lab.train.unlink()
    lab.start.unlink()
    with pytest.raises(labs.LabError, match=r"start.py is missing. Next: git checkout -- labs"):
        lab_files.learner_script(lab)


EDITED = """\
first = 1
    second = 2  # why
third = 3
"""


@pytest.mark.parametrize(
    ("edit", "result"),
    [
        (["first = 1", "first = 2"], "first = 2\n    second = 2  # why\nthird = 3\n"),
        ({"after": "second", "add": "    more = 1"}, "first = 1\n    second = 2  # why\n    more = 1\nthird = 3\n"),
        ({"after": "1\n    sec", "add": "#"}, "first = 1\n    second = 2  # why\n#\nthird = 3\n"),
        ({"drop": "second ="}, "first = 1\nthird = 3\n"),
        ({"drop": "1\n    sec"}, "third = 3\n"),
    ],
    ids=str,
)
def test_an_edit_changes_one_place(tmp_path, edit, result):
    (tmp_path / "start.py").write_text(EDITED)
    edits = lab_files._edits(tables.Table("lab.toml", {"edits": [edit]}, labs.LabError))
    assert lab_files.Script("solution", tmp_path / "start.py", edits).text() == result


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('{ drop = "gradient_check', '{ drop = "gradient_chick', "which is in start.py 0 times"),
        ('"learning_rate=5e-4"', '"="', r"which is in start.py \d\d times"),
    ],
)
def test_an_edit_that_no_longer_applies_is_one_line(lab, old, new, problem):
    """It names the lab, the script and the text; `verify` shows it and goes on with the other scripts' form."""
    path = lab.folder / "lab.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    lab = lab_files.load(lab.folder)
    (told,) = lab_files.broken_rules(lab)
    fix = "checkpointing_off" if "drop" in old else "higher_learning_rate"
    assert re.fullmatch(rf"01_frozen_embeddings/lab.toml: {fix}: an edit looks for .*, {problem} and .*", told)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("start.py", "import pathlib\n", "import pathlib  # TODO\n", "finding the place is what the lab trains"),
        ("start.py", "when we froze", "when they froze", "the symptom of lab.toml is not in start.py's docstring"),
        ("start.py", "import pathlib\n", "import pathlib  # see lab 02\n", "speaks of lab 02: that gives it away"),
        ("start.py", 'if __name__ == "__main__":', "if False:", "does nothing when it is run by hand"),
        ("hints.md", "## Second", "## Second\n\nAs in lab 17.", "speaks of lab 17"),
        ("lab.toml", 'given = "place"', 'given = "run"', "run/trainer_state.json is not there"),
        (
            "lab.toml",
            'given = "place"',
            'given = "luck"',
            "given is 'luck', and is one of place, symptom, run, nothing",
        ),
        ("start.py", "import pathlib\n", "import failurelab.gradients\n", "imports failurelab"),
        ("lab.toml", "model.enable_input_require_grads()", "x = 1\n    " * 13, "changes 13 lines"),
        ("lab.toml", "# ^^^", "#", "does not mark its repair"),
        ("hints.md", "## Third", "### Third", "must have 3 hints"),
        ("lab.toml", '"train_mode"', '"filter_warnings"', "the wrong fix filter_warnings is declared twice"),
    ],
)
def test_a_lab_that_breaks_a_rule_is_told_so(lab, file, old, new, message):
    path = lab.folder / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert any(message in problem for problem in lab_files.broken_rules(lab_files.load(lab.folder)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "L01"', 'id = "L11"', "the folder says L01"),
        ('failures = ["F1"]', 'failures = ["F99"]', "unknown failure 'F99'"),
        ("steps_done >= 70", "steps_dnoe >= 70", "'steps_dnoe' is no figure"),
        ("{steps_done} of 70", "{step_done} of 70", "'step_done' is no figure"),
        ("steps_done >= 70", "steps_done => 70", "is no predicate"),
        ("time_limit = 240", 'time_limit = "4 minutes"', "time_limit"),
        ("minutes = 10", "minuets = 10", "minutes: it is missing"),
        ('era = "trl-0.14"', 'era = "trl-0.14"\nkind = "dance"', "kind: 'dance' is none of trainer, "),
        ('failures = ["F1"]', "failures = []", "only a false alarm, or a lab with upstream, has none"),
        ("[broken]", "[brocken]", "broken: it is missing"),
        ("[broken]", "[broken", "is no TOML"),
        ('["learning_rate=5e-4", ', "[", r"wrong_fixes 3: edits: .* is none of \["),
        ('{ drop = "gradient', '{ dorp = "gradient', "wrong_fixes 4: edits: .* is none of"),
        ("[solution]", "[solutions]", "solution: it is missing"),
    ],
)
def test_a_slip_in_lab_toml_is_named(lab, old, new, message):
    path = lab.folder / "lab.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(labs.LabError, match=message):
        lab_files.load(lab.folder)


def test_labs_are_found_by_number_or_name():
    assert [lab.name for lab in labs.find(["1", "02_starts_too_low", "01"])] == [
        "01_frozen_embeddings",
        "02_starts_too_low",
    ]
    with pytest.raises(labs.LabError, match="unknown lab '77'"):
        labs.find(["77"])
    with pytest.raises(labs.LabError, match="not there"):
        labs.check(labs.find(["1"])[0], LABS / "no.py")
