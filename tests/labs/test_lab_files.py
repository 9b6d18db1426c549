"""The rules that all labs keep, and how a run is judged: on measured figures that are made up here."""

import shutil

import pytest

from failurelab_course import eras
from failurelab_course.labs import definition as lab_files
from failurelab_course.labs import metrics as figures
from failurelab_course.labs import verify as labs

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
    "frozen_changed": 0,
    "warnings": 230,
    "rollouts": 6720,
    "reward_first": 0.48,
    "reward_last": 0.51,
    "accuracy_before": 0.44,
    "accuracy_after": 0.56,
    "accuracy_gain": 0.12,
    "accuracy_there": 0.49,
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
    """Return the row of a run that measured these figures."""
    declared = {"broken": lab.broken, "wrong_fix": lab.wrong_fixes[0]}.get(state)
    row = labs.Row(lab.name, state, "script.py")
    content = {"figures": measured, "refused": refused, "environment": environment, "traceback": "", "records": []}
    labs._judge(labs._Task(lab, lab.broken.path, row, declared), {"seconds": 1, "output": "", "measured": content})
    return row


def test_made_up_figures_are_those_that_are_measured():
    assert set(HEALED) == set(figures.of("trainer"))


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


def test_the_labs_here_keep_the_rules():
    assert len(labs.known()) >= 3
    for lab in labs.find():
        assert lab_files.broken_rules(lab) == []
        text = lab.train.read_text()
        assert text == lab.original.read_text(), f"labs/{lab.name}/train.py was edited: reset it before a commit"
    assert [lab.id for lab in labs.find()] == [f"L{name[:2]}" for name in labs.known()]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("broken.py", "TODO", "DONE", "has 0 lines with TODO"),
        ("broken.py", "import pathlib\n", "import pathlib  # TODO\n", "has 2 lines with TODO"),
        ("broken.py", "import pathlib\n", "import failurelab.gradients\n", "imports failurelab"),
        ("solution.py", "    return trainer\n", "    x = 1\n" * 13 + "    return\n", "changes 15 lines"),
        ("solution.py", "# TODO: ", "# TODO ", "does not repeat the TODO"),
        ("solution.py", "# ^^^", "#", "does not mark its repair"),
        ("hints.md", "## Third", "### Third", "must have 3 hints"),
        (
            "lab.toml",
            '"wrong_fixes/train_mode.py"',
            '"wrong_fixes/filter_warnings.py"',
            "train_mode.py is not declared",
        ),
        ("lab.toml", '"wrong_fixes/train_mode.py"', '"wrong_fixes/no.py"', "wrong_fixes/no.py is missing"),
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
        ('failures = ["F1"]', "failures = []", "only a false alarm has none"),
        ("[broken]", "[brocken]", "broken: it is missing"),
        ("[broken]", "[broken", "is no TOML"),
    ],
)
def test_a_slip_in_lab_toml_is_named(lab, old, new, message):
    path = lab.folder / "lab.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(labs.LabError, match=message):
        lab_files.load(lab.folder)


def test_labs_are_found_by_number_or_name():
    assert [lab.name for lab in labs.find(["1", "02_garbage_rollouts", "01"])] == [
        "01_frozen_embeddings",
        "02_garbage_rollouts",
    ]
    with pytest.raises(labs.LabError, match="unknown lab '77'"):
        labs.find(["77"])
    with pytest.raises(labs.LabError, match="not there"):
        labs.check(labs.find(["1"])[0], LABS / "no.py")
