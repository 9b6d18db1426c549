"""Slides: what the rules make of a notebook, that all notebooks fit them, and bad input. No browser is needed here."""

import pathlib
import re
import subprocess
import sys

import nbformat
import pytest

from failurelab_course import eras
from failurelab_course.runs import notebooks as course
from failurelab_course.teaching import slide_rules, slide_text, slides

NOTEBOOKS = course.notebooks()
GUIDE = (eras.root() / slides.GUIDE).read_text(encoding="utf-8")
HEAD = """# Title of it

> An alert.

| | |
|---|---|
| **What breaks** | a thing |
| **You will** | find it |
| **Difficulty** | 2 of 5 |
| **Minutes** | 25 to read, 1 to run |
| **Eras** | today |
"""


def text(said):
    return nbformat.v4.new_output("stream", name="stdout", text=said)


def picture():
    return nbformat.v4.new_output("display_data", data={"image/png": "AA==", "text/plain": "a plot"})


def table(rows):
    lines = "".join(f"<tr><td>{row}</td><td><span>yes</span></td></tr>\n" for row in rows)
    head = '<table style="font-size:1em">\n<thead><tr><th>name</th><th>x</th></tr></thead>\n<tbody>\n'
    html = f"{head}{lines}</tbody>\n</table>"
    return nbformat.v4.new_output("display_data", data={"text/html": html, "text/plain": "name x"})


def deck(*cells, questions=()):
    """The slides of a notebook: strings are texts, pairs (source, outputs) code."""
    made = [nbformat.v4.new_markdown_cell(HEAD)]
    for cell in cells:
        if isinstance(cell, str):
            made.append(nbformat.v4.new_markdown_cell(cell))
        else:
            made.append(nbformat.v4.new_code_cell(cell[0], outputs=list(cell[1:])))
    return slide_rules.slides(nbformat.v4.new_notebook(cells=made), questions)


def shown(slide):
    """What stands on a slide, as one text."""
    parts = []
    for cell, _ in slide.parts:
        parts += [cell.source, *(str(each.get("text", each.get("data"))) for each in cell.get("outputs", []))]
    return "\n".join(parts)


def test_the_title_slide_has_the_alert_the_goal_and_the_minutes():
    """Rule 1. What breaks stands in the notes: who asks for a prediction must not give the answer away."""
    first = deck()[0]
    assert first.title == "Title of it" and "An alert." in shown(first)
    assert "find it" in shown(first) and "25 to read" in shown(first) and "2 of 5" in shown(first)
    assert "a thing" not in shown(first) and "a thing" in "".join(first.notes)


def test_set_up_and_records_make_no_slide():
    """Rule 1: parameters, the set-up, prose about it, imports, evidence and mere definitions are left out."""
    told = deck(
        ("device = 'cpu'",),
        "About the set-up.",
        ("from failurelab_course.notebook import display as notebook\nnotebook.setup(seed=0)",),
        "## 1. It begins",
        ("import torch\nfrom failurelab_course.experiments import observe",),
        ("for state in (1, 2):\n    figures = {}\n    observe.record('F1', state, figures)",),
        ("%%era trl-0.14 -i a -o b\ndef train():\n    return 1",),
        ("%%era trl-0.14 -i a -o b\nimport torch\nrun = train()",),
    )
    assert [each.title for each in told] == ["Title of it", "1. It begins"]
    assert shown(told[1]) == "%%era trl-0.14\nrun = train()"
    assert "`train`" in "".join(told[1].notes)


def test_a_prediction_ends_its_slide_and_its_answer_comes_at_a_click():
    """Rule 3, up to the next text: an output after that is no answer to the question."""
    told = deck(
        "## 2. Predict\n\n**Predict:** how many?",
        ("run()", text("26 of 26")),
        "All of them.",
        ("more()", text("and more")),
    )
    question, answer = told[1], told[2]
    assert question.parts[-1][0].metadata["tags"] == ["question"] and "26" not in shown(question)
    assert [each[1] for each in answer.parts] == [False, True, False, False, False]
    assert not any(hidden for cell, hidden in answer.parts if "more" in str(cell))


def test_questions_with_buttons_are_questions_and_answers_too():
    """Rule 3: `predict.ask` is read from the cell, for its buttons belong to a notebook; `predict.answer` is hidden."""
    told = deck(
        "## 2. Predict",
        ('predict.ask("01-changed", "How many tensors change?", ["none", "all"])', text("buttons")),
        ("run()",),
        ('predict.answer("01-changed", "all")', text("You said none. It was: all.")),
    )
    assert "How many tensors change?" in shown(told[1]) and "- none" in shown(told[1])
    assert "buttons" not in "".join(map(shown, told))
    assert told[2].parts[-1][1] and "It was: all." in shown(told[2]) and "predict.answer" not in shown(told[2])


def test_a_picture_has_a_slide_to_itself_and_its_code_is_left_out():
    """Rule 4: as large as the page allows; a line that announces it stays above it."""
    told = deck("## 3. Curves\n\nSome words.", ("axes.plot()", picture()), "Draw both:", ("axes.plot()", picture()))
    assert [len(each.parts) for each in told[1:]] == [1, 1, 2]
    assert "axes.plot" not in "".join(map(shown, told))
    assert told[3].parts[1][0].metadata["tags"] == ["below"]


def test_a_long_table_goes_on_under_its_headings():
    """Rule 4: no row is lost, and none is there twice."""
    told = deck("## 4. Verdicts", ("table()", table([f"row {n:02}" for n in range(30)])))
    assert len(told) > 3
    for slide in told[1:]:
        assert "<th>name</th>" in shown(slide) and "font-size" not in shown(slide)
    assert re.findall(r"row \d\d", "".join(map(shown, told))) == [f"row {n:02}" for n in range(30)]


def test_prose_is_cut_and_kept_for_the_speaker():
    """Rule 4: first sentences and bold ones; what is cut goes whole into the notes. A question is never cut."""
    long = (
        "This is what matters most, and it is a sentence of some length, as they are. It is not all that is there. " * 2
    )
    told = deck(f"## 5. Cause\n\n{long}**But this is bold.** The end of it.")
    assert "**But this is bold.**" in shown(told[1]) and "The end of it." not in shown(told[1])
    assert shown(told[1]).endswith("...") and "The end of it." in "".join(told[1].notes)
    asked = deck(f"## 5. Cause\n\n{long}**Predict** it. The end of it.")
    assert "The end of it." in shown(asked[1])


def test_answers_to_homework_are_for_the_speaker():
    """What a notebook folds is not put on the wall."""
    told = deck("## Homework\n\n1. Do it.\n\n<details><summary>Answers</summary>\n\n1. Done so.\n\n</details>")
    assert "Done so." not in shown(told[1]) and "Done so." in "".join(told[1].notes)


def test_long_code_is_folded_then_cut_and_says_so():
    """Rule 4: bodies of functions first; what is left over is counted."""
    body = "\n".join(f"    line_{n} = call({n})" for n in range(20))
    folded = slide_text.Code(f"%%era today -i a\ndef f(a):\n{body}\n\nf(1)")
    assert folded.text == "%%era today\ndef f(a):\n    ...\nf(1)" and folded.calls and folded.defines == ["f"]
    cut = slide_text.Code("\n".join(f"call({n})" for n in range(20)))
    assert cut.text.splitlines()[-1] == "# ... 9 more lines in the notebook"
    assert len(cut.text.splitlines()) == slide_text.CODE_LINES


@pytest.mark.parametrize(
    "prose, pieces",
    [
        ("One. Two is here. **Three? And four.** Five.", ["One.", "Two is here.", "**Three? And four.**", "Five."]),
        ("It is `a. B` there (see. This). Then", ["It is `a. B` there (see. This).", "Then"]),
        ("trl 0.14.0 and 0.15 differ. So what?", ["trl 0.14.0 and 0.15 differ.", "So what?"]),
    ],
)
def test_sentences(prose, pieces):
    """A version is no end of a sentence; bold, code and parentheses stay whole."""
    assert slide_text.sentences(prose) == pieces


def test_the_last_slides_ask_what_the_guide_asks():
    """Rule 5: questions on the slide, good answers in the notes."""
    told = deck(questions=[("Why?", "Because of the hooks.")])
    assert told[-1].title == "Discuss" and shown(told[-1]) == "1. Why?"
    assert "Because of the hooks." in "".join(told[-1].notes)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda each: each.name)
def test_every_notebook_makes_a_deck(notebook):
    """Every section is there, every picture and every table; no slide is fuller than a page, by the estimate."""
    questions = slides.discussion(GUIDE)[notebook.name[:2]]
    found = slide_rules.slides(notebook.content, questions)
    sections = [each.title for each in found if each.section]
    source = "\n".join(cell.source for cell in notebook.content.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", source, flags=re.DOTALL), re.MULTILINE)
    assert [title for title in headings if title not in sections] == []
    for kind in ("image/png", "text/html"):
        have = [
            cell for each in found for cell, _ in each.parts if any(kind in str(o) for o in cell.get("outputs", []))
        ]
        # A question is made from its cell's source, and its answer is a sentence: neither is a table.
        asked = [cell for cell in notebook.content.cells if re.search(r"predict\.(ask|answer)\(", cell.source)]
        shown = [cell for cell in notebook.content.cells if cell not in asked]
        wanted = [cell for cell in shown if any(kind in str(o) for o in cell.get("outputs", []))]
        assert len(have) >= len(wanted)
    for each in found[1:]:
        assert each.height <= slide_text.ROOM or len(each.parts) == 1, each.title
    asked = sum("question" in cell.metadata.get("tags", []) for each in found for cell, _ in each.parts)
    answered = sum(answer for each in found for _, answer in each.parts)
    assert asked >= 1 and answered >= asked / 2
    assert found[-1].title == "Discuss"


def test_a_deck_is_one_file_that_names_no_other(monkeypatch):
    """Nothing is fetched: no script, style or picture comes from elsewhere, and reveal.js cannot end its element."""
    assets = {"reveal_css": "/* css */", "reveal_js": "let a = 1", "notes_js": "let b = 2"}
    made, count = slides.deck(NOTEBOOKS[0].content, [], assets)
    assert count > 10 and "/* css */" in made and "let b = 2" in made
    assert not re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"'](?!data:)[^\"']*", made)
    assert not re.findall(r"url\((?!data:)", made) and "@import" not in made
    assert "notebook.setup(" not in made


def failurelab(*arguments):
    return subprocess.run([sys.executable, "-m", "failurelab", *arguments], capture_output=True, text=True)


def test_slides_of_an_unknown_notebook(tmp_path):
    """The known ones are listed, in one line."""
    done = failurelab("slides", "99", "--out", str(tmp_path))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "00_start_here" in done.stderr and not list(tmp_path.iterdir())


def test_slides_of_a_notebook_without_outputs(tmp_path):
    """Named, with the command that brings them back; nothing is written."""
    bare = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T"), nbformat.v4.new_code_cell("run()")])
    path = tmp_path / "01_bare.ipynb"
    nbformat.write(bare, path)
    with pytest.raises(slides.SlidesError, match=r"01_bare: no outputs are stored.*Next: git checkout") as said:
        slides._check_outputs([course.Notebook(path)])
    assert "\n" not in str(said.value)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A course without reveal.js, and an installer that ends as the test says."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "slides.txt").write_text("pinned\n")
    monkeypatch.setattr(slides.eras, "root", lambda: tmp_path)
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho 'error: could not connect' >&2\nexit 2\n")
    uv.chmod(0o755)
    monkeypatch.setattr(slides.era_install, "uv", lambda: str(uv))
    return tmp_path


def test_reveal_that_cannot_be_installed(elsewhere):
    """Without a network the first time: why, and what to do; no half folder is left."""
    with pytest.raises(slides.SlidesError, match=r"could not connect.*Next: run the same command again with a network"):
        slides.reveal(say=str)
    assert not list((elsewhere / ".slides").glob("*")) if (elsewhere / ".slides").exists() else True


def test_reveal_of_which_a_file_is_missing(elsewhere):
    """Someone has deleted half of it: the file is named, with the way out."""
    folder = elsewhere / ".slides" / "reveal"
    folder.mkdir(parents=True)
    (folder / "failurelab-lock").write_text("pinned\n")
    with pytest.raises(slides.SlidesError, match=r"reveal\.css.*Next: delete \.slides/reveal"):
        slides.reveal(say=str)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """A file where the folder should be: named, with the next step."""
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(slides, "reveal", lambda say: {"reveal_css": "", "reveal_js": "", "notes_js": ""})
    with pytest.raises(slides.SlidesError, match=r"cannot be written.*Next: give another --out"):
        slides.make(["00"], tmp_path / "taken" / "here", say=str)


def test_the_lock_pins_reveal_with_its_hash():
    """What is put into every deck is what was looked at."""
    lock = pathlib.Path(eras.root() / "docs" / "slides.txt").read_text()
    assert re.search(r"^sphinx-revealjs==[\d.]+ \\\n +--hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)
    assert "http" not in lock
