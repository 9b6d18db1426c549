"""A notebook's quiet first cell, its figures, and its verdict tables.

A story is lost among download bars, upgrade advice and warnings that belong to another failure, and two runs of it
cannot be compared where they draw other random numbers. `setup` settles all that in one line. What `show` and
`verdict_table` put out is the same on every machine that measures the same, so that nbval can compare it.
"""

import html
import io
import os
import pathlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

from . import eras as stacks
from . import live

STYLE = pathlib.Path(__file__).with_name("failurelab.mplstyle")
COLUMNS = ("measured", "found", "healthy", "red flag", "verdict")
# A mark, a word and a colour, so that no one of them is needed. Each brings its own ground: legible in both themes.
_MARKS = {True: ("✓ healthy", "#d5f2de", "#0b3d1c"), False: ("✗ red flag", "#fbdcd7", "#5c1209")}
_NOT_RUN = ("– not run", "#e3e3e3", "#303030")


class NotRun(Exception):
    """The notebook's question was not asked; `failurelab run` reports NOT RUN, with the reason, and not a failure."""

    def _render_traceback_(self) -> list[str]:
        """Show one line instead of a traceback: nothing is broken."""
        return [f"NOT RUN: {self}"]


def setup(seed: int = 0, *, device: str = "cpu", eras: Iterable[str] = (), threads: int = 1) -> None:
    """Make a notebook quiet and its runs repeatable; works in an era's kernel too.

    Args:
        seed: for Python's, numpy's and torch's random numbers.
        device: where the notebook will compute; without such a GPU it is NOT RUN.
        eras: eras whose kernels start now, in the background: importing an old stack takes long, and reading the
            first page does too.
        threads: for torch on a CPU. One is as fast for a small model, and adds up in the same order on every machine.
            Two on two busy cores were seen to train ten times slower, for threads that wait for each other spin: so
            more only for large models. An era's kernel takes it over.

    Raises:
        EraError: eras are named, and the course's repository is not there, or they have not been made.
        NotRun: `device` is a GPU, and torch finds none.
    """
    from IPython import get_ipython

    live.watch(get_ipython())  # first, for the imports take seconds
    if eras:
        stacks.root()  # a notebook that was copied out of the course ends here, with a line that says so
    import torch

    from . import observe

    observe.quiet()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    random.seed(seed)
    torch.manual_seed(seed)
    import matplotlib.style
    import numpy

    numpy.random.seed(seed)
    matplotlib.style.use(STYLE)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        not_run(f"device {device} is asked for, and torch {torch.__version__} finds no GPU")
    if observe.era() == "today":
        from . import magics

        magics.register()
        shell = magics.get_ipython()
        if shell is not None:
            shell.extension_manager.load_extension("failurelab")  # %lab
        if eras:
            magics.start(*eras)


def not_run(reason: str) -> None:
    """End the notebook: its question cannot be asked here. Say what is missing.

    Raises:
        NotRun: always.
    """
    raise NotRun(reason)


def show(figure: Any, alt: str) -> None:
    """Show a matplotlib figure as a small picture with a text for those who do not see it, and close the figure.

    The text goes with the picture into the notebook, its plain text and the HTML of `failurelab run`; JupyterLab 4
    keeps it but does not hand it to a screen reader. The picture's bytes are the same for the same figure: no date or
    version is in them.

    Args:
        figure: a matplotlib figure.
        alt: what the figure shows, in a sentence; without digits that vary by processor, for nbval compares it.

    Raises:
        ValueError: `alt` says nothing.
    """
    if len(alt.split()) < 3:
        raise ValueError(
            f"alt={alt!r} does not say what the figure shows: a sentence is needed, such as 'Reward rises'"
        )
    from matplotlib import pyplot
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    pyplot.close(figure)
    small = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    _display({"image/png": small.getvalue(), "text/plain": alt}, {"image/png": {"alt": alt}})


def verdict_table(rows: Iterable[Sequence[Any]], columns: Sequence[str] = COLUMNS) -> None:
    """Show a table of verdicts, as plain text and as HTML for light and dark themes.

    A boolean (numpy's and torch's too) becomes a verdict in words: True is healthy, False a red flag, None not run.
    Floats are shown with two decimals, or two digits where these would be 0.00; where they vary by processor, show
    the verdict and not the figure, for nbval compares the table.

    Args:
        rows: one sequence a line, as long as `columns`.
        columns: the headings.

    Raises:
        ValueError: there is no row, or a row of another length.
    """
    lines = [[value.item() if hasattr(value, "item") else value for value in row] for row in rows]
    if not lines:
        raise ValueError("a verdict table without a row says nothing; give at least one")
    for line in lines:
        if len(line) != len(columns):
            raise ValueError(f"the row {line} has {len(line)} cells, and the columns are {len(columns)}: {columns}")
    _display({"text/plain": _plain(lines, columns), "text/html": _html(lines, columns)}, {})


def _words(value: Any) -> str:
    if value is None:
        return _NOT_RUN[0]
    if isinstance(value, bool):
        return _MARKS[value][0]
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.2g}"


def _plain(lines: list[list[Any]], columns: Sequence[str]) -> str:
    table = [list(columns), *([_words(value) for value in line] for line in lines)]
    widths = [max(len(row[place]) for row in table) for place in range(len(columns))]
    table.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)


def _html(lines: list[list[Any]], columns: Sequence[str]) -> str:
    """Return the table with styles inline: JupyterLab drops a <style> in a notebook that is not trusted."""
    left = 'style="text-align:left;vertical-align:top"'
    head = "".join(f'<th scope="col" {left}>{html.escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(f'<td {left}>{_html_cell(value)}</td>' for value in line)}</tr>\n" for line in lines)
    return f'<table style="font-size:1em">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>'


def _html_cell(value: Any) -> str:
    if value is not None and not isinstance(value, bool):
        return html.escape(_words(value))
    words, ground, ink = _NOT_RUN if value is None else _MARKS[value]
    style = f"background:{ground};color:{ink};padding:0.1em 0.5em;border-radius:0.4em;white-space:nowrap"
    return f'<span style="{style}">{words}</span>'


def _display(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import display

    if InteractiveShell.initialized():
        display(data, raw=True, metadata=metadata)
    else:  # a script: text is all it can show
        print(data["text/plain"])
