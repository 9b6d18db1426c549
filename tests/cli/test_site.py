"""The course's site, without building it: what its pages name is there, and is still so."""

import os
import re
import subprocess
import sys

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


def test_pages_of_the_contents_exist_and_none_is_left_out(staged):
    """Sphinx would warn of both, in a build that the tests do not make."""
    named = {page for pages in site_pages.CONTENTS.values() for page in pages} - {"notebooks/*"}
    for page in named:
        assert f"{page}.md" in staged, page
    top = {name.removesuffix(".md") for name in staged if "/" not in name}
    assert top - named == {"index"}


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


def test_pictures_have_an_alt_text(staged):
    """Of the pages by hand; that a notebook's pictures have one is a rule of their lint."""
    seen = 0
    for name, path in staged.items():
        if name.endswith(".md"):
            for alt in re.findall(r"!\[(.*?)\]\(", path.read_text(encoding="utf-8")):
                assert len(alt) >= 20, f"{name}: {alt!r}"
                seen += 1
    assert seen
    assert "mystnb" in staged["notebooks/02_garbage_rollouts.ipynb"].read_text(encoding="utf-8")


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


def test_without_a_browser_it_is_not_run():
    """Never a pass, and never a traceback."""
    script = [sys.executable, str(ROOT / "tools" / "check_site.py")]
    done = subprocess.run(script, env={"PATH": "", "CHROMIUM": "/nowhere/chromium"}, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout.startswith("NOT RUN: no chromium or chrome was found")
    assert not done.stderr


def test_the_slides_are_nbconvert_s(tmp_path):
    """`make slides` makes a deck of the stored outputs: slides, clicks, pictures; it runs nothing."""
    make = ["make", "-o", "setup", "-o", "here", "slides", "NAME=02", f"SLIDES={tmp_path}"]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    (deck,) = tmp_path.iterdir()
    text = deck.read_text(encoding="utf-8")
    assert text.count("<section") > 10 and 'class="fragment"' in text and "data:image/png" in text


def test_the_chinese_readme_leads_where_the_english_one_does():
    """The same commands, notebooks and pages: a page or command that is renamed in one must be in the other."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/zh/README.md"))

    def commands(text):
        blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        return {line.split("#")[0].strip() for block in blocks for line in block.splitlines()}

    def links(text, folder):
        found = re.findall(r"\]\(([^()\s#]+)\)", text)
        return {os.path.normpath(os.path.join(folder, link)) for link in found if "://" not in link}

    assert commands(chinese) and commands(chinese) <= commands(english)
    assert {link for link in links(english, "") if "notebooks/" in link} <= links(chinese, "docs/zh")
    known = links(english, "") | {"README.md", "docs/zh/symptoms.md"}
    assert links(chinese, "docs/zh") <= known
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) <= 1600
