"""A question before a run, and its answer after it: `ask` and `answer`.

Who has said what will come reads the figure that comes with other eyes. So a reader in JupyterLab chooses one of the
answers, and the answer of the run waits until then, also after Run All. In papermill, nbval and `failurelab run`, and
so in the stored outputs, nobody can choose: the question is text there, and the answer is shown at once. Nothing is
kept, and nobody is graded.
"""

import dataclasses
import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
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
    """What a notebook asks, such as `01-changed`; where a reader can choose, its `buttons` and the display of them."""

    key: str
    text: str
    choices: tuple[str, ...]
    buttons: Any = None
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
    question = _asked[key] = Question(key, text, tuple(choices))
    if _is_interactive():
        _show_buttons(question)
    else:
        notebook._display(_describe(question), {})


def answer(key: str, holds: str | Mapping[str, Any], because: str = "") -> None:
    """Show what came of the run, beside what was predicted; where a reader can choose, not before that.

    Args:
        key: of a question that was asked in this kernel.
        holds: the choice that the run's figures make right; or a truth value for each choice, one of them true.
        because: a sentence or two on why; without digits that vary by processor if nbval compares the cell.

    Raises:
        PredictionError: the question was not asked, a choice is unknown, or not exactly one holds.
    """
    if key not in _asked:
        raise PredictionError(f"{key} was not asked in this kernel. Next: run the cell above that asks it")
    question = _asked[key]
    came = _find_true(question, {holds: True} if isinstance(holds, str) else holds)
    if question.buttons is None:
        notebook._display(_as_data(f"Answer: “{came}”.", f"<b>Answer:</b> “{_as_html(came)}”.", because), {})
        return
    from IPython.display import display

    waits = "The answer waits for your prediction above."
    shown = display(_as_data(waits, waits), raw=True, display_id=True)

    def show(_: Any = None) -> None:
        said = question.buttons.value
        if said is None:
            return
        question.buttons.disabled = True
        # Of a widget in a saved notebook only an error is left, so HTML takes its place.
        question.display.update(_describe(question, f"You said “{said}”."), raw=True)
        sentence = f"You said “{said}”: right." if said == came else f"You said “{said}”, it is “{came}”."
        mark = RIGHT if said == came else OTHER
        shown.update(_as_data(sentence, f"{mark.html} {_as_html(sentence)}", because), raw=True)

    question.buttons.observe(show, names="value")
    show()


def _is_interactive() -> bool:
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


def _show_buttons(question: Question) -> None:
    """Show a button for each choice: toggle buttons, because JupyterLab takes the arrow keys of radio buttons."""
    import ipywidgets
    from IPython.display import display

    question.buttons = ipywidgets.ToggleButtons(options=question.choices, value=None)
    question.buttons.layout.width, question.buttons.style.button_width = "auto", "max-content"
    box = ipywidgets.VBox([ipywidgets.HTML(_title(question)), question.buttons])
    # A front end without widgets shows the HTML.
    question.display = display(box._repr_mimebundle_() | _describe(question), raw=True, display_id=True)


def _find_true(question: Question, holds: Mapping[str, Any]) -> str:
    if unknown := [choice for choice in holds if choice not in question.choices]:
        known = f"is none of its choices, {_quote(question.choices)}"
        raise PredictionError(f"{question.key}: {_quote(unknown)} {known}. Next: the same words in both cells")
    true = [choice for choice, value in holds.items() if bool(value)]
    if len(true) != 1:
        problem = f"one choice must hold, and {_quote(true) or 'none'} did"
        raise PredictionError(f"{question.key}: {problem}. Next: conditions that cover every outcome once")
    return true[0]


def _describe(question: Question, note: str = "") -> dict[str, str]:
    """Return a question, its choices and a note to the reader, as text and as HTML."""
    lines = [f"Your prediction: {question.text}", *(f"  ( ) {choice}" for choice in question.choices), note]
    listed = "".join(f"<li>{_as_html(choice)}</li>" for choice in question.choices)
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
