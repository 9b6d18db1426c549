"""The tables of README.md and of docs/, and README's picture, made from the files under evidence/: `make tables`.

A block between `<!-- table: NAME -->` and `<!-- end table -->` is the table that the public function of that name in
`evidence_tables` makes, or one of `timetables`. A block between `<!-- preflight answer: begin -->` and
`<!-- preflight answer: end -->` is what preflight has answered (`benchmarks/preflight_answer.py`). The picture shows
learning curves: the median over seeds, and all seeds as a band.
"""

import hashlib
import inspect
import json
import pathlib
import re
from collections.abc import Callable

import evidence_tables
import pandas
import timetables
from evidence import EVIDENCE, ROOT, EvidenceError, group_runs, read_runs

MARK = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end table -->", re.DOTALL)
ANSWER = re.compile(r"<!-- preflight answer: begin -->\n.*?<!-- preflight answer: end -->", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {
    name.replace("_", "-"): function
    for name, function in vars(evidence_tables).items()
    if inspect.isfunction(function) and function.__module__ == evidence_tables.__name__ and not name.startswith("_")
} | {"timetables": timetables.timetables}
# README's picture: runs of rollout_curves, and what each line is called.
PICTURE = "silent.png"
LINES = {"checkpointing off": "healthy", "broken": "broken, without an error"}


def find_pages() -> list[pathlib.Path]:
    """Return the pages that have a table."""
    pages = [ROOT / "README.md", ROOT / "labs" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    return [page for page, text in texts.items() if MARK.search(text) or ANSWER.search(text)]


def update_tables(text: str) -> str:
    """Return a page's text with each of its tables, and preflight's answer, made anew.

    Raises:
        EvidenceError: it asks for a table that there is not.
    """

    def make_block(match: re.Match) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise EvidenceError(f"unknown table {name!r}: the tables are {', '.join(TABLES)}")
        return f"<!-- table: {name} -->\n{TABLES[name]()}\n<!-- end table -->"

    return ANSWER.sub(lambda _: make_answer(), MARK.sub(make_block, text))


def make_answer() -> str:
    """Return preflight's answer as a terminal shows it, between its marks.

    The first accusation is whole, of what follows the first line; the rest is left out, but for the last line.
    """
    ((answer,),) = read_runs("preflight_answer")[["answer"]].to_numpy()
    told = [number for number, line in enumerate(answer) if line.startswith(("NAMED", "SUSPECTED", "HELD"))]
    shown = answer[: told[1] + 1]
    rest = f"[... {len(answer) - len(shown) - 1} lines: its figure and repair, what held, what was not checked ...]"
    lines = ["```text", "$ failurelab preflight train.py", *shown, rest, answer[-1], "```"]
    return "\n".join(["<!-- preflight answer: begin -->", *lines, "<!-- preflight answer: end -->"])


def select_lines() -> dict[str, pandas.DataFrame]:
    """Return the runs of each line of the picture."""
    return group_runs(read_runs("rollout_curves", "curve: (?P<name>.+)"), LINES, "name")


def make_digest() -> str:
    """Return a digest of what the picture shows; the file carries it, so that a stale one is found."""
    lines = select_lines().items()
    shown = {label: [[run["steps"], run["rewards"]] for run in runs["figures"]] for label, runs in lines}
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw_picture(path: pathlib.Path) -> None:
    """Draw the picture into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from failurelab_course.notebook import display

    with pyplot.style.context(display.STYLE):
        figure, axes = pyplot.subplots(figsize=(7.5, 3.2))
        for label, runs in select_lines().items():
            rewards, steps = pandas.DataFrame(list(runs["rewards"])), runs["steps"].iloc[0]  # (seeds, steps)
            wide = {} if axes.lines else {"linewidth": 7, "alpha": 0.35}
            (line,) = axes.plot(steps, rewards.median(), label=LINES[label], **wide)
            axes.fill_between(steps, rewards.min(), rewards.max(), color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, 0.9))
        axes.set_title("One GRPO script, run twice with one option changed")
        axes.legend(loc="upper left")
        figure.savefig(path, metadata={"Software": None, "Description": make_digest()})
        pyplot.close(figure)


def main() -> None:
    """Write the tables of all pages, and draw the picture."""
    for page in find_pages():
        old = page.read_text(encoding="utf-8")
        new = update_tables(old)
        page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: tables {'unchanged' if new == old else 'written'}")
    draw_picture(EVIDENCE / PICTURE)
    print(f"evidence/{PICTURE}: drawn")


if __name__ == "__main__":
    try:
        main()
    except EvidenceError as error:
        raise SystemExit(f"ERROR {error}") from None
