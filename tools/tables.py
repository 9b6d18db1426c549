"""The tables and pictures of README.md and of pages in docs/, made from the files under evidence/: `make tables`.

A block between `<!-- table: NAME -->` and `<!-- end table -->` is the table that the public function of that name in
`evidence_tables` makes, or one of `timetables`. A block between `<!-- preflight answer: begin -->` and
`<!-- preflight answer: end -->` is what preflight has answered (`benchmarks/preflight_answer.py`). The pictures are
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
} | {"timetables": timetables.timetables, "parts": timetables.parts}
# Of each picture: the benchmark, the pattern of its cases, a line for each label, what makes a run's label; its look.
PICTURES = {
    "silent.png": {
        "runs": ("rollout_curves", "curve: (?P<name>.+)", ("checkpointing off", "broken"), "name"),
        "names": ("healthy", "broken, without an error"),
        "title": "One GRPO script, run twice with one option changed",
        "height": 3.2,
        "top": 0.9,
        "legend": {"loc": "upper left"},
    },
    "rollouts.png": {
        "runs": ("rollout_curves", "curve: (?P<name>.+)", evidence_tables.CURVES, "name"),
        "title": "The same run, broken twice: one repair alone does not heal",
        "height": 4,
        "top": 0.9,
        "legend": {"loc": "upper left", "ncol": 2},
    },
    "misalignment.png": {
        "runs": ("misalignment", "misalignment: (?P<name>.+)", evidence_tables.MISALIGNED, "era", "name"),
        "title": "One upgrade, no error: what the trainer scores are other tokens",
        "height": 3.6,
        "top": 1,
        "legend": {"loc": "center right"},
    },
}


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


def select_lines(name: str) -> dict[str, pandas.DataFrame]:
    """Return the runs of each line of a picture, by its label."""
    benchmark, pattern, *labels = PICTURES[name]["runs"]
    return group_runs(read_runs(benchmark, pattern), *labels)


def make_digest(name: str) -> str:
    """Return a digest of what a picture shows; the file carries it, so that a stale one is found."""
    shown = {
        label: [[run["steps"], run["rewards"]] for run in runs["figures"]] for label, runs in select_lines(name).items()
    }
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw_pictures(folder: pathlib.Path) -> None:
    """Draw all pictures into files of a folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from failurelab_course.notebook import display

    for name, style in PICTURES.items():
        with pyplot.style.context(display.STYLE):
            figure, axes = pyplot.subplots(figsize=(7.5, style["height"]))
            lines = select_lines(name)
            for label, runs in zip(style.get("names", lines), lines.values()):
                rewards, steps = pandas.DataFrame(list(runs["rewards"])), runs["steps"].iloc[0]  # (seeds, steps)
                wide = {} if axes.lines else {"linewidth": 7, "alpha": 0.35}
                (line,) = axes.plot(steps, rewards.median(), label=label, **wide)
                band = {"color": line.get_color(), "alpha": 0.12, "linewidth": 0}
                axes.fill_between(steps, rewards.min(), rewards.max(), **band)
            axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, style["top"]), title=style["title"])
            axes.legend(**style["legend"])
            figure.savefig(folder / name, metadata={"Software": None, "Description": make_digest(name)})
            pyplot.close(figure)


def main() -> None:
    """Write the tables of all pages, and draw the pictures."""
    for page in find_pages():
        old = page.read_text(encoding="utf-8")
        new = update_tables(old)
        page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: tables {'unchanged' if new == old else 'written'}")
    draw_pictures(EVIDENCE)
    print(f"{', '.join(f'evidence/{name}' for name in PICTURES)}: drawn")


if __name__ == "__main__":
    try:
        main()
    except EvidenceError as error:
        raise SystemExit(f"ERROR {error}") from None
