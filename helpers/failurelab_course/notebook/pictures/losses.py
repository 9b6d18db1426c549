"""A map of known gradients: libraries from top to bottom, groups of cases from left to right, in words and colours."""

import json
import math
import pathlib
from typing import Any

# Status of a case, the word for it, and the colour of a cell whose worst case has it: light, yellow, dark, so that they
# are told apart without colour vision, and by their words.
STATES = {
    "BROKEN": ("break", "#222222"),
    "differs": ("differ", "#b8400f"),
    "another objective": ("other", "#f2d272"),
    "agrees": ("agree", "#dcebf6"),
}
COLUMNS = ("clip", "objectives", "kl", "engine", "cut", "masks", "logits", "advantages", "wiring")  # as in the evidence


def read_newest(path: pathlib.Path) -> dict[str, list[dict[str, int]]]:
    """Return of the newest release of each library how many cases of each group have each status.

    Args:
        path: of evidence/cpu/known_gradients.json.
    """
    newest: dict[str, tuple[str, dict[str, Any]]] = {}
    for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
        kind, _, case = record["case"].partition(": ")
        if kind == "library" and not record["figures"]["reason"]:
            library, release = case.split()
            newest[library] = (release, record["figures"])
    return {
        f"{library}\n{release}": [
            {status: figures[status][place] for status in STATES if figures[status][place]}
            for place in range(len(COLUMNS))
        ]
        for library, (release, figures) in sorted(newest.items())
    }


def draw_losses(libraries: dict[str, list[dict[str, int]]]) -> Any:
    """Return a figure of what `read_newest` returns."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.48 * len(libraries) + 1.1), dpi=140)
    for row, groups in enumerate(libraries.values()):
        for column, counts in enumerate(groups):
            worst = next((status for status in STATES if status in counts), None)
            ground = STATES[worst][1] if worst else "white"
            ink = "white" if worst in ("differs", "BROKEN") else "#222222"
            axes.add_patch(pyplot.Rectangle((column, row), 1, 1, facecolor=ground, edgecolor="white", lw=2))
            weight = "bold" if worst in ("differs", "BROKEN") else "normal"
            text = "\n".join(_say(counts[status], STATES[status][0]) for status in STATES if status in counts) or "–"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8.5, color=ink, weight=weight,
                      linespacing=1.15)  # fmt: skip
    axes.set(xlim=(0, len(COLUMNS)), ylim=(len(libraries), 0))
    axes.set_xticks([place + 0.5 for place in range(len(COLUMNS))], COLUMNS, fontsize=10)
    labels = [library.replace("\n", "  ") for library in libraries]
    axes.set_yticks([place + 0.5 for place in range(len(libraries))], labels, fontsize=10)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    words = {"differs": "not what it declares", "another objective": "another objective, documented",
             "agrees": "the known gradient"}  # fmt: skip
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=STATES[status][1]) for status in words]
    names = [f"{STATES[status][0]}: {said}" for status, said in words.items()]
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=10)
    return figure


def _say(count: int, word: str) -> str:
    """Return `2 differ`, `1 differs`, `1 other`."""
    return f"{count} {word}{'s' * (count == 1 and word != 'other')}"


def token_gradients(panels: dict[str, Any], tokens: Any, alt: str) -> None:
    """Show gradients by token, one panel a convention: each token's beside that of the first panel.

    Args:
        panels: gradients, (rows, tokens), by the name of the convention; the first is what the others are divided by.
        tokens: 1 for each token that is trained on, (rows, tokens).
        alt: what the picture shows, for those who do not see it.
    """
    from matplotlib import colormaps, pyplot

    from failurelab_course.notebook import display

    first, (rows, width) = next(iter(panels.values())), tokens.shape
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(9, 0.42 * rows + 0.7), sharey=True)
    for (name, gradient), axes in zip(panels.items(), all_axes):
        for row, place in ((row, place) for row in range(rows) for place in range(width) if tokens[row, place]):
            is_clipped = first[row, place] == 0
            times = 1.0 if is_clipped else float(gradient[row, place] / first[row, place])
            shade = 0.5 + 0.2 * max(-1.0, min(1.0, math.log2(times) if times > 0 else -1.0))  # half to twice as much
            ground = "#e3e3e3" if is_clipped else colormaps["PuOr_r"](shade)
            axes.add_patch(pyplot.Rectangle((place, row), 1, 1, facecolor=ground, edgecolor="white"))
            said = "0" if is_clipped else f"{times:.2g}"
            axes.text(place + 0.5, row + 0.5, said, ha="center", va="center", fontsize=7.5, color="#222222")
        axes.set(xlim=(0, width), ylim=(rows, 0), xticks=[], yticks=[row + 0.5 for row in range(rows)])
        axes.set_yticklabels([f"row {row}" for row in range(rows)])
        axes.set_title(name, fontsize=9)
        axes.tick_params(length=0)
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
    display.show(figure, alt)
