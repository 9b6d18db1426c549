"""`failurelab slides`: decks for a lecture, made from the notebooks' stored outputs by nbconvert and reveal.js.

A deck is one file that fetches nothing: reveal.js, styles and pictures are in it, so that it can be carried to a room
without a network. nbconvert's own template loads reveal.js, require.js, jQuery and MathJax from the web; the template
`deck` in this package needs the first only, and takes it from a wheel pinned with its hash in docs/slides.txt, which is
installed once into .slides/reveal. A wheel, because the course's set-up has an installer and an index for it already:
npm's package would ask for a second of both, and a copy in the repository would be somebody else's code to keep.
"""

import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from failurelab.errors import FailureLabError
from failurelab_course import eras
from failurelab_course.eras import install as era_install
from failurelab_course.runs import notebooks as course
from failurelab_course.teaching import slide_rules

# What a deck holds of reveal.js, and of the speaker's view.
_FILES = {"reveal_css": "dist/reveal.css", "reveal_js": "dist/reveal.js", "notes_js": "plugin/notes/notes.js"}
_TEMPLATES = pathlib.Path(__file__).parent
GUIDE = "docs/teaching.md"


class SlidesError(FailureLabError):
    """A deck cannot be made; the message says what was found and the next step."""


def make(names: Iterable[str] = (), out: pathlib.Path | None = None, say: Callable = print) -> list[pathlib.Path]:
    """Write a deck for each notebook; return the files.

    Args:
        names: numbers or names; all when none is given.
        out: the folder, `.slides` by default.
        say: is told of each file.

    Raises:
        SlidesError: a notebook has no stored outputs, reveal.js cannot be installed, or the folder cannot be written.
        course.CourseError: no notebook is called so.
    """
    chosen = course.find(names)
    _check_outputs(chosen)
    assets = reveal(say)
    folder = out or eras.root() / ".slides"
    guide = eras.root() / GUIDE
    questions = discussion(guide.read_text(encoding="utf-8")) if guide.is_file() else {}
    made = []
    for notebook in chosen:
        text, count = deck(notebook.content, questions.get(notebook.name[:2], []), assets)
        path = folder / f"{notebook.name}.html"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise SlidesError(f"{path} cannot be written ({error.strerror}). Next: give another --out") from error
        say(f"{os.path.relpath(path)}: {count} slides")
        made.append(path)
    return made


def _check_outputs(chosen: Iterable[course.Notebook]) -> None:
    """Raise where slides would show questions and no answers."""
    bare = [each.name for each in chosen if not any(cell.outputs for cell in each.code)]
    if bare:
        raise SlidesError(
            f"{', '.join(bare)}: no outputs are stored, and slides show what came out. "
            f"Next: git checkout notebooks/{bare[0]}.ipynb, or failurelab outputs {bare[0][:2]}"
        )


def deck(notebook: Any, questions: list[tuple[str, str]], assets: dict[str, str]) -> tuple[str, int]:
    """Return a notebook's deck as HTML, and how many slides it has.

    Args:
        notebook: with stored outputs.
        questions: for its last slides; see `discussion`.
        assets: the texts that `reveal` returns.
    """
    from nbconvert.exporters import SlidesExporter
    from pygments.formatters import HtmlFormatter

    slides = slide_rules.slides(notebook, questions)
    exporter = SlidesExporter(
        template_name="deck",
        extra_template_basedirs=[str(_TEMPLATES)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    # Without a common prefix both styles would count at once.
    colours = {
        "light_code": HtmlFormatter(style="xcode").get_style_defs(".light .highlight"),
        "dark_code": HtmlFormatter(style="github-dark").get_style_defs(".dark .highlight"),
        "deck_css": (_TEMPLATES / "deck" / "deck.css").read_text(encoding="utf-8"),
    }
    resources = {"metadata": {"name": slides[0].title}, "deck": assets | colours}
    text, _ = exporter.from_notebook_node(slide_rules.notebook_of(slides), resources=resources)
    return text, len(slides)


def reveal(say: Callable = print) -> dict[str, str]:
    """Return the texts of reveal.js that a deck holds; install its wheel into .slides/reveal where it is not there.

    Raises:
        SlidesError: it cannot be installed, or a file of it is missing.
    """
    lock = eras.root() / "docs" / "slides.txt"
    folder = eras.root() / ".slides" / "reveal"
    stamp = folder / "failurelab-lock"
    try:
        wanted = lock.read_text(encoding="utf-8")
    except OSError as error:
        raise SlidesError(f"{lock} is missing: it pins reveal.js. Next: git checkout docs/slides.txt") from error
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted):
        say("slides: reveal.js is installed into .slides/reveal from docs/slides.txt")
        _install(lock, folder)
        stamp.write_text(wanted, encoding="utf-8")
    static = folder / "sphinx_revealjs" / "_static" / "revealjs"
    try:
        texts = {name: (static / path).read_text(encoding="utf-8") for name, path in _FILES.items()}
    except OSError as error:
        raise SlidesError(
            f"{error.filename}: this file of reveal.js is not there or cannot be read. Next: delete .slides/reveal, "
            "and run the same command again"
        ) from error
    # In a page's script element these letters would end it.
    return {name: re.sub("</(?=script|style)", r"<\\/", text, flags=re.IGNORECASE) for name, text in texts.items()}


def _install(lock: pathlib.Path, folder: pathlib.Path) -> None:
    partial = folder.with_name("reveal.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [era_install.uv(), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", str(partial)]
    try:
        done = subprocess.run([*command, "-r", str(lock)], capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1].strip()
            raise SlidesError(
                f"reveal.js could not be installed ({said}): decks are made with it. Next: run the same command again "
                "with a network, which it needs once"
            )
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise SlidesError(f"reveal.js could not be installed into {folder} ({error}). Next: look at that") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def discussion(guide: str) -> dict[str, list[tuple[str, str]]]:
    """Return the guide's discussion questions by notebook number: `(question, what a good answer holds)`.

    In the guide a notebook's questions stand under a heading such as `### 01 The requires_grad warning`, each an item
    `1. **Question?** What a good answer holds.`
    """
    found = {}
    for part in re.split(r"^### (?=\d\d )", guide, flags=re.MULTILINE)[1:]:
        text = re.split(r"^##+ ", part, flags=re.MULTILINE)[0]
        items = re.findall(r"^\d+\. \*\*(.+?)\*\*\s+(.+?)(?=^\d+\. |\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        found[part[:2]] = [(" ".join(question.split()), " ".join(answer.split())) for question, answer in items]
    return found
