"""The ledger's tokens: each as it was drawn, as the loss scored it, and with the weight that the loss gave it."""

from collections.abc import Mapping
from typing import Any

from failurelab.textbook import balance
from failurelab_course.notebook import display

READ, APART = "read", "apart"  # by the model and not scored; scored far from what drew it
GROUNDS = {balance.DRAWN: "#cfe3f1", balance.MOVED: "#fbdcc4", APART: "#fbdcc4", READ: "#ffffff"}  # else: not drawn
FAR = 0.1  # nats: above what bfloat16 rounds
WRONG = "#a3260d"


def draw_ledger(ledgers: Mapping[str, Any], alt: str, most: int = 2, width: int = 15) -> None:
    """Show completions of each run's last step, those of most turns first, in three lines: drawn, scored, weighted.

    Below a token stands its log-probability: where it was drawn that of what drew it, where it is scored that of the
    policy then. The weight is the loss's derivative by it, in thousandths.

    Args:
        ledgers: `textbook.ledger`, of runs that have ended, each with a title.
        alt: what the picture shows, for those who do not see it.
        most: completions that are shown.
        width: tokens of each that are shown.
    """
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(most, len(ledgers), figsize=(9, 1.5 * most), squeeze=False)
    for column, (title, ledger) in enumerate(ledgers.items()):
        panels[0, column].set_title(title, fontsize=10)
        tables = ledger.tables
        last = tables.trained[-1].step
        rows = {row.ids: (row, own) for row, own in zip(tables.trained, tables.states) if row.step == last}
        shown = sorted(rows.values(), key=lambda pair: -len({id(draw) for _, draw in pair[1]}))
        for axes, pair in zip(panels[:, column], shown):
            for (line, place), (token, value, state) in read_cells(*pair).items():
                if place < width:
                    _draw_cell(axes, place, line, "" if token is None else _name(ledger, token), value, state)
        for axes in panels[:, column]:
            for line, name in enumerate(("drawn", "scored", "weighted")):
                axes.text(-0.2, -line, name, ha="right", va="center", fontsize=9)
            axes.set(xlim=(-width / 8, width), ylim=(-2.6, 0.5))
            axes.axis("off")
    display.show(figure, alt)


def read_cells(row: Any, states: Any) -> dict[tuple[int, int], tuple[int | None, float | None, str]]:
    """Return what stands in each line at each place of the completion: a token, a number, and the token's state."""
    draws = {draw.number: draw for _, draw in states if draw is not None}.values()
    first = min((len(draw.context) for draw in draws), default=row.tokens[0].place)
    cells: dict[tuple[int, int], tuple[int | None, float | None, str]] = {}
    for draw in draws:
        for at, (token, logp) in enumerate(zip(draw.tokens, draw.logps or draw.policy_logps), len(draw.context)):
            cells[0, at - first] = (token, logp, balance.DRAWN)
    cells |= {(1, at): (token, None, READ) for at, token in enumerate(row.ids[first:])}
    for each, (state, _) in zip(row.tokens, states):
        at = each.place - first
        if state == balance.DRAWN and abs(cells[0, at][1] - each.logp) > FAR:  # type: ignore[operator]
            state = APART
        cells[1, at] = (each.token, each.logp, state)
        cells[2, at] = (None, 1000 * each.weight, state)
    return cells


def _draw_cell(axes: Any, place: int, line: int, name: str, value: float | None, state: str) -> None:
    from matplotlib.patches import Rectangle

    own = state in GROUNDS
    frame = {"facecolor": GROUNDS.get(state, "#f3b8b0"), "edgecolor": "#333333", "linestyle": "-" if own else "--"}
    axes.add_patch(Rectangle((place, -line - 0.4), 0.94, 0.84, **frame))
    text = {"ha": "center", "va": "center", "color": "#222222" if own else WRONG}
    axes.text(place + 0.47, -line + 0.17 * (value is not None), name, fontsize=9, **text)
    if value is not None:
        axes.text(place + 0.47, -line - 0.2 * bool(name), f"{value:z.2f}", fontsize=7 if name else 8, **text)


def _name(ledger: Any, token: int) -> str:
    if token in ledger.ends():
        return "end"
    return ledger.trainer.processing_class.decode([token]).replace(" ", "\u2423")
