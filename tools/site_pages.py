"""Lay out the site's pages for Sphinx: python tools/site_pages.py FOLDER

Each page is the committed file, or is made from one: notebooks with their stored outputs, labs from lab.toml and the
task at the head of the broken script. Links from file to file become links from page to page. Standard library alone.
"""

import ast
import json
import os
import pathlib
import re
import shutil
import sys

import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The table of contents: the heading, and the pages as they are called in the site.
CONTENTS = {
    "Begin": [
        "path",
        "prerequisites",
        "hosted",
        "preflight",
        "agents",
        "diagnose",
        "symptoms",
        "repairs",
        "textbook",
        "losses",
    ],
    "Notebooks": ["notebooks", "notebooks/*"],
    "Labs": ["labs/index"],
    "Look up": [
        *("measured", "figures", "atlas", "glossary", "troubleshooting", "gpu", "several_nodes"),
        *("ci", "offline", "class_server"),
    ],
    "Teach": ["teaching"],
    "中文": ["zh/README", "zh/preflight", "zh/symptoms", "zh/atlas", "zh/advice"],
    "About": ["architecture", "release", "upstream"],
}
LINK = re.compile(r"(!?\[(?:[^\[\]`]|`[^`]*`)*\])\(([^()\s]+)\)")
OPENING = re.compile(
    r"Reads in (?P<reads>\d+) minutes, runs in (?P<runs>.+?) on (?P<hardware>[^.]+)\. "
    r"Library stacks: (?P<eras>.+?)\.[ *]"
)
FENCE = re.compile(r"^\s*(```|~~~)")


def notebooks() -> list[pathlib.Path]:
    """Return the course's notebooks in their order."""
    return sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def labs() -> list[pathlib.Path]:
    """Return the folders of the labs in their order."""
    return sorted(path.parent for path in (ROOT / "labs").glob("[0-9][0-9]_*/start.py"))


def opening(notebook: pathlib.Path) -> dict[str, str]:
    """Return what the first cell of a notebook says: `title`, and of its last line `reads`, `runs`, `hardware`, `eras`.

    The notebooks' lint holds the form of that line.
    """
    lines = "".join(json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"]).splitlines()
    return {"title": lines[0].lstrip("# "), **OPENING.search(lines[-1]).groupdict()}


def page_of(path: str) -> str | None:
    """Return the page that shows a file of the repository, as a path in the site; None where none does."""
    parts = path.split("/")
    if parts[0] == "labs" and len(parts) > 1 and (ROOT / "labs" / parts[1] / "lab.toml").exists():
        return f"labs/{parts[1]}.md"
    if path == "README.md":
        return "index.md"
    if path == "notebooks":
        return "notebooks.md"
    if path in ("labs", "labs/README.md"):
        return "labs/index.md"
    if parts[0] == "docs" and path.endswith(".md"):
        return "/".join(parts[1:])
    if path.endswith((".ipynb", ".png", ".svg")):
        return path
    return None


def relink(text: str, file: str, page: str) -> str:
    """Turn the links of a repository's file into those of its page.

    Args:
        text: Markdown; links in fenced blocks are left alone.
        file: where it is in the repository, such as docs/path.md.
        page: where it will be in the site, such as path.md.
    """
    # Beside the repository on the web (its name is set by the workflow), a link to a file without a page leads there.
    name = os.environ.get("GITHUB_REPOSITORY")
    web = f"https://github.com/{name}/blob/main/" if name else None

    def changed(match: re.Match) -> str:
        label, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(file), path))
        destination = page_of(there)
        anchor = anchor and f"#{anchor}"
        if destination is None:
            return f"{label}({web}{there}{anchor})" if web else label[1:-1]
        link = os.path.relpath(destination, os.path.dirname(page) or ".")
        return f"{label}({link}{anchor})"

    lines, fenced = [], False
    for line in text.splitlines():
        fenced ^= bool(FENCE.match(line))
        lines.append(line if fenced else LINK.sub(changed, line))
    return "\n".join(lines) + "\n"


def stage(folder: pathlib.Path) -> None:
    """Write all pages into an empty folder."""
    front = relink((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", "index.md")
    pages = {"index.md": front + _contents(), "notebooks.md": _list_of_notebooks(), "labs/index.md": _list_of_labs()}
    for source in ROOT.glob("docs/**/*.md"):
        page = str(source.relative_to(ROOT / "docs"))
        text = relink(source.read_text(encoding="utf-8"), f"docs/{page}", page)
        # GitHub wants an element as the target of a link, Sphinx a label that no other page has.
        mark = "".join(f"{part}-" for part in page.split("/")[:-1])
        text = re.sub(r'^<a id="([\w-]+)"></a>$', rf"({mark}\1)=", text, flags=re.MULTILINE)
        text = (
            re.sub(r"\]\(([\w-]+\.md)?#", rf"](\1#{mark}", text) if mark else text
        )  # pages beside it have such labels too
        pages[page] = text
    pages |= {f"notebooks/{path.name}": _notebook(path) for path in notebooks()}
    pages |= {f"labs/{path.name}.md": _lab(path) for path in labs()}
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "evidence", folder / "evidence", ignore=shutil.ignore_patterns("*.json*", "*.md"))


def literal_texts() -> dict[str, list[str]]:
    """Return the registry's literal error texts by the notebook that explains them."""
    texts: dict[str, list[str]] = {}
    for path in sorted((ROOT / "helpers" / "failurelab" / "failures").glob("F*.toml")):
        failure = tomllib.loads(path.read_text(encoding="utf-8"))
        if "notebook" in failure:
            texts.setdefault(failure["notebook"], []).extend(failure.get("symptoms", []))
    return texts


def _contents() -> str:
    text = ""
    for heading, pages in CONTENTS.items():
        numbered = [f"{path.name[:2]} {opening(path)['title']} <notebooks/{path.stem}>" for path in notebooks()]
        made = {"notebooks/*": numbered}
        listed = [line for page in pages for line in made.get(page, [page])]
        text += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {heading}", "", *listed, "```", ""])
    return text


def _notebook(path: pathlib.Path) -> str:
    """Return a notebook as it is committed, with links to pages, and alt texts where the renderer reads them."""
    book = json.loads(path.read_text(encoding="utf-8"))
    name = f"notebooks/{path.name}"
    # In its own lexer (conf.py) a cell that begins with %%era is Python as well.
    book["metadata"]["language_info"]["pygments_lexer"] = "cell"
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = relink("".join(cell["source"]), name, name)
        for output in cell.get("outputs", []):
            for alt in output.get("metadata", {}).get("image/png", {}).values():
                cell["metadata"]["mystnb"] = {"image": {"alt": alt}}
        cell["metadata"].setdefault("tags", []).extend(_fold(cell))
    # A search for an error finds the page only if the whole text stands in it.
    texts = [f"- `` {text} ``" for text in literal_texts().get(path.stem, [])]
    if texts:
        book["cells"][0]["source"] += "\n".join(["", "**Error texts explained here:**", "", *texts, ""])
    return json.dumps(book)


def _fold(cell: dict) -> list[str]:
    """Return the tags by which the page folds what JupyterLab folds; a cell without outputs is left out there."""
    folded = cell["metadata"].get("jupyter", {})
    if folded.get("outputs_hidden"):
        return ["hide-cell"]
    if folded.get("source_hidden"):
        return ["remove-input" if cell.get("outputs") else "remove-cell"]
    return []


def _list_of_notebooks() -> str:
    lines = [
        "# The notebooks",
        "",
        "The time to run was measured on two CPU cores, warm; the minutes to read are estimated. An era is a library",
        "stack that a notebook runs in.",
        "",
        "| notebook | minutes to read | to run | eras |",
        "| --- | --- | --- | --- |",
    ]
    for notebook in notebooks():
        rows = opening(notebook)
        link = f"[{notebook.name[:2]} {rows['title']}](notebooks/{notebook.name})"
        lines.append(f"| {link} | {rows['reads']} | {rows['runs']} | {rows['eras']} |")
    return "\n".join(lines) + "\n"


def _list_of_labs() -> str:
    readme = relink((ROOT / "labs" / "README.md").read_text(encoding="utf-8"), "labs/README.md", "labs/index.md")
    head, _, rest = readme.partition("\n## ")
    lines = ["", "| lab | given | minutes | era |", "| --- | --- | --- | --- |"]
    for lab in labs():
        card = tomllib.loads((lab / "lab.toml").read_text(encoding="utf-8"))
        link = f"[{lab.name[:2]} {card['title']}]({lab.name}.md)"
        lines.append(f"| {link} | {card.get('given', '-')} | {card['minutes']} | {card['era']} |")
    listed = "\n".join(lines)
    pages = "\n".join(lab.name for lab in labs())
    contents = f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    return f"{head}\n## The labs\n{listed}\n\n## {rest}{contents}" if rest else f"{head}\n{listed}\n{contents}"


def _lab(folder: pathlib.Path) -> str:
    """Return a lab's page: its task and the broken script. Hints and solution stay with the commands."""
    card = tomllib.loads((folder / "lab.toml").read_text(encoding="utf-8"))
    script = (folder / "start.py").read_text(encoding="utf-8")
    module = ast.parse(script)
    _, _, task = (ast.get_docstring(module) or "").partition("\n\n")
    after = "\n".join(script.splitlines()[module.body[0].end_lineno :]).strip("\n")
    number = folder.name[:2]
    return f"""# Lab {number}: {card["title"]}

| | |
| --- | --- |
| **Difficulty** | {card["difficulty"]} |
| **Given** | {card.get("given", "-")} |
| **Minutes** | {card["minutes"]} |
| **Era** | {card["era"]} |

{task}

```
.venv/bin/failurelab lab check {number}    # runs your labs/{folder.name}/train.py, and says what is still wrong
.venv/bin/failurelab lab hint {number}     # three hints, each says more than the one before
```

## The script

```python
{after}
```
"""


if __name__ == "__main__":
    stage(pathlib.Path(sys.argv[1]))
