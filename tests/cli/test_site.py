"""The course's site, without building it: what its pages name is there, and is still so."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tomllib

from failurelab_course import eras
from failurelab_course.labs import verify as labs

ROOT = eras.root()


def module(name):
    """Load a script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


site_pages = module("site_pages")


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """All pages as Sphinx gets them, by name."""
    folder = tmp_path_factory.mktemp("site")
    site_pages.stage(folder)
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def test_pages_of_the_contents_exist_and_none_is_left_out(staged):
    """Sphinx would warn of both, in a build that the tests do not make."""
    named = {page for pages in site_pages.CONTENTS.values() for page in pages} - {"notebooks/*", "appendix/*"}
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


def minutes(target):
    """Return what the opening of a notebook, or a lab's file, says that it takes."""
    if target.endswith(".ipynb"):
        return int(site_pages.opening(ROOT / target)["reads"])
    return tomllib.loads((ROOT / pathlib.Path(target).parent / "lab.toml").read_text(encoding="utf-8"))["minutes"]


def days():
    """Return the tables of the learning path: by heading, the rows (file, minutes) and the sum."""
    text = (ROOT / "docs" / "path.md").read_text(encoding="utf-8")
    found = {}
    for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| \[.+?\]\(\.\./(\S+?)\) \| (\d+) \|", part, re.MULTILINE)
        if rows:
            told = re.search(r"^Together (\d+) minutes\.$", part, re.MULTILINE)
            found[part.splitlines()[0]] = (rows, int(told[1]))
    return found


def test_the_learning_path_adds_up():
    """Its minutes are those of the notebooks and labs, its sums are sums, and an hour is an hour."""
    for heading, (rows, together) in days().items():
        for target, told in rows:
            assert (ROOT / target).exists(), f"{heading}: {target}"
            assert int(told) == minutes(target), f"{heading}: {target}"
        assert together == sum(int(told) for _, told in rows), heading
    sums = [together for _, together in days().values()]
    assert sums[0] <= 60
    assert sums[1] <= 240
    assert max(sums[2:]) <= 360


def test_two_days_take_every_notebook():
    """A new notebook belongs into docs/path.md, below one of the two days."""
    listed = [target for heading, (rows, _) in days().items() if heading.startswith("Day ") for target, _ in rows]
    assert len(listed) == len(set(listed))
    assert {f"notebooks/{path.name}" for path in site_pages.notebooks()} <= set(listed)


def test_each_notebook_says_what_it_takes():
    """Seconds and memory of every notebook, and of none that is gone."""
    text = (ROOT / "docs" / "prerequisites.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d\d) \| \d+ \| \d+ \|$", text, re.MULTILINE) == [
        path.name[:2] for path in site_pages.notebooks()
    ]


def test_pictures_have_an_alt_text(staged):
    """Of the pages by hand; that a notebook's pictures have one is a rule of its contract."""
    seen = 0
    for name, path in staged.items():
        if name.endswith(".md"):
            for alt in re.findall(r"!\[(.*?)\]\(", path.read_text(encoding="utf-8")):
                assert len(alt.split()) >= 4, f"{name}: {alt!r}"
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


def printed():
    """Return the texts that the course's code can print, with ... for what is filled in."""
    texts = [(ROOT / "Makefile").read_text(encoding="utf-8")]
    for path in [*(ROOT / "helpers").rglob("*.py"), ROOT / "docs" / "check_site.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        getattr(part, "value", "") if isinstance(part, ast.Constant) else "..." for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_troubleshooting_quotes_what_is_printed():
    """A message that was reworded would no longer be found on the page."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(headings) == len(re.findall("^### ", page, re.MULTILINE))
    texts = printed()
    for heading in headings:
        pieces = [re.escape(piece.strip()) for piece in heading.split("...") if piece.strip()]
        wanted = re.compile(r".*?".join(pieces), re.DOTALL)
        assert any(wanted.search(text) for text in texts), heading


def test_without_a_browser_it_is_not_run():
    """Never a pass, and never a traceback."""
    script = [sys.executable, str(ROOT / "docs" / "check_site.py")]
    done = subprocess.run(script, env={"PATH": "", "CHROMIUM": "/nowhere/chromium"}, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout.startswith("NOT RUN: no chromium or chrome was found")
    assert not done.stderr
