"""Tables of README.md and of docs/, put in place from the files under evidence/, and README's pictures: `make tables`.

A block between `<!-- table: NAME -->` and `<!-- end table -->` is what a benchmark's function `table_NAME` makes of
evidence/cpu/*.json (`benchmarks/frames.py`); `figures` is the table of figures. One picture shows learning
curves: the median over seeds, and all seeds as a band. The other maps what each library's loss does.
"""

import hashlib
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

from failurelab.failures import figures
from failurelab_course.notebook.pictures import losses

ROOT = pathlib.Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "evidence"
MARK = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end table -->", re.DOTALL)
# README's first picture: runs of rollout_curves, and what each line is called.
LINES = {"checkpointing off": "healthy", "broken": "broken, without an error"}


class UnknownTable(Exception):
    """A page asks for a table that there is not."""


def find_pages() -> list[pathlib.Path]:
    """Return the pages that have a table."""
    pages = [ROOT / "README.md", ROOT / "labs" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if MARK.search(page.read_text(encoding="utf-8"))]


def table_figures() -> str:
    """Return a line for each figure, with its unit where the text does not say it."""
    lines = []
    for figure in figures.table().values():
        band = f" (`{str(figure.healthy).removeprefix(figure.name).strip()}`)" if figure.healthy else ""
        is_plain = figure.unit in ("text", "yes or no") or figure.unit.split()[0] in figure.what
        lines.append(f"- `{figure.name}`{'' if is_plain else f' ({figure.unit})'}: {figure.what}{band}\n")
    return "".join(lines)


def make_tables() -> dict[str, str]:
    """Return the text of each table, by name; the benchmarks are imported for it: ten seconds."""
    sys.path.append(str(ROOT / "benchmarks"))
    import frames

    files = sorted((EVIDENCE / "cpu").glob("*.json"))
    return {"figures": table_figures()} | {
        name: text for path in files for name, text in frames.make_tables(path).items()
    }


def update_tables(text: str, tables: dict[str, str]) -> str:
    """Return a page's text with each of its tables as it is now.

    Raises:
        UnknownTable: it asks for one that there is not.
    """

    def make_block(match: re.Match) -> str:
        name = match.group(1)
        if name not in tables:
            raise UnknownTable(f"unknown table {name!r}: the tables are {', '.join(tables)}")
        return f"<!-- table: {name} -->\n{tables[name]}<!-- end table -->"

    return MARK.sub(make_block, text)


def select_lines() -> dict[str, list[dict]]:
    """Return the figures of each line of the picture, an entry for each seed."""
    records = json.loads((EVIDENCE / "cpu" / "rollout_curves.json").read_text(encoding="utf-8"))["records"]
    runs = {label: [each["figures"] for each in records if each["case"] == f"curve: {label}"] for label in LINES}
    return {label: [{name: run[name] for name in ("steps", "rewards")} for run in each] for label, each in runs.items()}


def draw_lines(lines: dict[str, list[dict]]) -> Any:
    """Return a figure of `select_lines`."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.2))
    for label, runs in lines.items():
        steps, rewards = runs[0]["steps"], list(zip(*(run["rewards"] for run in runs)))  # seeds of each step
        wide = {} if axes.lines else {"linewidth": 7, "alpha": 0.35}
        (line,) = axes.plot(steps, [statistics.median(seeds) for seeds in rewards], label=LINES[label], **wide)
        band = [min(seeds) for seeds in rewards], [max(seeds) for seeds in rewards]
        axes.fill_between(steps, *band, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, 0.9))
    axes.set_title("One GRPO script, run twice with one option changed")
    axes.legend(loc="upper left")
    return figure


def select_losses() -> dict[str, list[dict[str, int]]]:
    """Return what the map of losses shows."""
    return losses.read_newest(EVIDENCE / "cpu" / "known_gradients.json")


# Of each picture: what it shows, and the function that draws it.
PICTURES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any], Any]]] = {
    "silent.png": (select_lines, draw_lines),
    "losses.png": (select_losses, losses.draw_losses),
}


def make_digest(picture: str) -> str:
    """Return a digest of what a picture shows; the file carries it, so that a stale one is found."""
    return hashlib.sha256(json.dumps(PICTURES[picture][0]()).encode()).hexdigest()


def draw_pictures(folder: pathlib.Path) -> None:
    """Draw the pictures into a folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from failurelab_course.notebook import display

    with pyplot.style.context(display.STYLE):
        for name, (select, draw) in PICTURES.items():
            figure = draw(select())
            figure.savefig(folder / name, dpi="figure", metadata={"Software": None, "Description": make_digest(name)})
            pyplot.close(figure)


def main() -> None:
    """Put the tables into all pages, and draw the pictures."""
    tables = make_tables()
    for page in find_pages():
        old = page.read_text(encoding="utf-8")
        new = update_tables(old, tables)
        page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: tables {'unchanged' if new == old else 'written'}")
    draw_pictures(EVIDENCE)
    print(f"evidence: {', '.join(PICTURES)} drawn")


if __name__ == "__main__":
    try:
        main()
    except UnknownTable as error:
        raise SystemExit(f"ERROR {error}") from None
