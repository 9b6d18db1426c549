"""A learner at work: check, hint, solution, reset, progress; and what is kept of it."""

import concurrent.futures
import json
import re
import shutil

import pytest
from rich.console import Console
from tests.labs.conftest import LAB, shorten

from failurelab_course import eras
from failurelab_course.labs import cli as lab_cli
from failurelab_course.labs import exercise as lab_work
from failurelab_course.labs import progress as lab_state
from failurelab_course.labs import report as lab_report
from failurelab_course.labs import verify as labs

LABS = eras.root() / "labs"
REPAIR = "    model.enable_input_require_grads()\n    config = GRPOConfig("


def row(lab, result, reason="as found"):
    return labs.ScriptOutcome(lab.name, labs.CHECK, "train.py", result, reason)


def progress(lab):
    return lab_state.read(lab_state.default_path())[lab.name]


def test_checks_are_counted_up_to_the_first_pass(lab):
    lab_work.keep_result(lab, row(lab, "FAIL"))
    lab_work.keep_result(lab, row(lab, "ENVIRONMENT"))
    assert (progress(lab).checks, progress(lab).solved) == (1, "")
    lab_work.keep_result(lab, row(lab, "PASS"))
    lab_work.keep_result(lab, row(lab, "FAIL"))
    found = progress(lab)
    assert found.checks == 2 and found.solved >= found.started > ""


def test_a_wrong_fix_that_many_try_is_told_and_kept(lab):
    """The learner's own layout and comments do not hide it."""
    text = lab_work.find_wrong_fix(lab, "filter_warnings").text()
    lab.train.write_text(text.replace("import tempfile\n", "import tempfile  # mine\n\n\n"))
    made = lab_work.keep_result(lab, row(lab, "FAIL"))
    assert "a repair that many try" in made.reason
    assert next(each.reason for each in lab.wrong_fixes if each.name == "filter_warnings") in made.reason
    lab_work.keep_result(lab, row(lab, "FAIL"))
    assert progress(lab).wrong_fixes == ["filter_warnings"]


@pytest.mark.parametrize("name", [None, *labs.known()])
def test_every_wrong_fix_is_known_by_its_code(name, lab):
    """And neither the broken script nor one that is no Python is taken for one."""
    if name is None:
        assert lab_work.wrong_fix(lab) is None
        lab.train.write_text("def broken(:\n")
        assert lab_work.wrong_fix(lab) is None
        return
    folder = lab.folder.parent / name
    shutil.copytree(LABS / name, folder, dirs_exist_ok=True)
    other = labs.load(folder)
    for each in other.wrong_fixes:
        other.train.write_text(each.text())
        assert lab_work.wrong_fix(other) == each


def test_a_script_that_nobody_touched_is_told_no_figure(lab):
    """Comments are no repair; the first line of code that differs is answered with figures."""
    measured = row(lab, "FAIL", "24 of 25 tensors still have no gradient")
    measured.metrics = {"tensors_without_gradient": 24}
    lab.train.write_text(lab.start.read_text() + "# why?\n")
    assert lab_work.keep_result(lab, measured).reason == f"it does what the symptom says: {lab.symptom}"
    measured.reason = "24 of 25 tensors still have no gradient"
    lab.train.write_text(lab.start.read_text().replace("max_steps=70", "max_steps=71"))
    assert lab_work.keep_result(lab, measured).reason == "24 of 25 tensors still have no gradient"


def test_hints_grow_and_those_read_stay(lab):
    assert [lab_work.hint(lab) for _ in range(2)] == [lab.hints[:1], lab.hints[:2]]
    lab_work.keep_result(lab, row(lab, "PASS"))
    assert lab_work.hint(lab) == lab.hints and progress(lab).hints == 2
    lab_state.default_path().unlink()
    assert [len(lab_work.hint(lab)) for _ in range(4)] == [1, 2, 3, 3] and progress(lab).hints == 3


def test_the_next_lab_comes_after_the_one_just_solved():
    """Who works in the middle is not sent back to the first; at the end what was left out comes."""
    names = labs.known()
    assert lab_work.next_lab({}).name == names[0]
    assert lab_work.next_lab({}, after=names[4]).name == names[5]
    solved = {name: lab_state.Progress(solved="2026-01-01T10:00:00+00:00") for name in names[1:]}
    assert lab_work.next_lab(solved, after=names[-1]).name == names[0]
    solved[names[0]] = solved[names[1]]
    with pytest.raises(labs.LabError, match="all labs are solved"):
        lab_work.next_lab(solved)


def test_a_wrong_fix_and_the_solution_can_be_written_whole(lab, tmp_path, monkeypatch):
    """Where a script finds the small model by itself, as the learner's does: two folders below the course's own."""
    monkeypatch.setattr(eras, "root", lambda: tmp_path)
    written = lab_work.write(lab, lab_work.find_wrong_fix(lab, "train_mode"))
    assert written == tmp_path / ".course" / "01_frozen_embeddings" / "train_mode.py"
    assert "torch.set_grad_enabled(True)" in written.read_text()
    assert "enable_input_require_grads()" in lab_work.write(lab, lab.solution).read_text()
    with pytest.raises(labs.LabError, match=r"no wrong fix 'no'\. It has: filter_warnings, train_mode"):
        lab_work.find_wrong_fix(lab, "no")


def test_the_solution_is_offered_after_a_pass_or_when_asked_for(lab):
    with pytest.raises(labs.LabError, match=r"not solved yet. Next: failurelab lab hint 01 \(3 left\), or"):
        lab_work.solution(lab)
    assert "+    model.enable_input_require_grads()" in lab_work.solution(lab, asked=True)
    lab_work.keep_result(lab, row(lab, "PASS"))
    assert progress(lab).words == "solved, the solution was seen"


def test_reset_keeps_what_was_written(lab):
    original = lab.start.read_text()
    assert lab_work.reset(lab) is None
    for number, text in enumerate(("first = 1\n", "second = 2\n"), start=1):
        lab.train.write_text(text)
        kept = lab_work.reset(lab)
        assert kept.name == f"train.backup-{number}.py"
        assert kept.read_text() == text
        assert lab.train.read_text() == original


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read"),
        ('{"schema": 2, "labs": {}}', "no state file of schema 1"),
        ('{"schema": 1, "labs": {"01": {"solved": "2026-01-01T10:00:00"}}}', "a time without a zone"),
    ],
)
def test_a_damaged_state_file_is_named_and_left_as_it_is(lab, content, problem):
    path = lab_state.default_path()
    path.write_text(content)
    with pytest.raises(lab_state.StateError, match=problem) as caught:
        lab_work.hint(lab)
    assert str(path) in str(caught.value) and "Next: " in str(caught.value)
    assert path.read_text() == content


def test_two_commands_at_once_lose_nothing(lab):
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda _: lab_work.keep_result(lab, row(lab, "FAIL")), range(20)))
    assert progress(lab).checks == 20


SOLVED = {"started": "2026-01-01T10:00:00+00:00", "solved": "2026-01-01T10:20:00+00:00", "checks": 3, "hints": 2}
SOLVED |= {"wrong_fixes": ["filter_warnings"], "solution_seen": False}


def test_a_class_is_merged_from_state_files(tmp_path):
    learners = {
        "ann": {},
        "ann_again": {},
        "ben": {"solved": "2026-01-01T10:10:00+00:00", "checks": 1, "hints": 0, "wrong_fixes": []},
        "cem": {"solved": "", "wrong_fixes": ["filter_warnings", "train_mode"]},
        "dan": {"started": "2026-01-01T11:00:00+00:00"},
    }
    for name, content in learners.items():
        (tmp_path / name).mkdir()
        state = {"schema": 1, "labs": {"01_frozen_embeddings": SOLVED | content, "02_starts_too_low": {}}}
        (tmp_path / name / "labs.json").write_text(json.dumps(state))
    (tmp_path / "dot.json").write_text("{")
    (tmp_path / "nothing").mkdir()
    report = lab_report.merge(
        [tmp_path, tmp_path / "ann" / "labs.json", tmp_path / "nobody.json", tmp_path / "nothing"]
    )
    told = ("the same as", str(tmp_path / "dot.json"), str(tmp_path / "nobody.json"), "no *.json file is in it")
    assert all(said in text and "Next: " in text for said, text in zip(told, report.left_out, strict=True))
    assert report.files == 4
    (first,) = report.labs
    assert (first.lab, first.learners, first.solved, first.with_solution) == ("01_frozen_embeddings", 4, 3, 0)
    assert first.hints == {0: 1, 2: 2}
    assert first.wrong_fixes == {"filter_warnings": 3, "train_mode": 1}
    assert (first.checks, first.minutes) == (3, 15)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """The course as a learner has it, with two labs, of which the first has six steps: links to everything else."""
    root = tmp_path / "course"
    (root / "labs").mkdir(parents=True)
    for name in ("eras", "helpers", "models", ".venv", ".eras"):
        (root / name).symlink_to(eras.root() / name)
    for name in ("01_frozen_embeddings", "02_starts_too_low"):
        shutil.copytree(LABS / name, root / "labs" / name, ignore=shutil.ignore_patterns("train*"))
    path = shorten(root / "labs" / LAB) / "lab.toml"
    # Six steps teach nothing: here a lab is solved when its gradients are right.
    lines = path.read_text().splitlines()
    learned = ('check = "accuracy_gain', 'check = "reward_last', 'check = "rollout_gap')
    path.write_text("\n".join(line for line in lines if not any(each in line for each in learned)) + "\n")
    monkeypatch.setenv("FAILURELAB_ROOT", str(root))
    monkeypatch.setenv("FAILURELAB_STATE", str(tmp_path / "state.json"))
    monkeypatch.setattr(lab_cli, "console", Console(width=120, highlight=False, force_terminal=True))
    return root


@pytest.mark.slow
def test_a_learner_at_work(course, failurelab, monkeypatch):
    def ran(*words, status=0):
        done = failurelab("lab", *words)
        assert done.returncode == status, done
        return " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout).split()), done.stdout

    listed, _ = ran("list")
    assert "0 of 2 solved" in listed and "failurelab lab check 01" in listed
    script = course / "labs" / "01_frozen_embeddings" / "train.py"
    assert script.is_file()  # it was made, for the list says that it is to be edited
    opened, _ = ran("open", "02")
    assert opened == "labs/02_starts_too_low/train.py" and (course / opened).is_file()
    script.write_text(script.read_text().replace("    config = GRPOConfig(", REPAIR))
    passed, coloured = ran("check", "01")
    assert "PASS lab 01" in passed and "\x1b[1;32mPASS" in coloured  # green
    solved, _ = ran("solution", "01")
    assert "enable_input_require_grads" in solved
    assert (course / solved.rpartition("The whole script: ")[2]).is_file()
    monkeypatch.setattr(labs, "check", lambda lab, device: row(lab, "FAIL", "it is too slow"))
    assert "FAIL lab 02: it is too slow Stuck? failurelab lab hint 02" in ran("check", status=1)[0]
    assert "Hint 1 of 3" in ran("hint", "02")[0]
    assert "1 of 2 solved" in ran("list")[0]
    assert "train.backup-1.py" in ran("reset", "01")[0]


def test_the_magic_in_a_cell(tmp_path, monkeypatch, capsys):
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("FAILURELAB_STATE", str(tmp_path / "state.json"))
    shell = InteractiveShell.instance()
    try:
        shell.run_line_magic("load_ext", "failurelab_course")
        shell.run_line_magic("lab", "hint 01")
        assert "Hint 1 of 3 for lab 01" in capsys.readouterr().out
        shell.run_line_magic("lab", "hint 77")
        assert "unknown lab '77'" in capsys.readouterr().out
    finally:
        InteractiveShell.clear_instance()
