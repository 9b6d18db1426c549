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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from failurelab_course import eras as stacks

STYLE = pathlib.Path(__file__).with_name("failurelab.mplstyle")


class Mark(NamedTuple):
    """Words on a ground of their own, legible in light and dark themes, without the colour too.

    `ground` and `ink` are colours such as `#d5f2de`, with a contrast of 7 or more.
    """

    words: str
    ground: str
    ink: str

    @property
    def html(self) -> str:
        """The mark as HTML, with its style inline."""
        style = f"background:{self.ground};color:{self.ink};padding:0.1em 0.5em;border-radius:0.4em;white-space:nowrap"
        return f'<span style="{style}">{html.escape(self.words)}</span>'


# A mark, a word and a colour, so that no one of them is needed.
_MARKS = {
    True: Mark("✓ healthy", "#d5f2de", "#0b3d1c"),
    False: Mark("✗ red flag", "#fbdcd7", "#5c1209"),
    None: Mark("– not run", "#e3e3e3", "#303030"),
}


_settled: dict[str, Any] = {}  # the seed and the device of `setup`, for `record`


class NotRun(Exception):
    """The notebook's question was not asked; `failurelab run` reports NOT RUN, with the reason, and not a failure."""

    def _render_traceback_(self) -> list[str]:
        """Show one line instead of a traceback: nothing is broken."""
        return [f"NOT RUN: {self}"]


def setup(seed: int = 0, *, device: str = "cpu", eras: Iterable[str] = ()) -> str:
    """Make a notebook quiet and its runs repeatable; works in an era's kernel too.

    Torch has one thread: as fast for a small model, and it adds up in the same order on every machine. Two on two busy
    cores were seen to train ten times slower, for threads that wait for each other spin. The process and its eras see
    the GPU that is used and no other, on a CPU none: with several, transformers' Trainer would wrap the model in
    nn.DataParallel.

    Args:
        seed: for Python's, numpy's and torch's random numbers.
        device: where the notebook will compute: `auto`, `cpu`, `cuda` or `cuda:N`; without such a GPU it is NOT RUN.
        eras: eras whose kernels start now, in the background: importing an old stack takes long, and reading the
            first page does too.

    Returns:
        The device that `device` means here: `cpu`, `cuda` or `cuda:N`.

    Raises:
        EraError: eras are named, and the course's repository is not there, or they have not been made.
        NotRun: `device` is a GPU, and none works; says why, and the next step. (`auto` is the CPU then, and says so.)
    """
    if eras := list(eras):
        stacks.root()  # a notebook that was copied out of the course ends here, with a line that says so
        from failurelab_course.eras import hosted

        hosted.enter()
        hosted.make_behind(eras)
    from failurelab_course.experiments import imports

    with imports.uncollected():
        import matplotlib.style
        import numpy
        import torch

        from failurelab_course.experiments import devices, observe

    observe.quiet()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    matplotlib.style.use(STYLE)
    asked = device
    try:
        device = devices.resolve(_only(device))
    except devices.TierError as error:
        not_run(str(error))
    _settled.update(seed=seed, device=device)
    if observe.era() == "today":
        if (asked, device) == ("auto", "cpu"):
            print(f"device auto is the CPU: {devices.gpu_problem()}")
        from IPython import get_ipython

        from failurelab_course.notebook import log_lines, magics

        shell = get_ipython()
        if shell is not None:
            shell.extension_manager.load_extension("failurelab_course")  # %lab
            log_lines.install()
        if eras:
            magics.start(*eras)
    return device


def _only(device: str) -> str:
    """Let CUDA, which reads it at its first use, see the one GPU that is used, or none; return its name by then."""
    if device == "cpu":  # else DeepSpeed, bitsandbytes and accelerate would take the GPU by themselves
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return device
    from failurelab_course.experiments import machine

    number, visible = machine.read_device(str(device)), machine.visible_gpus()
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
    elif number < len(visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number]
    else:
        return device  # hidden, or not so many: said by devices.resolve
    return device if device == "auto" else "cuda"


def not_run(reason: str) -> None:
    """End the notebook by `NotRun`: its question cannot be asked here; `reason` says what is missing."""
    raise NotRun(reason)


def record(failure: str, state: str, figures: Mapping[str, Any], case: str, tier: str | None = None) -> None:
    """Keep what a notebook measured, for its tests: `observe.record` with the seed and the device of `setup`."""
    from failurelab_course.experiments import observe

    observe.record(failure, state, figures, case=case, tier=tier, **_settled)


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


def verdict_table(rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> None:
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


def _mark(value: Any) -> Mark | None:
    """Return the verdict that a value stands for, if it is one."""
    return _MARKS[value] if value is None or isinstance(value, bool) else None


def _words(value: Any) -> str:
    if mark := _mark(value):
        return mark.words
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
    mark = _mark(value)
    return mark.html if mark else html.escape(_words(value))


def _display(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import display

    if InteractiveShell.initialized():
        display(data, raw=True, metadata=metadata)
    else:  # a script: text is all it can show
        print(data["text/plain"])
