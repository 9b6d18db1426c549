"""Questions before a run, answers after it, and a summary at the course's end: `ask`, `answer`, `summary`.

Who has said what will come reads the figure that comes with other eyes. jupyterquiz and ipyquizjb must know the right
answer when they ask, and keep nothing that Python can read. Here the answer is that of the run, and predictions are
kept in `.course/predictions.json` (or FAILURELAB_PREDICTIONS) for the summary. So it is ipywidgets alone.

In papermill, nbval, `failurelab run` and `outputs`, and so in the stored outputs, there is no widget and no learner:
the question is put out as text and HTML, and nothing is read or kept. Where there are no widgets, `say` takes the
prediction. It may be changed until its answer is shown, and then stays, until `forget`. Nobody is graded.
"""

import ast
import contextlib
import dataclasses
import html
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from failurelab.errors import FailureLabError
from failurelab_course import eras, processes, state_file
from failurelab_course.notebook import display as notebook

RIGHT = notebook.Mark("✓ right", "#d5f2de", "#0b3d1c")
OTHER = notebook.Mark("✗ not as predicted", "#fdeacb", "#4a2f00")
NONE = notebook.Mark("– no prediction", "#e3e3e3", "#303030")
NOT_RUN = notebook.Mark("– not run yet", "#e3e3e3", "#303030")
# Set by a Jupyter server in the kernels of notebooks and consoles.
_SERVER = "JPY_SESSION_NAME"


class PredictionError(FailureLabError):
    """A question that was not asked, a choice that it has not, or a damaged file; the message says the next step."""


@dataclasses.dataclass
class Given:
    """One question, as one learner met it: what was `said`, and what `came` of the last run; None is not yet."""

    said: str | None = None
    came: str | None = None

    @property
    def mark(self) -> notebook.Mark:
        """The verdict on the prediction."""
        if self.came is None:
            return NOT_RUN
        return NONE if self.said is None else RIGHT if self.said == self.came else OTHER


@dataclasses.dataclass
class Question:
    """What a notebook asks, such as `01-changed`; `shown` once its answer is; `replace` takes its buttons away."""

    key: str
    text: str
    choices: tuple[str, ...]
    given: Given = dataclasses.field(default_factory=Given)
    shown: bool = False
    replace: Callable[[str], None] = lambda note: None


_asked: dict[str, Question] = {}  # in this kernel
_spoken: set[str] = set()  # by `say`: then a person is there, though no Jupyter server says so


def default_path() -> pathlib.Path:
    """Return where this learner's predictions are kept."""
    named = os.environ.get("FAILURELAB_PREDICTIONS")
    return pathlib.Path(named) if named else eras.root() / ".course" / "predictions.json"


def read() -> dict[str, Given]:
    """Return what is in the learner's file, by question; an absent file is an empty one.

    Raises:
        PredictionError: it is no file of predictions, or is damaged.
    """
    content = state_file.read(default_path(), _broken)
    if content is None:
        return {}
    try:
        found = {key: Given(**fields) for key, fields in content["predictions"].items()}
        texts = [value for given in found.values() for value in vars(given).values() if value is not None]
        if content["schema"] == 1 and all(isinstance(text, str) for text in texts):
            return found
    except (AttributeError, KeyError, TypeError):
        pass  # the same as another schema: nothing that this version can read
    raise _broken("it is no file of predictions that this version knows")


@contextlib.contextmanager
def change() -> Iterator[dict[str, Given]]:
    """Give all predictions to be changed, and write the file whole when the block is left.

    Raises:
        PredictionError: the file is damaged or cannot be written; it is left as it is.
    """
    try:
        with state_file.locked(default_path()):
            found = read()
            yield found
            kept = {key: vars(given) for key, given in sorted(found.items())}
            state_file.write(default_path(), json.dumps({"schema": 1, "predictions": kept}, indent=1) + "\n")
    except OSError as error:
        raise _broken(f"it cannot be written ({type(error).__name__})", "make its folder writable") from error


def _broken(problem: str, step: str = "move it away, and it is begun anew") -> PredictionError:
    found = f"{default_path()}: {problem}. Your predictions are kept until this kernel ends."
    return PredictionError(f"{found} Next: {step}")


def find_calls(source: str, name: str) -> list[ast.Call]:
    """Return a cell's calls of `predict.NAME`, in the order of their lines; what is no Python has none."""
    try:
        nodes = ast.walk(ast.parse(source))
    except SyntaxError:
        return []
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == f"predict.{name}"]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def find_questions(source: str) -> list[Question]:
    """Return the questions that a cell asks by `predict.ask`, in order, without running it; only literals count."""
    found = []
    for call in find_calls(source, "ask"):
        with contextlib.suppress(ValueError, TypeError):
            key, text, choices = map(ast.literal_eval, call.args)
            found.append(Question(key, text, tuple(choices)))
    return found


def questions(folder: pathlib.Path | None = None) -> dict[str, list[Question]]:
    """Return what each notebook of the course asks, by the notebook's name, in the course's order.

    Raises:
        EraError: this is not the course's repository.
        ValueError: a notebook cannot be read.
    """
    found = {}
    for path in sorted((folder or eras.root() / "notebooks").glob("[0-9]*.ipynb")):
        try:
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name} is no notebook. Next: git checkout notebooks/{path.name}") from error
        found[path.stem] = [question for source in sources for question in find_questions(source)]
    return found


def _is_run() -> bool:
    """Whether `failurelab run` or `outputs` started this process."""
    return bool(os.environ.get(processes.MARK))


def _is_interactive() -> bool:
    """Whether a person looks at this kernel: a Jupyter server started it for a notebook or a console.

    A run that is started from such a notebook (`!failurelab run`, nbval) inherits the server's variable, and nobody
    looks at its kernels: there the process that started the kernel has the variable too, which no server has.
    """
    if not os.environ.get(_SERVER) or _is_run():
        return False
    import psutil
    from IPython import get_ipython

    with contextlib.suppress(psutil.Error, ValueError):
        starter = psutil.Process(int(os.environ.get("JPY_PARENT_PID") or os.getppid()))
        if starter.environ().get(_SERVER):
            return False
    shell = get_ipython()
    return hasattr(shell, "kernel") and hasattr(shell.display_pub, "pub_socket")


def _load(question: Question) -> str:
    """Read what the learner's file knows of a question; return what is wrong with the file, if anything is."""
    try:
        kept = read().get(question.key, Given())
    except FailureLabError as error:
        return str(error)
    if kept.said in question.choices:
        question.given, question.shown = kept, question.shown or kept.came is not None
    return ""


def _keep(question: Question, given: Given) -> str:
    """Keep what was given, here and in the learner's file; return what is wrong with the file."""
    question.given = given
    try:
        with change() as state:
            state[question.key] = given
    except FailureLabError as error:
        return str(error)
    return ""


def _choose(question: Question, choice: str) -> str:
    """Take a choice, unless the answer was shown; return what the reader is told."""
    if question.shown:
        stays = f" Your prediction stays “{question.given.said}”." if question.given.said else ""
        return f"The answer was shown already.{stays}"
    problem = _keep(question, Given(choice))
    return f"{_tell_open(question)} {problem}".strip()


def _tell_open(question: Question) -> str:
    said = question.given.said
    return f"You said “{said}”. You may change it until the answer is shown." if said else ""


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
    note = "" if _is_run() else f'Without buttons: predict.say("{key}", "...") takes your answer.'
    if _spoken or _is_interactive():
        problem = _load(question)
        if question.shown:
            again = f'The answer was shown already; predict.forget("{key}") lets you answer again.'
            note = f"You said “{question.given.said}”. {again}"
        else:
            with contextlib.suppress(ModuleNotFoundError):
                _show_buttons(question, problem or _tell_open(question))
                return
            note = f"{_tell_open(question)} {note}".strip()
    notebook._display(_describe(question, note), {})


def _show_buttons(question: Question, note: str) -> tuple[Any, Any]:
    """Show a button for each choice; return the widgets of choice and note. ModuleNotFoundError where there are none.

    Toggle buttons, because JupyterLab takes the arrow keys of radio buttons. HTML replaces them when the answer is
    shown, because of a widget in a saved notebook only an error is left.
    """
    import ipywidgets
    from IPython.display import display

    choice = ipywidgets.ToggleButtons(options=question.choices, value=question.given.said)
    choice.layout.width, choice.style.button_width = "auto", "max-content"
    told = ipywidgets.HTML(_as_html(note))
    choice.observe(lambda new: setattr(told, "value", _as_html(_choose(question, new["new"]))), names="value")
    box = ipywidgets.VBox([ipywidgets.HTML(_title(question)), choice, told])
    # A front end without widgets shows the HTML.
    shown = display(box._repr_mimebundle_() | _describe(question), raw=True, display_id=True)
    question.replace = lambda note: shown.update(_describe(question, note), raw=True)
    return choice, told


def say(key: str, choice: str) -> None:
    """Predict without buttons; also where no Jupyter server started the kernel.

    Raises:
        PredictionError: the question was not asked in this kernel, or has no such choice.
    """
    question = _find(key)
    if choice not in question.choices:
        raise PredictionError(f"{key}: “{choice}” is none of its choices. Next: one of {_quote(question.choices)}")
    if _is_run():
        print("Nobody looks at this run: nothing is kept.")
        return
    _spoken.add(key)
    _load(question)
    print(_choose(question, choice))


def answer(key: str, holds: str | Mapping[str, Any], because: str = "") -> None:
    """Show what came of the run beside what was predicted.

    Args:
        key: of a question that was asked in this kernel.
        holds: the choice that the run's figures make right; or a truth value for each choice, one of them true.
        because: a sentence or two on why; without digits that vary by processor if nbval compares the cell.

    Raises:
        PredictionError: the question was not asked, a choice is unknown, or not exactly one holds.
    """
    question = _find(key)
    came = _find_true(question, {holds: True} if isinstance(holds, str) else holds)
    if not (_spoken or _is_interactive()):
        notebook._display(_answer(f"Answer: “{came}”.", f"<b>Answer:</b> “{_as_html(came)}”.", because), {})
        return
    problem = _load(question)
    problem = _keep(question, Given(question.given.said, came)) or problem
    said, question.shown = question.given.said, True
    question.replace(f"You said “{said}”." if said else "No prediction was made. Run this cell to make one.")
    sentence = f"You said “{said}”: right." if said == came else f"You said “{said}”, it is “{came}”."
    sentence = sentence if said else f"No prediction was made. It is “{came}”."
    head = f"{question.given.mark.html} {_as_html(sentence)}"
    notebook._display(_answer(sentence, head, because, problem), {})


def forget(key: str) -> None:
    """Open a question again, or all of a notebook: `01-changed`, or `01`. What was said is deleted.

    Raises:
        PredictionError: the learner's file is damaged or cannot be written.
    """
    with change() as state:
        gone = [each for each in state if f"{each}-".startswith(f"{key}-")]
        for each in gone:
            del state[each]
    for question in _asked.values():
        if f"{question.key}-".startswith(f"{key}-"):
            question.given, question.shown = Given(), False
    print(f"Forgotten: {', '.join(gone) or 'nothing was kept'}. Run the cells again that ask.")


def summary() -> None:
    """Show what every notebook asked, what was predicted and what came; what was not predicted is not counted.

    Raises:
        EraError: this is not the course's repository.
        ValueError: a notebook cannot be read.
    """
    course = questions()
    if not (_spoken or _is_interactive()):
        rows = [[name[:2], each.text.replace("`", "")] for name, asked in course.items() for each in asked]
        notebook.verdict_table(rows, columns=["notebook", "question"])
        print(f"{len(rows)} questions. In JupyterLab your predictions stand beside them, and what came.")
        return
    problem = ""
    try:
        state = read()
    except FailureLabError as error:
        problem, state = f"\n{error}", {key: question.given for key, question in _asked.items()}
    rows, counts = [], []
    for name, asked in course.items():
        marks = []
        for each in asked:
            given = state.get(each.key, Given())
            given = given if given.said in each.choices else Given(None, given.came)
            marks.append(given.mark)
            rows.append([name[:2], each.text.replace("`", ""), given.said or "-", given.came or "-", given.mark])
        counts.append([name, len(asked), marks.count(RIGHT) + marks.count(OTHER), marks.count(RIGHT)])
    counts.append(["the course", *(sum(column) for column in list(zip(*counts))[1:])])
    notebook.verdict_table(rows, columns=["notebook", "question", "you said", "it is", "verdict"])
    notebook.verdict_table(counts, columns=["notebook", "asked", "predicted", "right"])
    print(f"Right: {counts[-1][3]} of {counts[-1][2]} predictions. What was not predicted is not counted.{problem}")


def _find(key: str) -> Question:
    if key not in _asked:
        raise PredictionError(f"{key} was not asked in this kernel. Next: run the cell above that asks it")
    return _asked[key]


def _find_true(question: Question, holds: Mapping[str, Any]) -> str:
    if unknown := [choice for choice in holds if choice not in question.choices]:
        known = f"is none of its choices, {_quote(question.choices)}"
        raise PredictionError(f"{question.key}: {_quote(unknown)} {known}. Next: the same words in both cells")
    true = [choice for choice, value in holds.items() if bool(value)]
    if len(true) != 1:
        found = f"one choice must hold, and {_quote(true) or 'none'} did"
        raise PredictionError(f"{question.key}: {found}. Next: conditions that cover every outcome once")
    return true[0]


def _describe(question: Question, note: str = "") -> dict[str, str]:
    """Return a question, its choices and a note to the reader, as text and as HTML."""
    lines = [f"Your prediction: {question.text}", *(f"  ( ) {choice}" for choice in question.choices), note]
    listed = "".join(f"<li>{_as_html(choice)}</li>" for choice in question.choices)
    below = f'<ul style="margin:0.2em 0">{listed}</ul>' + (note and f"<div>{_as_html(note)}</div>")
    return _as_data(lines, f"<div>{_title(question)}</div>{below}")


def _answer(sentence: str, head: str, *more: str) -> dict[str, str]:
    """Return an answer, with `head` for its sentence in HTML, as text and as HTML."""
    body = "".join(f"<div>{line}</div>" for line in [head, *map(_as_html, more)] if line)
    return _as_data([sentence, *more], body)


def _as_data(lines: Iterable[str], body: str) -> dict[str, str]:
    # The style is inline, because JupyterLab drops a <style> in a notebook that is not trusted.
    box = f'<div style="border-left:0.2em solid;padding:0.1em 0 0.1em 0.8em;margin:0.3em 0">{body}</div>'
    return {"text/plain": "\n".join(filter(None, lines)), "text/html": box}


def _title(question: Question) -> str:
    return f"<b>Your prediction:</b> {_as_html(question.text)}"


def _as_html(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _quote(words: Iterable[str]) -> str:
    return ", ".join(f"“{word}”" for word in words)
