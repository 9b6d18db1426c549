"""The teacher's guide: its schedules follow the learning path, its lists are complete, its example is real."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from failurelab_course import eras
from failurelab_course.labs import verify as labs
from failurelab_course.runs import notebooks as course
from failurelab_course.teaching import slides

ROOT = eras.root()
GUIDE = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
SCHEDULES = {
    "One hour": "One hour",
    "Half a day": "Half a day",
    "Day 1 of two": "Day 1: gradients, rollouts, logits",
    "Day 2 of two": "Day 2: alignment, engines, devices, everything",
}
# The made-up class of the guide's example. Times are all in one week, with no person behind them.
LEARNERS = {
    "ash": {
        "01_frozen_embeddings": ("09:40", "09:52", 3, 1, ["filter_warnings"], False),
        "17_a_warning": ("09:55", "10:03", 2, 0, ["a_guess"], False),
    },
    "birch": {
        "01_frozen_embeddings": ("09:40", "09:47", 2, 0, ["higher_learning_rate"], False),
        "17_a_warning": ("09:56", "10:11", 3, 2, ["silence_it", "a_guess"], False),
    },
    "cedar": {"01_frozen_embeddings": ("09:41", "10:01", 5, 3, ["filter_warnings", "train_mode"], True)},
    "elm": {"01_frozen_embeddings": ("09:42", "", 2, 1, ["filter_warnings"], False)},
}


def part(heading):
    """The text below a heading, up to the next of its level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}$(.*?)(?=^#{{1,3}} |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[2]


def path_tables():
    """The learning path's rows (file, minutes) by heading."""
    spec = importlib.util.spec_from_file_location("test_site", ROOT / "tests" / "cli" / "test_site.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return {heading: rows for heading, (rows, _) in loaded.days().items()}


@pytest.mark.parametrize("heading", SCHEDULES)
def test_a_schedule_is_the_path_with_breaks(heading):
    """Its notebooks and labs are those of docs/path.md (held to cards and lab.toml there), and the clock adds up."""
    rows = re.findall(r"^\| (\d\d):(\d\d) \| (\d+) \| (.+) \|$", part(heading), re.MULTILINE)
    now = 9 * 60
    for hour, minute, minutes, what in rows:
        assert int(hour) * 60 + int(minute) == now, what
        now += int(minutes)
    assert f"To {now // 60:02}:{now % 60:02}." in part(heading)
    linked = [(link[1], row[2]) for row in rows if (link := re.search(r"\]\(\.\./(\S+)\)", row[3]))]
    assert linked == path_tables()[SCHEDULES[heading]]


def test_nobody_sits_for_two_hours_without_a_break():
    """As a rule of teaching; breaks are rows of the schedule."""
    for heading in SCHEDULES:
        sat = 0
        for minutes, what in re.findall(r"^\| \d\d:\d\d \| (\d+) \| (.+) \|$", part(heading), re.MULTILINE):
            sat = 0 if what in ("*Break*", "*Lunch*") else sat + int(minutes)
            assert sat <= 120, heading


def test_parts_say_what_they_take():
    """The minutes of a part are those of its notebooks and labs."""
    tables = [row for rows in path_tables().values() for row in rows]
    minutes = {re.search(r"(notebooks|labs)/(\d\d)", target).groups(): int(told) for target, told in tables}
    rows = re.findall(r"^\| .+? \| (\d\d, .+?) \| (\d+) \|$", part("To give only a part"), re.MULTILINE)
    counted = 0
    for what, told in rows:
        if "sections" in what:
            continue
        named = [("labs" if lab else "notebooks", number) for lab, number in re.findall(r"(lab )?(\d\d)", what)]
        assert int(told) == sum(minutes[each] for each in named), what
        counted += 1
    assert counted >= 4


def test_every_lab_is_paired_with_a_notebook():
    """Once each; a new lab belongs into the table."""
    rows = re.findall(r"^\| \d\d \| (.+) \|$", part("Labs, hints, solutions"), re.MULTILINE)
    listed = [number for row in rows for number in re.findall(r"\d\d", row)]
    assert sorted(listed) == [name[:2] for name in labs.known()]


def test_wrong_answers_are_those_that_the_checker_knows():
    """Each is a declared wrong fix of each lab that it is listed for."""
    rows = re.findall(r"^\| ([\d, ]+) \| `(\w+)`", part("Common wrong answers"), re.MULTILINE)
    assert len(rows) >= 10
    for numbers, fix in rows:
        for number in re.findall(r"\d\d", numbers):
            (lab,) = labs.find([number])
            assert fix in [each.name for each in lab.wrong_fixes], f"lab {number}: {fix}"


@pytest.mark.parametrize("name", course.known())
def test_every_notebook_has_discussion_questions(name):
    """Three or more, each with what a good answer contains; they become the last slides."""
    questions = slides.discussion(GUIDE)[name[:2]]
    assert len(questions) >= 3
    for question, answer in questions:
        assert question.endswith("?"), question
        assert len(answer.split()) >= 15, question


def test_figures_of_the_discussion_stand_in_the_notebook():
    """An answer names no number that its notebook does not have."""
    for notebook in course.notebooks():
        cells = [cell.source + str(cell.get("outputs", "")) for cell in notebook.content.cells]
        text = re.sub(r"'image/png': '[^']*'", "", "\n".join(cells))
        for question, answer in slides.discussion(GUIDE)[notebook.name[:2]]:
            for figure in re.findall(r"\d[\d.,]*\d|\d", question + answer):
                assert figure in text, f"{notebook.name}: {figure} in {question}"


def example(folder):
    """What the guide's command prints for the made-up class, and its exit status."""
    (folder / "class").mkdir()
    for name, state in LEARNERS.items():
        made = {}
        for lab, (started, solved, checks, hints, wrong, seen) in state.items():
            times = [f"2026-03-02T{time}:00+00:00" if time else "" for time in (started, solved)]
            fields = {"started": times[0], "solved": times[1], "checks": checks, "hints": hints}
            made[lab] = fields | {"wrong_fixes": wrong, "solution_seen": seen}
        (folder / "class" / f"{name}.json").write_text(json.dumps({"schema": 1, "labs": made}))
    (folder / "class" / "fir.json").write_text('{"schema": 1, "labs": {"01_fro')
    done = subprocess.run(
        [sys.executable, "-m", "failurelab", "lab", "report", "class"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "FAILURELAB_ROOT": str(ROOT)},
    )
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    return "\n".join(lines), done.returncode


def test_the_example_of_the_class_report_is_what_is_printed(tmp_path):
    """The page shows a run on made-up files; one of them is broken, is named, and the others count."""
    printed, status = example(tmp_path)
    assert status == 1
    assert "LEFT OUT class/fir.json: it cannot be read" in printed and "the others are counted" in printed
    shown = re.search(r"<!-- report -->\n```\n(.*?)\n```\n<!-- end report -->", GUIDE, re.DOTALL)
    assert shown and shown[1] == printed


if __name__ == "__main__":  # writes the example into the guide
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        block = f"<!-- report -->\n```\n{example(pathlib.Path(place))[0]}\n```\n<!-- end report -->"
    made = re.sub(r"<!-- report -->.*?<!-- end report -->", lambda _: block, GUIDE, flags=re.DOTALL)
    (ROOT / "docs" / "teaching.md").write_text(made, encoding="utf-8")
