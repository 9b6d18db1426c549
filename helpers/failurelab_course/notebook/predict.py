"""A question before a run, and its answer after it: `ask` and `answer`, `ask_number` and `answer_number`.

Who has said what will come reads the figure that comes with other eyes. So a reader in JupyterLab chooses one of the
answers, or writes a number, and the answer of the run waits until then, also after Run All. In papermill, nbval and
`failurelab run`, and so in the stored outputs, nobody can choose: the question is text there, and the answer is shown
at once. Nothing is kept, and nobody is graded.
"""

import dataclasses
import html
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil

from failurelab.errors import FailureLabError
from failurelab_course import processes
from failurelab_course.notebook import display as notebook

RIGHT = notebook.Mark("✓ right", "#d5f2de", "#0b3d1c")
OTHER = notebook.Mark("✗ not as predicted", "#fdeacb", "#4a2f00")
# Set by a Jupyter server in the kernels of notebooks and consoles.
_SERVER = "JPY_SESSION_NAME"


class PredictionError(FailureLabError):
    """A question that was not asked, or a choice that it has not; the message says the next step."""


@dataclasses.dataclass
class Question:
    """What a notebook asks, such as `01-changed`; where a reader can answer, its `field` and the display of it.

    A question without choices asks for a number, in `unit`. `note` is the field's line on what cannot be read.
    """

    key: str
    text: str
    choices: tuple[str, ...] = ()
    unit: str = ""
    field: Any = None
    note: Any = None
    display: Any = None


_asked: dict[str, Question] = {}  # in this kernel


def ask(key: str, text: str, choices: Sequence[str]) -> None:
    """Ask for a prediction before a run.

    Args:
        key: the notebook's number and a word, such as `01-changed`; unique in the course.
        text: the question; code may be in backticks.
        choices: what may be chosen, two or more; the wrong ones are what people believe.

    Raises:
        PredictionError: fewer than two choices, or two alike.
    """
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise PredictionError(f"{key}: choices are two or more, all different, not {_quote(choices)}")
    _put(Question(key, text, tuple(choices)))


def ask_number(key: str, text: str, unit: str = "") -> None:
    """Ask for a number before it is measured.

    Args:
        key: as `ask` has it.
        text: the question; code may be in backticks.
        unit: of the number, such as `GiB`.
    """
    _put(Question(key, text, unit=unit))


def answer(key: str, holds: str | Mapping[str, Any], because: str = "") -> None:
    """Show what came of the run, beside what was predicted; where a reader can choose, not before that.

    Args:
        key: of a question that was asked in this kernel.
        holds: the choice that the run's figures make right; or a truth value for each choice, one of them true.
        because: a sentence or two on why; without digits that vary by processor if nbval compares the cell.

    Raises:
        PredictionError: the question was not asked; a choice is unknown; or, where nobody looks, not exactly one holds.
            A reader is told that their run came out otherwise, without an error.
    """
    question = _find(key)
    came = _find_true(question, {holds: True} if isinstance(holds, str) else holds)
    if came is None:
        notebook._display(_as_data(_OTHERWISE, _as_html(_OTHERWISE)), {})
        return
    _reveal(question, f"Answer: “{came}”.", because, lambda said: (said == came, f"it is “{came}”"))


def answer_number(
    key: str, measured: float, because: str = "", within: float = 1.25, digits: int = 3, how: str = "Measured"
) -> None:
    """Show a number that was measured, beside what was predicted; where a reader can answer, not before that.

    Args:
        key: of a question that `ask_number` asked in this kernel.
        measured: the number, in the question's unit.
        because: as `answer` has it.
        within: a prediction counts as right up to this factor above or below; 1 for a count.
        digits: of the number that is shown.
        how: the number came to be known, such as `Computed` where nothing of that size was run.

    Raises:
        PredictionError: the question was not asked.
    """
    question = _find(key)
    came = _in_unit(measured, question.unit, digits)

    def compare(said: str) -> tuple[bool, str]:
        number = float(said)
        low, high = sorted((measured / within, measured * within))
        return low <= number <= high, f"{how.lower()}: {came}"

    _reveal(question, f"{how}: {came}.", because, compare)


def _in_unit(number: float, unit: str, digits: int = 3) -> str:
    words = f"{number:,.{digits}g}" if abs(number) < 10**digits else f"{number:,.0f}"
    return f"{words} {unit}".strip()


def _put(question: Question) -> None:
    """Show a question: with a field where somebody can answer, else as text."""
    _asked[question.key] = question
    if is_interactive():
        _show_field(question)
    else:
        notebook._display(_describe(question), {})


def _find(key: str) -> Question:
    if key not in _asked:
        raise PredictionError(f"{key} was not asked in this kernel. Next: run the cell above that asks it")
    return _asked[key]


def _reveal(question: Question, outcome: str, because: str, compare: Callable[[str], tuple[bool, str]]) -> None:
    """Show an outcome; where a field waits for the reader, not before they answered, and whether they were right."""
    if question.field is None:
        notebook._display(_as_data(outcome, _as_html(outcome), because), {})
        return
    from IPython.display import display

    waits = "The answer waits for your prediction above."
    shown = display(_as_data(waits, waits), raw=True, display_id=True)

    def show(_: Any = None) -> None:
        said = _read(question)
        if said is None:
            return
        question.field.disabled = True
        right, came = compare(said)
        told = said if question.choices else _in_unit(float(said), question.unit)
        # Of a widget in a saved notebook only an error is left, so HTML takes its place.
        question.display.update(_describe(question, f"You said “{told}”."), raw=True)
        sentence = f"You said “{told}”: right." if right else f"You said “{told}”, {came}."
        if right and not question.choices:
            sentence = f"You said “{told}”: right, {came}."
        shown.update(_as_data(sentence, f"{(RIGHT if right else OTHER).html} {_as_html(sentence)}", because), raw=True)

    question.field.observe(show, names="value")
    show()


def _read(question: Question) -> str | None:
    """Return what the reader said; None if that is nothing, or, with a line beside the field, no number."""
    said = question.field.value
    if question.choices or not said:
        return said or None
    text = said.strip()
    for unit in filter(None, (question.unit, "%" * (question.unit == "percent"))):  # it stands beside the field
        text = text.removesuffix(unit).strip()
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d*)?", text):  # in thousands; another comma may be a decimal one
        text = text.replace(",", "")
    try:
        finite = math.isfinite(float(text))
    except ValueError:
        finite = False
    question.note.value = "" if finite else f"“{html.escape(said)}” is no number: write digits alone, such as 1.5"
    return text if finite else None


def is_interactive() -> bool:
    """Whether a person looks at this kernel: a Jupyter server started it for a notebook or a console.

    A run that is started from such a notebook (`!failurelab run`, nbval) inherits the server's variable, and nobody
    looks at its kernels: there the process that started the kernel has the variable too, which no server has.
    """
    if not os.environ.get(_SERVER) or os.environ.get(processes.MARK):
        return False
    try:
        return not psutil.Process(os.getppid()).environ().get(_SERVER)
    except psutil.Error:
        return True


def _show_field(question: Question) -> None:
    """Show a button for each choice (JupyterLab takes the arrow keys of radio buttons), or a field for a number."""
    import ipywidgets
    from IPython.display import display

    rows = [ipywidgets.HTML(_title(question))]
    if question.choices:
        question.field = ipywidgets.ToggleButtons(options=question.choices, value=None)
        question.field.layout.width, question.field.style.button_width = "auto", "max-content"
        rows.append(question.field)
    else:
        question.field = ipywidgets.Text(placeholder="a number, then Enter", continuous_update=False)
        question.note = ipywidgets.HTML()
        rows += [ipywidgets.HBox([question.field, ipywidgets.Label(question.unit)]), question.note]
    # A front end without widgets shows the HTML.
    data = ipywidgets.VBox(rows)._repr_mimebundle_() | _describe(question)
    question.display = display(data, raw=True, display_id=True)


_OTHERWISE = "Your run came out otherwise than any of the choices. Next: Restart Kernel and Run All."


def _find_true(question: Question, holds: Mapping[str, Any]) -> str | None:
    """Return the choice that holds; None if not exactly one does and a reader looks."""
    if unknown := [choice for choice in holds if choice not in question.choices]:
        known = f"is none of its choices, {_quote(question.choices)}"
        raise PredictionError(f"{question.key}: {_quote(unknown)} {known}. Next: the same words in both cells")
    true = [choice for choice, value in holds.items() if bool(value)]
    if len(true) != 1:
        if question.field is not None:
            return None
        problem = f"one choice must hold, and {_quote(true) or 'none'} did"
        raise PredictionError(f"{question.key}: {problem}. Next: conditions that cover every outcome once")
    return true[0]


def _describe(question: Question, note: str = "") -> dict[str, str]:
    """Return a question, its choices and a note to the reader, as text and as HTML."""
    places = [f"( ) {choice}" for choice in question.choices] or [f"____ {question.unit}".strip()]
    lines = [f"Your prediction: {question.text}", *(f"  {place}" for place in places), note]
    listed = "".join(f"<li>{_as_html(choice)}</li>" for choice in question.choices or places)
    below = f'<ul style="margin:0.2em 0">{listed}</ul>' + (note and f"<div>{_as_html(note)}</div>")
    return {"text/plain": _join(lines), "text/html": _frame(f"<div>{_title(question)}</div>{below}")}


def _as_data(sentence: str, head: str, because: str = "") -> dict[str, str]:
    """Return an answer, with `head` for its sentence in HTML, as text and as HTML."""
    body = "".join(f"<div>{line}</div>" for line in (head, _as_html(because)) if line)
    return {"text/plain": _join([sentence, because]), "text/html": _frame(body)}


def _join(lines: Iterable[str]) -> str:
    return "\n".join(filter(None, lines))


def _frame(body: str) -> str:
    # The style is inline, because JupyterLab drops a <style> in a notebook that is not trusted.
    return f'<div style="border-left:0.2em solid;padding:0.1em 0 0.1em 0.8em;margin:0.3em 0">{body}</div>'


def _title(question: Question) -> str:
    return f"<b>Your prediction:</b> {_as_html(question.text)}"


def _as_html(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _quote(words: Iterable[str]) -> str:
    return ", ".join(f"“{word}”" for word in words)
