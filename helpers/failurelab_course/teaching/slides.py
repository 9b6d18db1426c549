"""`failurelab slides`: a deck for a lecture from each notebook's stored outputs, by nbconvert and reveal.js.

What becomes a slide is set in the notebooks themselves, as the slide types of JupyterLab's property inspector. The page
of nbconvert loads reveal.js and four more libraries from the web; `PAGE` needs reveal.js alone and holds it, so that a
deck is one file for a room without a network. `make slides` installs reveal.js from a wheel that docs/slides.txt pins.
"""

import os
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import nbformat

from failurelab.errors import FailureLabError
from failurelab_course import eras
from failurelab_course.runs import notebooks as course
from failurelab_course.runs import stored

GUIDE = "docs/teaching.md"
# What a deck holds of reveal.js, below the folder that `make slides` installs the wheel into.
REVEAL = pathlib.Path(".slides", "reveal", "sphinx_revealjs", "_static", "revealjs")
FILES = ("dist/reveal.css", "dist/reveal.js", "plugin/notes/notes.js")
PAGE = """{% extends "index.html.j2" %}
{% block header %}<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ resources.metadata.name | escape }}</title>
<link rel="icon" href="data:,"><style>{{ resources.texts[0] }}</style>
{{ resources.include_css("static/index.css") }}{{ resources.include_css("static/theme-light.css") }}
<style>
:root { --jp-content-font-size1: 25px; --jp-ui-font-size1: 22px; --jp-code-font-size: 20px; }
body { background: #fff; } main { height: 100vh; } html.dark, html.dark img { filter: invert(1) hue-rotate(180deg); }
.reveal .slides { text-align: left; } .jp-Notebook { padding: 0; } .jp-Cell { margin-bottom: 12px; }
.reveal .slides section { box-sizing: border-box; padding: 24px 40px; height: 720px; overflow-y: auto; }
.reveal .slides > section.stack { padding: 0; overflow: visible; }
.reveal pre, .reveal :not(pre) > code { white-space: pre-wrap; overflow-wrap: anywhere; }
.reveal img { width: 1100px; height: 560px; object-fit: contain; }
.jp-RenderedHTMLCommon table { margin: 0 0 12px; table-layout: auto; }
.jp-RenderedHTMLCommon td { overflow-wrap: anywhere; }
</style></head>{% endblock header %}
{% block footer_js %}<script>{{ resources.texts[1] }}</script><script>{{ resources.texts[2] }}</script><script>
Reveal.initialize({width: 1280, height: 720, margin: 0, center: false, hash: true, slideNumber: "c/t",
  transition: "none", plugins: [RevealNotes]});
Reveal.addKeyBinding({keyCode: 84, key: "T", description: "Light or dark"},
  () => document.documentElement.classList.toggle("dark"));
</script></html>{% endblock footer_js %}"""


class SlidesError(FailureLabError):
    """A deck cannot be made; the message says what was found and the next step."""


def make(names: Iterable[str] = (), out: pathlib.Path | None = None, say: Callable = print) -> list[pathlib.Path]:
    """Write a deck for each notebook; return the files.

    Args:
        names: numbers or names; all when none is given.
        out: the folder, `.slides` by default.
        say: is told of each file.

    Raises:
        SlidesError: a notebook has no stored outputs, reveal.js is not installed, or the folder cannot be written.
        course.CourseError: no notebook is called so.
    """
    chosen = course.find(names)
    bare = [notebook.name for notebook in chosen if not any(cell.outputs for cell in notebook.code)]
    if bare:
        raise SlidesError(
            f"{', '.join(bare)}: no outputs are stored, and slides show what came out. "
            f"Next: git checkout notebooks/{bare[0]}.ipynb, or failurelab outputs {bare[0][:2]}"
        )
    try:
        texts = [(eras.root() / REVEAL / path).read_text(encoding="utf-8") for path in FILES]
    except OSError as error:
        raise SlidesError(
            f"{error.filename}: this file of reveal.js is not there or cannot be read. Next: delete .slides/reveal, "
            "and run make slides, which needs a network once"
        ) from error
    questions = discussion((eras.root() / GUIDE).read_text(encoding="utf-8"))
    folder = out or eras.root() / ".slides"
    paths = []
    for notebook in chosen:
        path = folder / f"{notebook.name}.html"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(deck(notebook.content, questions.get(notebook.name[:2], []), texts), encoding="utf-8")
        except OSError as error:
            raise SlidesError(f"{path} cannot be written ({error.strerror}). Next: give another --out") from error
        say(os.path.relpath(path))
        paths.append(path)
    return paths


def deck(notebook: Any, questions: list[tuple[str, str]], texts: list[str]) -> str:
    """Return a notebook's deck as HTML.

    Args:
        notebook: with stored outputs and slide types.
        questions: for the last slides, `(question, what a good answer holds)`.
        texts: of the `FILES` of reveal.js.
    """
    from nbconvert.exporters import SlidesExporter

    for cell in notebook.cells:
        # What is folded in the notebook, a picture and a table are shown without their code.
        if stored.is_folded(cell) or any(output.output_type == "display_data" for output in cell.get("outputs", [])):
            cell.metadata["transient"] = {"remove_source": True}
    for question, answer in questions:
        for text, kind in ((f"## Discuss\n\n{question}", "slide"), (answer, "notes")):
            cell = nbformat.v4.new_markdown_cell(text, metadata={"slideshow": {"slide_type": kind}})
            notebook.cells.append(cell)
    hidden = {"exclude_input_prompt": True, "exclude_output_prompt": True, "exclude_anchor_links": True}
    exporter = SlidesExporter(raw_template=PAGE, **hidden)
    # In a page's script element these letters would end it.
    safe = [re.sub("</(?=script|style)", r"<\\/", text, flags=re.IGNORECASE) for text in texts]
    title = notebook.cells[0].source.partition("\n")[0].lstrip("# ")
    return exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}, "texts": safe})[0]


def discussion(guide: str) -> dict[str, list[tuple[str, str]]]:
    """Return the guide's discussion questions by notebook number: `(question, what a good answer holds)`.

    In the guide a notebook's questions stand under a heading such as `### 01 The requires_grad warning`, each an item
    `1. **Question?** What a good answer holds.`
    """
    questions = {}
    for part in re.split(r"^### (?=\d\d )", guide, flags=re.MULTILINE)[1:]:
        text = re.split(r"^##+ ", part, flags=re.MULTILINE)[0]
        items = re.findall(r"^\d+\. \*\*(.+?)\*\*\s+(.+?)(?=^\d+\. |\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        questions[part[:2]] = [(" ".join(question.split()), " ".join(answer.split())) for question, answer in items]
    return questions
