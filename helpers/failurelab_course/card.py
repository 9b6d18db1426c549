"""The card to print: the loop of GRPO, each silent failure on its arrow, the figure to look at, and its healthy band.

It is one page, A4 across, as SVG, made from the registry and card.toml: `failurelab card` writes it in English and in
Chinese. Its letters are text, so that a browser prints it with fonts of its own.
"""

import dataclasses
import io
import pathlib
import warnings
from collections.abc import Iterable

from failurelab import failures
from failurelab.errors import FailureLabError
from failurelab.failures import figures
from failurelab.failures.predicates import Predicate
from failurelab.failures.toml_table import Table
from failurelab_course.notebook.pictures import loop

HERE = pathlib.Path(__file__).resolve().parent
PAGES = {"en": "evidence/card.svg", "zh": "evidence/card.zh.svg"}
_A4 = (11.69, 8.27)  # inches, across
_BANDS = {"==": "", "<=": "most", ">=": "least", ">": "above"}
_WORDS = {
    "en": {
        "title": "The reward is flat, and nothing is raised: where to look",
        "below": "Ask from the left: while an earlier arrow is broken, the figures of a later one say nothing.\n"
        "NOT CHECKED is no pass: ask on prompts of different lengths, and with rewards that differ in a group.",
        "arrow": "arrow",
        "failure": "failure",
        "look": "figure to look at",
        "band": "healthy",
        "most": "at most {}",
        "least": "at least {}",
        "above": "above {}",
    },
    "zh": {
        "title": "奖励不涨，也不报错：该看哪里",
        "below": "从左边的箭头查起：前面的数字不对，后面的就说明不了什么。\nNOT CHECKED 不等于通过："
        "prompt 要长短不一，组内奖励要有差别。",
        "arrow": "箭头",
        "failure": "故障",
        "look": "要看的数字",
        "band": "健康范围",
        "most": "不大于 {}",
        "least": "不小于 {}",
        "above": "大于 {}",
    },
}


class CardError(FailureLabError):
    """card.toml does not fit the registry; the message names the failure."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One silent failure on the card, in one language; `arrow` is one of `loop.ARROWS`."""

    id: str
    arrow: str
    short: str
    look: str
    healthy: str


def read_lines(language: str, path: pathlib.Path = HERE / "card.toml") -> list[Entry]:
    """Return the lines of the card in the order of the arrows.

    Args:
        language: `en` or `zh`.
        path: of another card.toml.

    Raises:
        CardError: a failure of the registry has no place in the file, or a line of the file no failure or no arrow.
    """
    raw = Table.read(path, CardError)
    loud, lines = set(raw.texts("loud")), []
    suffix = "" if language == "en" else f"_{language}"
    for failure in failures.all():
        id = failure.id
        if id in loud:
            loud.remove(id)
            continue
        if id not in raw.rest:
            raise CardError(f"{path.name}: {id} has no line, and is not among the loud. Next: give it an arrow there")
        line = Table(f"{path.name}: {id}", raw.take(id, dict), CardError)
        arrow = line.text("arrow")
        if arrow not in loop.ARROWS:
            raise CardError(f"{path.name}: {id}: {arrow!r} is no arrow of the loop: {', '.join(loop.ARROWS)}")
        words = line.text(f"healthy{suffix}", "") or describe_band(line.text("figure"), language)
        lines.append(Entry(id, arrow, line.text(f"short{suffix}"), line.text(f"look{suffix}"), words))
    if unknown := [*raw.rest, *sorted(loud)]:
        raise CardError(f"{path.name}: {', '.join(unknown)} is no failure of the registry")
    return sorted(lines, key=lambda line: list(loop.ARROWS).index(line.arrow))


def describe_band(name: str, language: str) -> str:
    """Return which values of a figure are healthy, in words, by the table of figures.

    Raises:
        CardError: the table has no such figure, or no band of numbers for it.
    """
    figure = figures.table().get(name)
    healthy = figure and figure.healthy
    if not isinstance(healthy, Predicate) or isinstance(healthy.value, str | bool) or healthy.op not in _BANDS:
        raise CardError(f"card.toml: {name} has no band of numbers. Next: say in `healthy` what is healthy")
    bound = f"{healthy.value:g}"
    return bound if healthy.op == "==" else _WORDS[language][_BANDS[healthy.op]].format(bound)


def draw(language: str = "en") -> str:
    """Return the card as SVG."""
    import matplotlib
    from matplotlib import pyplot

    lines, words = read_lines(language), _WORDS[language]
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "card"}):
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's browser has the Chinese ones
        figure = pyplot.figure(figsize=_A4, facecolor="white", layout="none")
        figure.text(0.04, 0.95, words["title"], fontsize=17, fontweight="bold", va="top")
        top = figure.add_axes((0.04, 0.615, 0.92, 0.29))
        loop.draw(top, {}, _ids_by_arrow(lines))
        _draw_table(figure, lines, words)
        figure.text(0.04, 0.035, words["below"], fontsize=8.5, va="bottom")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"


def _ids_by_arrow(lines: Iterable[Entry]) -> dict[str, str]:
    ids: dict[str, list[str]] = {}
    for line in lines:
        ids.setdefault(line.arrow, []).append(line.id)
    return {arrow: " ".join(names) for arrow, names in ids.items()}


def _draw_table(figure, lines: list[Entry], words: dict[str, str]) -> None:
    columns = (0.04, 0.14, 0.19, 0.49, 0.83)
    top, height = 0.595, 0.0275
    for place, name in zip(columns, (words["arrow"], "", words["failure"], words["look"], words["band"])):
        figure.text(place, top, name, fontsize=9.5, fontweight="bold", va="center")
    before = ""
    for row, line in enumerate(lines, 1):
        y = top - row * height
        if line.arrow != before:
            figure.add_artist(_rule(y + height / 2))
        texts = (line.arrow if line.arrow != before else "", line.id, line.short, line.look, line.healthy)
        for place, text in zip(columns, texts):
            figure.text(place, y, text, fontsize=9.5, va="center")
        before = line.arrow


def _rule(y: float):
    from matplotlib.lines import Line2D

    return Line2D([0.04, 0.96], [y, y], color="#999999", linewidth=0.6)


def write(root: pathlib.Path) -> list[pathlib.Path]:
    """Write the card in all languages into the course; return the files."""
    written = []
    for language, name in PAGES.items():
        path = root / name
        path.write_text(draw(language), encoding="utf-8")
        written.append(path)
    return written
