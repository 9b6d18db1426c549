"""How a question, its buttons and its answer look: as text, as HTML for light and dark themes, and as widgets.

HTML comes without a form, for it cannot be sent anywhere, and with styles inline, for JupyterLab drops a <style> in a
notebook that is not trusted. Its colours are the theme's own, but for the marks, which bring their ground with them.
"""

import html
import re
import uuid
from collections.abc import Callable

from failurelab_course.notebook import display as notebook
from failurelab_course.notebook.predictions import Question

RIGHT = notebook.Mark("✓ right", "#d5f2de", "#0b3d1c")
OTHER = notebook.Mark("✗ another", "#fdeacb", "#4a2f00")
NONE = notebook.Mark("– no prediction", "#e3e3e3", "#303030")
NOT_RUN = notebook.Mark("– not run yet", "#e3e3e3", "#303030")
_BOX = "border-left:0.2em solid;padding:0.1em 0 0.1em 0.8em;margin:0.3em 0"


def mark(said: str | None, came: str | None) -> notebook.Mark:
    """Return the verdict on a prediction."""
    if came is None:
        return NOT_RUN
    return NONE if said is None else RIGHT if said == came else OTHER


def told(said: str | None, came: str) -> str:
    """Return the verdict as a sentence."""
    if said is None:
        return f"No prediction was made. It is “{came}”."
    return f"You said “{said}”: right." if said == came else f"You said “{said}”, it is “{came}”."


def question(asked: Question, note: str = "") -> dict[str, str]:
    """Return a question, its choices and a note to the reader, as text and as HTML."""
    lines = [f"Your prediction: {asked.text}", *(f"  ( ) {choice}" for choice in asked.choices)]
    choices = "".join(f"<li>{_as_html(choice)}</li>" for choice in asked.choices)
    body = f'<div>{_title(asked)}</div><ul style="margin:0.2em 0">{choices}</ul>'
    if note:
        lines.append(note)
        body += f"<div>{_as_html(note)}</div>"
    return _both(lines, body)


def answer(sentence: str, because: str, verdict: notebook.Mark | None = None, problem: str = "") -> dict[str, str]:
    """Return an answer, why it is so, and what went wrong beside it, as text and as HTML."""
    more = [line for line in (because, problem) if line]
    head = f"{verdict.html} {_as_html(sentence)}" if verdict else f"<b>Answer:</b> {_as_html(sentence)}"
    body = "".join(f"<div>{line}</div>" for line in [head, *map(_as_html, more)])
    return _both([sentence if verdict else f"Answer: {sentence}", *more], body)


class Buttons:
    """A question with a button for each choice, shown in the running cell; they take the theme's colours.

    Toggle buttons, for a keyboard reaches each (Tab, then Space): among radio buttons it is the arrows that choose, and
    these JupyterLab takes for itself, to go from cell to cell. When the answer is shown, `replace` puts plain HTML in
    their place: so a notebook that is saved then can be read without a kernel. Of a widget only an error would be left.

    Args:
        asked: the question.
        said: what is chosen already, or None.
        note: what the reader is told under the buttons.
        on_choice: is called with each choice, and returns the new note.

    Raises:
        ModuleNotFoundError: there are no widgets in this environment.
    """

    def __init__(self, asked: Question, said: str | None, note: str, on_choice: Callable[[str], str]):
        import ipywidgets
        from IPython.display import display

        self._asked, self._id = asked, f"failurelab-{uuid.uuid4()}"
        self.choice = ipywidgets.ToggleButtons(
            options=asked.choices, value=said, layout=ipywidgets.Layout(width="auto")
        )
        self.choice.style.button_width = "max-content"
        self.note = ipywidgets.HTML(_as_html(note))
        # Only the note changes: an icon on the chosen button would draw all anew, and take the keyboard's place away.
        self.choice.observe(lambda change: self._tell(on_choice(change["new"])), names="value")
        box = ipywidgets.VBox([ipywidgets.HTML(_title(asked)), self.choice, self.note])
        # A front end without widgets shows the HTML, and GitHub too.
        display(box._repr_mimebundle_() | question(asked), raw=True, display_id=self._id)

    def _tell(self, note: str) -> None:
        self.note.value = _as_html(note)

    def replace(self, note: str) -> None:
        """Show the question without buttons, and a note, where the buttons were."""
        from IPython.display import update_display

        update_display(question(self._asked, note), raw=True, display_id=self._id)


def _title(asked: Question) -> str:
    return f"<b>Your prediction:</b> {_as_html(asked.text)}"


def _as_html(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _both(lines: list[str], body: str) -> dict[str, str]:
    return {"text/plain": "\n".join(lines), "text/html": f'<div style="{_BOX}">{body}</div>'}
