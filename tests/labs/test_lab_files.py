"""The rules that all labs keep, and how a run is decided on: on measured metrics that are made up here."""

import ast
import difflib
import io
import json
import re
import subprocess

import pytest
from rich.console import Console

from failurelab import failures as registry
from failurelab_course import eras
from failurelab_course.labs import definition as lab_files
from failurelab_course.labs import metrics
from failurelab_course.labs import verify as labs

LABS = eras.root() / "labs"
HEALED = dict.fromkeys(metrics.of("trainer"), 0) | {
    "error": "",
    "error_stage": "",
    "answer": "",
    "checkpointing": True,
    "steps_done": 70,
    "learning_rate": 5e-4,
    "tensors_total": 26,
    "tensors_trainable": 25,
    "tensors_frozen": 1,
    "tensors_changed": 25,
    "embeddings_changed": False,
    "warnings": 230,
    "reward_first": 0.48,
    "reward_last": 0.51,
    "accuracy_before": 0.44,
    "accuracy_after": 0.56,
    "accuracy_gain": 0.12,
    "accuracy_there": 0.49,
    "rollout_gap": 0.01,
    "finite": True,
}
SILENT = HEALED | {
    "tensors_without_gradient": 24,
    "tensors_changed": 1,
    "reward_last": 0.42,
    "accuracy_after": 0.44,
    "accuracy_gain": 0.0,
}


def task_of(lab, state, measured, declared=None, *, refused="", environment=""):
    """Return the task of a script that measured these figures, decided."""
    task = labs._Task(lab, lab.start, labs.ScriptOutcome(lab.name, state, "script.py"), declared)
    content = {"metrics": measured, "refused": refused, "environment": environment, "traceback": ""}
    labs._decide(task, {"seconds": 1, "output": "", "measured": content})
    return task


def decided(lab, state, measured, **ended):
    declared = {"broken": lab.broken, "wrong_fix": lab.wrong_fixes[0]}.get(state)
    return task_of(lab, state, measured, declared, **ended).row


def test_a_healed_run_passes_and_a_silent_failure_does_not(lab):
    assert decided(lab, "right_fix", HEALED).result == "PASS"
    row = decided(lab, "check", SILENT)
    assert row.result == "FAIL"
    assert row.reason.startswith("24 of 25 tensors still have no gradient")


@pytest.mark.parametrize(
    "change",
    [
        {"steps_done": 69},
        {"checkpointing": False},
        {"rollout_gap": 0.2},
        {"accuracy_gain": None},
        {"accuracy_gain": float("nan")},
        {"error": "ValueError: x", "error_stage": "train"},
    ],
    ids=str,
)
def test_every_part_of_healed_is_needed(lab, change):
    assert decided(lab, "right_fix", HEALED | change).result == "FAIL"


def test_a_failure_for_another_reason_is_no_pass(lab):
    assert decided(lab, "broken", SILENT).result == "PASS"
    crashed = dict.fromkeys(HEALED) | {"error": "ImportError: no", "error_stage": "build", "warnings": 0}
    row = decided(lab, "broken", crashed)
    assert row.result == "FAIL"
    assert "for another reason than declared: build_trainer raised ImportError: no" in row.reason
    row = decided(lab, "broken", SILENT | {"tensors_without_gradient": 3})
    assert row.result == "FAIL"
    assert "tensors_without_gradient == 24 (3)" in row.reason
    # the declared figures, and an error beside them
    assert decided(lab, "broken", SILENT | {"error": "ValueError: x", "error_stage": "measure"}).result == "FAIL"
    assert decided(lab, "broken", SILENT, refused="the trainer is another").result == "FAIL"


def test_a_wrong_fix_is_stopped_where_its_first_steps_prove_it(lab):
    """Without gradients after eight steps it fails as declared: no later step is asked for. With them it is none."""
    fixes = {fix.name: fix for fix in lab.wrong_fixes}

    def became(name, measured):
        task = task_of(lab, "wrong_fix", measured | {"steps_done": 8, "warnings": 0}, fixes[name])
        return task.is_early, task.row.result

    assert became("filter_warnings", SILENT) == (True, "PASS")
    assert became("filter_warnings", HEALED) == (True, "FAIL")
    assert became("checkpointing_off", HEALED) == (False, "FAIL")  # declared is the accuracy at the end
    assert not task_of(lab, "broken", SILENT, lab.broken).is_early


def test_a_lab_that_is_solved_is_no_lab_and_the_environment_comes_before_all(lab):
    for state, said in (("broken", "already solved"), ("wrong_fix", "no wrong one")):
        row = decided(lab, state, HEALED)
        assert (row.result, said in row.reason) == ("FAIL", True)
    row = decided(lab, "broken", dict.fromkeys(HEALED), environment="no space")
    assert (row.result, row.reason) == ("ENVIRONMENT", "no space")


def test_a_fact_is_proved_against_the_broken_run(lab):
    """What ANSWER is compared with must be what the script measures before its repair; other facts are beliefs."""
    lab = lab.model_copy(update={"facts": {"tensors_changed": 1, "undone_by": "a function"}})
    assert decided(lab, "broken", SILENT).result == "PASS"
    lab = lab.model_copy(update={"facts": {"tensors_changed": 2}})
    row = decided(lab, "broken", SILENT)
    assert (row.result, row.reason) == ("FAIL", "facts of lab.toml are not so: tensors_changed is 1, lab.toml says 2")


@pytest.mark.parametrize(
    ("claimed", "measured", "agree"),
    [
        (0.52, 0.55, True),
        (0.4, 0.55, False),
        (1, 0, False),
        (3, None, False),
        (" Reentrant", "reentrant", True),
        ("3", 3, True),
    ],
)
def test_a_claim_is_right_to_a_tenth_and_a_text_to_its_words(claimed, measured, agree):
    assert metrics.agree(claimed, measured) == agree


def test_a_number_is_never_used_again(lab):
    register = lab.folder.parent / "retired.toml"
    register.write_text('[L77]\nwhy = "it repeated lab 01"\ninstead = "L01"\n')
    with pytest.raises(labs.LabError, match=r"lab 77 is retired: it repeated lab 01\. Next: lab 01"):
        labs.find(["77"], lab.folder.parent)
    register.write_text(register.read_text().replace("L77", "L01"))
    with pytest.raises(labs.LabError, match="number 01 is retired, and is never used again"):
        lab_files.load(lab.folder)
    there = {f"L{lab.number}" for lab in labs.find()}
    for id, message in lab_files.retired().items():
        assert id not in there and f"L{message[-2:]}" in there


def code_of(source):
    """Return the lines of a script's code, without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


@pytest.mark.parametrize("lab", labs.find(), ids=lambda lab: lab.number)
def test_a_lab_keeps_the_rules(lab):
    """A script as users write it, which gives no place away; a small repair that is marked; hints that grow."""
    start, solution, hints = lab.broken.text(), lab.solution.text(), "\n".join(lab.hints)
    assert "TODO" not in start, "finding the place is what the lab trains"
    assert lab.symptom and " ".join(lab.symptom.split()) in " ".join(ast.get_docstring(ast.parse(start)).split())
    assert lab.given != "run" or (lab.folder / "run" / "trainer_state.json").is_file()
    assert re.search(r"^if __name__ == .__main__.:", start, re.MULTILINE), "it does nothing when it is run by hand"
    assert set(re.findall(r"\b[Ll]abs? (\d\d)\b", start + hints)) <= {lab.number}, "another lab's name tells too much"
    assert not re.search(r"^\s*(from|import) failurelab\b", start, re.MULTILINE), "a user has no such package"
    assert re.search(r"^\s*# \^\^\^ \S", solution, re.MULTILINE), "the solution does not mark its repair"
    matcher = difflib.SequenceMatcher(a=code_of(start), b=code_of(solution), autojunk=False)
    changed = [max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in matcher.get_opcodes() if kind != "equal"]
    assert sum(changed) <= 12, "nobody sees the repair among so many lines"
    first, second, third = lab.hints
    assert len(first) < len(second) < len(third)
    names = [fix.name for fix in lab.wrong_fixes if fix.text()]
    assert len(names) == len(set(names)) > 0, "what do people try first?"


def test_a_learner_s_script_is_a_copy_that_git_ignores(lab):
    assert lab_files.learner_script(lab).read_bytes() == lab.start.read_bytes()
    lab.train.write_text("mine = 1\n")
    assert lab_files.learner_script(lab).read_text() == "mine = 1\n"
    paths = [str(lab.train) for lab in labs.find()]
    ignored = subprocess.run(["git", "check-ignore", "--no-index", *paths], cwd=LABS, capture_output=True, text=True)
    assert ignored.stdout.splitlines() == paths
    lab.train.unlink()
    lab.start.unlink()
    with pytest.raises(labs.LabError, match=r"start.py cannot be read: .* Next: git checkout -- labs"):
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
        ({"drop": "second ="}, "first = 1\nthird = 3\n"),
        ({"drop": "1\n    sec"}, "third = 3\n"),
    ],
    ids=str,
)
def test_an_edit_changes_one_place(tmp_path, edit, result):
    (tmp_path / "start.py").write_text(EDITED)
    assert lab_files.Script(start=tmp_path / "start.py", edits=[edit]).text() == result


def test_an_edit_that_no_longer_applies_is_one_line(lab, monkeypatch):
    monkeypatch.setattr(labs, "_run", lambda tasks, done: None)
    path = lab.folder / "lab.toml"
    path.write_text(path.read_text().replace('"learning_rate=5e-4"', '"="'))
    (told,) = [row.reason for row in labs.verify(folder=lab.folder.parent) if row.result == "FAIL"]
    said = (
        r"01_frozen_embeddings/lab.toml: higher_learning_rate: an edit looks for .*, which is in start.py \d\d times .*"
    )
    assert re.fullmatch(said, told)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('failures = ["F1"]', 'failures = ["F99"]', "unknown failure 'F99'"),
        ("{steps_done} of 70", "{step_done} of 70", "'step_done' is no figure"),
        ("steps_done >= 70", "steps_done => 70", "is no predicate"),
        ("minutes = 10", "minuets = 10", "minutes: Field required"),
        ("[broken]", "[broken", "is no TOML"),
    ],
)
def test_a_slip_in_lab_toml_is_named(lab, old, new, message):
    path = lab.folder / "lab.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(labs.LabError, match=message):
        lab_files.load(lab.folder)


def test_every_failure_has_its_labs():
    """But for two, which preflight tells before anything is trained."""
    about = {id for lab in labs.find() for id in lab.failures}
    assert {failure.id for failure in registry.all()} - about == {"F22", "F23"}


def test_the_matrix_as_json_and_as_a_table():
    row = labs.ScriptOutcome("01_a", labs.BROKEN, "start", "PASS", metrics={"loss": float("nan")})
    row.device = "cuda:1"
    content = json.loads(json.dumps(labs.to_json([row]), allow_nan=False))
    assert content["exit_status"] == 0 and content["rows"][0]["device"] == "cuda:1"
    assert content["rows"][0]["figures"] == {"loss": "nan"}
    console = Console(file=io.StringIO(), record=True)
    console.print(labs.render([row]))
    assert "1 of 1 PASS, on cuda" in console.export_text()


def test_labs_are_found_by_number_or_name_each_once():
    assert [lab.number for lab in labs.find(["1", "02_starts_too_low", "01"])] == ["01", "02"]
    with pytest.raises(labs.LabError, match="not there"):
        labs.check(labs.find(["1"])[0], LABS / "no.py")
