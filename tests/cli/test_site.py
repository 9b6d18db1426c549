"""The course's site, without building it: what its pages name is there, and is still so."""

import json
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
    folder = tmp_path_factory.mktemp("site")
    site_pages.stage(folder)
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def find_labels(path):
    return re.findall(r"^\(([\w-]+)\)=$", path.read_text(encoding="utf-8"), re.MULTILINE)


def find_targets(path):
    """Return what a link may name in a page: its headings, as GitHub and MyST spell them, and its labels."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings] + find_labels(path)


def test_links_between_pages_lead_somewhere(staged):
    """A notebook or lab that was renamed leaves links behind, and so does a heading."""
    targets = {name: find_targets(path) for name, path in staged.items() if name.endswith((".md", ".ipynb"))}
    checked = 0
    for name in targets:
        text = staged[name].read_text(encoding="utf-8")
        if name.endswith(".ipynb"):  # code may look like a link
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for target, anchor in re.findall(r"\]\(([^()\s#\\]*)(?:#([\w-]+))?\)", text):
            if (target or anchor) and not re.match(r"[a-z]+:", target):
                page = os.path.normpath(os.path.join(os.path.dirname(name), target)) if target else name
                assert page in staged, f"{name}: {target}"
                assert not anchor or anchor in targets[page], f"{name}: {target}#{anchor}"
                checked += 1
    assert checked > 100
    labels = [label for name, path in staged.items() if name.endswith(".md") for label in find_labels(path)]
    assert len(set(labels)) == len(labels) > 40, "two pages have a label of the same name"


def test_every_page_is_in_the_table_of_contents(staged):
    """Sphinx takes one that is not for an error, and nobody would find it."""
    index = staged["index.md"].read_text(encoding="utf-8")
    listed = set(re.findall(r"^(?:.*<)?([\w/-]+)>?$", index, re.MULTILINE))
    pages = [name.rpartition(".")[0] for name in staged if name.endswith((".md", ".ipynb"))]
    assert [page for page in pages if page not in listed and not re.match(r"index$|labs/\d", page)] == []


def test_every_page_says_where_the_repository_is_only_if_told(staged, monkeypatch):
    """A link to a file without a page leads to the repository on the web, or without its name is text."""
    text = "[rules](../CONTRIBUTING.md#L3), [path](path.md)"
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert site_pages.relink(text, "docs/index.md", "index.md") == "rules, [path](path.md)\n"
    monkeypatch.setenv("GITHUB_REPOSITORY", "some/name")
    there = "https://github.com/some/name/blob/main/CONTRIBUTING.md#L3"
    assert site_pages.relink(text, "docs/index.md", "index.md") == f"[rules]({there}), [path](path.md)\n"


def test_error_texts_stand_in_the_page_that_explains_them(staged):
    assert site_pages.literal_texts()
    for notebook, texts in site_pages.literal_texts().items():
        cells = "".join(staged[f"notebooks/{notebook}.ipynb"].read_text(encoding="utf-8"))
        for text in texts:
            assert f"`` {text} ``" in cells.replace('\\"', '"'), f"{notebook}: {text}"


def test_a_lab_page_does_not_give_the_solution_away(staged):
    for lab in labs.find():
        page = {line.strip() for line in staged[f"labs/{lab.name}.md"].read_text(encoding="utf-8").splitlines()}
        start = set(lab.broken.text().splitlines())
        added = [line for line in lab.solution.text().splitlines() if line not in start]
        hints = "\n".join(lab.hints).splitlines()
        for line in [*added, *hints]:
            if len(line.strip()) > 25:
                assert line.strip() not in page, f"{lab.name}: {line}"


@pytest.mark.nightly
def test_the_slides_are_nbconvert_s(tmp_path):
    make = ["make", "-o", "setup", "-o", "here", "slides", "NAME=02", f"SLIDES={tmp_path}"]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    (deck,) = tmp_path.iterdir()
    text = deck.read_text(encoding="utf-8")
    assert text.count("<section") > 10 and 'class="fragment"' in text and "data:image/png" in text
