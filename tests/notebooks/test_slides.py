"""Slides: what the notebooks set, that a deck is one file, and bad input. No browser is needed here."""

import pathlib
import re
import subprocess
import sys

import nbformat
import pytest

from failurelab_course import eras
from failurelab_course.runs import notebooks as course
from failurelab_course.teaching import slides


@pytest.mark.parametrize("notebook", course.notebooks(), ids=lambda each: each.name)
def test_what_a_notebook_shows(notebook):
    """Every section begins a slide, answers come at a click, and every picture and table is on a slide."""
    for number, cell in enumerate(notebook.content.cells):
        kind = cell.metadata.get("slideshow", {}).get("slide_type")
        heading = cell.cell_type == "markdown" and re.search(
            "^#+ ", re.sub("```.*?```", "", cell.source, flags=re.DOTALL), re.MULTILINE
        )
        assert (kind == "slide") == bool(heading), number
        assert (kind == "skip") == (cell.cell_type == "code" and not cell.outputs), number
        if "predict.answer(" in cell.source:
            assert kind in ("fragment", "subslide"), number


def test_a_deck_is_one_file_that_names_no_other():
    """Nothing is fetched; code that draws is left out, and the guide's questions end it, with answers in the notes."""
    notebook = course.find(["02"])[0].content
    made = slides.deck(notebook, [("Why?", "Because of </script> hooks.")], ["/* css */", "'</script>'", "let b = 2"])
    assert "/* css */" in made and r"'<\/script>'" in made and "let b = 2" in made
    assert not re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"'](?!data:|\$)[^\"']*", made)
    assert "@import" not in made and "url(http" not in made
    assert made.count("<section") > 10 and 'class="fragment"' in made
    assert "plt.subplots" not in made and "NBVAL" not in made and "<img" in made
    assert made.rindex("Why?") < made.rindex('<aside class="notes">') < made.rindex("Because of")


def test_slides_of_an_unknown_notebook(tmp_path):
    """The known ones are listed, in one line."""
    command = [sys.executable, "-m", "failurelab", "slides", "99", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "00_start_here" in done.stderr and not list(tmp_path.iterdir())


@pytest.fixture
def reveal(tmp_path, monkeypatch):
    """A course with a guide and reveal.js as `make slides` installs it."""
    monkeypatch.setattr(slides.eras, "root", lambda: tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / slides.GUIDE).write_text("")
    for path in slides.FILES:
        (tmp_path / slides.REVEAL / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / slides.REVEAL / path).write_text("")
    return tmp_path / slides.REVEAL


def test_bad_input_is_said_in_a_line(reveal, tmp_path, monkeypatch):
    """A notebook without outputs, a folder that cannot be written, half of reveal.js: what it is, and the next step."""
    bare = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T"), nbformat.v4.new_code_cell("run()")])
    nbformat.write(bare, tmp_path / "01_bare.ipynb")
    bare.cells[1].outputs = [nbformat.v4.new_output("stream", text="said")]
    nbformat.write(bare, tmp_path / "02_run.ipynb")
    monkeypatch.setattr(slides.course, "find", lambda names: [course.Notebook(tmp_path / f"{names[0]}.ipynb")])
    (tmp_path / "taken").write_text("")
    for name, out, said in (
        ("01_bare", None, "01_bare: no outputs are stored.*Next: git checkout"),
        ("02_run", tmp_path / "taken" / "here", "cannot be written.*Next: give another --out"),
    ):
        with pytest.raises(slides.SlidesError, match=said) as error:
            slides.make([name], out, say=str)
        assert "\n" not in str(error.value)
    assert slides.make(["02_run"], say=str) == [tmp_path / ".slides" / "02_run.html"]
    (reveal / slides.FILES[0]).unlink()
    with pytest.raises(slides.SlidesError, match=r"reveal\.css.*Next: delete \.slides/reveal"):
        slides.make(["02_run"], say=str)


def test_the_lock_pins_reveal_with_its_hash():
    """What is put into every deck is what was looked at."""
    lock = pathlib.Path(eras.root() / "docs" / "slides.txt").read_text()
    assert re.search(r"^sphinx-revealjs==[\d.]+ \\\n +--hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)
    assert "http" not in lock
