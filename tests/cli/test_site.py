"""The course's site, without building it: what its pages name is there, and is still so."""

import os
import re
import subprocess

import pytest
from tools import site_pages

from failurelab_course import eras
from failurelab_course.labs import verify as labs

ROOT = eras.root()


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """All pages as Sphinx gets them, by name."""
    folder = tmp_path_factory.mktemp("site")
    site_pages.stage(folder)
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def test_links_between_pages_lead_somewhere(staged):
    """A notebook or lab that was renamed leaves links behind."""
    checked = 0
    for name, path in staged.items():
        if not name.endswith((".md", ".ipynb")):
            continue
        # In a notebook's JSON a link looks the same.
        for target in re.findall(r"\]\(([^()\s#\\]+)(?:#[\w-]+)?\)", path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert os.path.normpath(os.path.join(os.path.dirname(name), target)) in staged, f"{name}: {target}"
                checked += 1
    assert checked > 100


def test_every_page_says_where_the_repository_is_only_if_told(staged, monkeypatch):
    """A link to a file without a page leads to the repository on the web, or without its name is text."""
    text = "[rules](../CONTRIBUTING.md), [path](path.md)"
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert site_pages.relink(text, "docs/index.md", "index.md") == "rules, [path](path.md)\n"
    monkeypatch.setenv("GITHUB_REPOSITORY", "some/name")
    there = "https://github.com/some/name/blob/main/CONTRIBUTING.md"
    assert site_pages.relink(text, "docs/index.md", "index.md") == f"[rules]({there}), [path](path.md)\n"


def test_error_texts_stand_in_the_page_that_explains_them(staged):
    """Who pastes one into the search finds the notebook."""
    assert site_pages.literal_texts()
    for notebook, texts in site_pages.literal_texts().items():
        cells = "".join(staged[f"notebooks/{notebook}.ipynb"].read_text(encoding="utf-8"))
        for text in texts:
            assert f"`` {text} ``" in cells.replace('\\"', '"'), f"{notebook}: {text}"


def test_a_lab_page_does_not_give_the_solution_away(staged):
    """Task and broken script only: no line that the solution adds, and none of the hints."""
    for lab in labs.find():
        page = {line.strip() for line in staged[f"labs/{lab.name}.md"].read_text(encoding="utf-8").splitlines()}
        start = set(lab.broken.text().splitlines())
        added = [line for line in lab.solution.text().splitlines() if line not in start]
        hints = (lab.folder / "hints.md").read_text(encoding="utf-8").splitlines()
        for line in [*added, *hints]:
            if len(line.strip()) > 25:
                assert line.strip() not in page, f"{lab.name}: {line}"


def test_the_slides_are_nbconvert_s(tmp_path):
    """`make slides` makes a deck of the stored outputs: slides, clicks, pictures; it runs nothing."""
    make = ["make", "-o", "setup", "-o", "here", "slides", "NAME=02", f"SLIDES={tmp_path}"]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    (deck,) = tmp_path.iterdir()
    text = deck.read_text(encoding="utf-8")
    assert text.count("<section") > 10 and 'class="fragment"' in text and "data:image/png" in text
