"""Questions before a run, answers after it, and a summary at the course's end: `ask`, `answer`, `summary`.

Who has said what will come reads the figure that comes with other eyes. Three ways to ask were compared. jupyterquiz
2.9 judges in the browser: it must know the right answer when it asks, writes JavaScript with random ids into the
notebook, and what was chosen does not reach Python (its issue 17). ipyquizjb 0.3 is made of ipywidgets, must know the
answer when it asks too, and keeps nothing. Here the right answer is that of the run, which comes later, and predictions
are kept for the summary. So it is ipywidgets alone, which the course has anyway.

Where nobody looks (papermill, nbval, `failurelab run` and `outputs`, and so the stored outputs) there is no widget and
no learner: the question and its choices are put out as text and HTML, nothing is read and nothing is kept. Where there
are no widgets (another front end, an era's kernel), `say` takes the prediction.

A prediction may be changed until its answer is shown, and then stays, in later runs too, until `forget`. Without a
prediction the answer is shown all the same; the question is open again when its cell is run again. Nobody is graded.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from failurelab_course import eras
from failurelab_course.notebook import display as notebook
from failurelab_course.notebook import predict_view, predictions
from failurelab_course.notebook.predictions import Given, PredictionError, Question

_PROBLEMS = (predictions.StateError, eras.EraError)
# Set by a Jupyter server in the kernels that it starts for a notebook or console; papermill and nbval do not set it.
_SERVER = "JPY_SESSION_NAME"
# Set in everything that `failurelab run` starts (`runner.TOKEN`).
_RUN = "FAILURELAB_RUN"


class _Asked:
    """A question as it stands in this kernel: what was `given`, whether its answer was `shown`, and its buttons."""

    def __init__(self, question: Question):
        self.question, self.given = question, Given()
        self.shown = False
        self.buttons: predict_view.Buttons | None = None

    def load(self) -> str:
        """Read what the learner's file knows of it; return what is wrong with the file, if anything is."""
        try:
            kept = predictions.read().get(self.question.key, Given())
        except _PROBLEMS as error:
            return str(error)
        if kept.said in self.question.choices:
            self.given = kept
            self.shown = self.shown or kept.closed
        return ""

    def keep(self, **changes: str) -> str:
        """Change what was given, here and in the learner's file; return what is wrong with the file."""
        vars(self.given).update(changes)
        try:
            with predictions.change() as state:
                state[self.question.key] = self.given
        except _PROBLEMS as error:
            return str(error)
        return ""

    def choose(self, choice: str) -> str:
        """Take a choice, unless the answer was shown; return what the reader is told."""
        if self.shown:
            stays = f"Your prediction stays “{self.given.said}”" if self.given.said else "No prediction is kept"
            return f"The answer was shown already. {stays}."
        self.given = Given()
        return f"{self.open_note(choice)} {self.keep(said=choice)}".strip()

    @staticmethod
    def open_note(choice: str | None) -> str:
        """Return what is told while the answer was not yet shown."""
        return f"You said “{choice}”. You may change it until the answer is shown." if choice else ""


_asked: dict[str, _Asked] = {}
_spoken: set[str] = set()  # by `say`: then a person is there, though no Jupyter server says so


def _is_run() -> bool:
    """Whether `failurelab run` or `outputs` started this process."""
    return bool(os.environ.get(_RUN))


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


def _reader() -> bool:
    """Whether a person can answer here, or has."""
    return bool(_spoken) or _is_interactive()


def ask(key: str, text: str, choices: Sequence[str]) -> None:
    """Ask for a prediction before a run.

    Args:
        key: the notebook's number and a word, such as `01-changed`; unique in the course.
        text: the question; code may be in backticks.
        choices: what may be chosen, two or more; the wrong ones are what people believe.

    Raises:
        PredictionError: fewer than two choices, or two alike.
    """
    question = Question(key, text, tuple(choices))
    if len(question.choices) < 2 or len(set(question.choices)) < len(question.choices):
        raise PredictionError(f"{key}: choices are two or more, all different, not {_quoted(choices)}")
    asked = _asked[key] = _Asked(question)
    hint = "" if _is_run() else f'Without buttons: predict.say("{key}", "...") takes your answer.'
    if not _reader():
        notebook._display(predict_view.question(question, hint), {})
        return
    problem = asked.load()
    said = asked.given.said
    if asked.shown:
        note = f'You said “{said}”. The answer was shown already; predict.forget("{key}") lets you answer again.'
        notebook._display(predict_view.question(question, note), {})
        return
    try:
        asked.buttons = predict_view.Buttons(question, said, problem or asked.open_note(said), asked.choose)
    except ModuleNotFoundError:
        notebook._display(predict_view.question(question, f"{asked.open_note(said)} {hint}".strip()), {})


def say(key: str, choice: str) -> None:
    """Predict without buttons; also where no Jupyter server started the kernel.

    Raises:
        PredictionError: the question was not asked in this kernel, or has no such choice.
    """
    asked = _find(key)
    if choice not in asked.question.choices:
        known = _quoted(asked.question.choices)
        raise PredictionError(f"{key}: “{choice}” is none of its choices. Next: one of {known}")
    if _is_run():
        print("Nobody looks at this run: nothing is kept.")
        return
    _spoken.add(key)
    asked.load()
    print(asked.choose(choice))


def answer(key: str, holds: str | Mapping[str, Any], because: str = "") -> None:
    """Show what came of the run beside what was predicted.

    Args:
        key: of a question that was asked in this kernel.
        holds: the choice that the run's figures make right; or a truth value for each choice, one of them true.
        because: a sentence or two on why; without digits that vary by processor if nbval compares the cell.

    Raises:
        PredictionError: the question was not asked, a choice is unknown, or not exactly one holds.
    """
    asked = _find(key)
    came = _which(asked.question, holds)
    if not _reader():
        notebook._display(predict_view.answer(f"“{came}”.", because), {})
        return
    problem = asked.load()
    problem = asked.keep(came=came) or problem
    said, asked.shown = asked.given.said, True
    if asked.buttons:
        asked.buttons.replace(f"You said “{said}”." if said else "No prediction was made. Run this cell to make one.")
        asked.buttons = None
    verdict = predict_view.mark(said, came)
    notebook._display(predict_view.answer(predict_view.told(said, came), because, verdict, problem), {})


def forget(key: str) -> None:
    """Open a question again, or all of a notebook: `01-changed`, or `01`. What was said is deleted.

    Raises:
        StateError: the learner's file is damaged or cannot be written.
    """
    with predictions.change() as state:
        gone = [each for each in state if each == key or each.startswith(f"{key}-")]
        for each in gone:
            del state[each]
    for each, asked in _asked.items():
        if each == key or each.startswith(f"{key}-"):
            asked.given, asked.shown = Given(), False
    print(f"Forgotten: {', '.join(gone) or 'nothing was kept'}. Run the cells again that ask.")


def summary() -> None:
    """Show what every notebook asked, what was predicted and what came; what was not predicted is not counted.

    Raises:
        EraError: this is not the course's repository.
        ValueError: a notebook cannot be read.
    """
    course = predictions.questions()
    if not _reader():
        rows = [[name[:2], each.text.replace("`", "")] for name, questions in course.items() for each in questions]
        notebook.verdict_table(rows, columns=["notebook", "question"])
        print(f"{len(rows)} questions. In JupyterLab your predictions stand beside them, and what came.")
        return
    problem, state = "", {}
    try:
        state = predictions.read()
    except _PROBLEMS as error:
        problem, state = str(error), {key: asked.given for key, asked in _asked.items()}
    rows, counts = [], []
    for name, questions in course.items():
        predicted = right = 0
        for each in questions:
            given = state.get(each.key, Given())
            said = given.said if given.said in each.choices else None
            verdict = predict_view.mark(said, given.came)
            predicted += verdict in (predict_view.RIGHT, predict_view.OTHER)
            right += verdict == predict_view.RIGHT
            rows.append([name[:2], each.text.replace("`", ""), said or "-", given.came or "-", verdict])
        counts.append([name, len(questions), predicted, right])
    counts.append(["the course", *(sum(column) for column in list(zip(*counts))[1:])])
    notebook.verdict_table(rows, columns=["notebook", "question", "you said", "it is", "verdict"])
    notebook.verdict_table(counts, columns=["notebook", "asked", "predicted", "right"])
    print(f"Right: {counts[-1][3]} of {counts[-1][2]} predictions. What was not predicted is not counted.")
    if problem:
        print(problem)


def _find(key: str) -> _Asked:
    if key not in _asked:
        raise PredictionError(f"{key} was not asked in this kernel. Next: run the cell above that asks it")
    return _asked[key]


def _which(question: Question, holds: str | Mapping[str, Any]) -> str:
    values = {holds: True} if isinstance(holds, str) else holds
    if unknown := [choice for choice in values if choice not in question.choices]:
        known = _quoted(question.choices)
        raise PredictionError(
            f"{question.key}: {_quoted(unknown)} is none of its choices, {known}. Next: the same words in both cells"
        )
    true = [choice for choice, value in values.items() if bool(value)]
    if len(true) != 1:
        raise PredictionError(
            f"{question.key}: one choice must hold, and {_quoted(true) or 'none'} did. Next: conditions that cover "
            "every outcome once"
        )
    return true[0]


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(f"“{word}”" for word in words)
