"""What a learner predicted, in one small file, and which questions the course asks.

The file is `.course/predictions.json`, or where FAILURELAB_PREDICTIONS says. It holds, for each question, what was said
and what came of the run, and no name and no time. A question is read from its notebook's `predict.ask(...)`, without
running it, so that the summary at the course's end knows those that were never reached.
"""

import ast
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator

from failurelab_course import eras, state_file

SCHEMA = 1


class PredictionError(ValueError):
    """A slip: an unknown question, or an answer that is none of its choices. The message says the next step."""

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook: the frames of this package say nothing more."""
        return [f"{type(self).__name__}: {self}"]


class StateError(Exception):
    """The learner's file cannot be read or written; the message names it and the next step."""

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook."""
        return [f"{type(self).__name__}: {self}"]


@dataclasses.dataclass
class Given:
    """One question, as one learner met it: what was `said`, and what `came` of the last run; None is not yet."""

    said: str | None = None
    came: str | None = None

    @property
    def closed(self) -> bool:
        """Whether the answer was shown after a prediction: from then on the prediction stays."""
        return self.said is not None and self.came is not None


@dataclasses.dataclass(frozen=True)
class Question:
    """What a notebook asks: its `key`, such as `01-changed`, its text, and the choices."""

    key: str
    text: str
    choices: tuple[str, ...]


def default_path() -> pathlib.Path:
    """Return where this learner's predictions are kept."""
    named = os.environ.get("FAILURELAB_PREDICTIONS")
    return pathlib.Path(named) if named else eras.root() / ".course" / "predictions.json"


def read(path: pathlib.Path | None = None) -> dict[str, Given]:
    """Return what is in the file, by question; an absent file is an empty one.

    Raises:
        StateError: it is no file of predictions, or is damaged.
    """
    path = path or default_path()
    content = state_file.read(path, lambda why: _broken(path, why))
    if content is None:
        return {}
    try:
        if content["schema"] != SCHEMA:
            raise _broken(path, f"it is of schema {content['schema']!r}, and {SCHEMA} is known")
        found = {key: Given(**fields) for key, fields in content["predictions"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise _broken(path, "it is no file of predictions") from error
    for key, given in found.items():
        for value in (given.said, given.came):
            if not isinstance(value, str | None):
                raise _broken(path, f"{key} holds {value!r}, which is no text")
    return found


@contextlib.contextmanager
def change(path: pathlib.Path | None = None) -> Iterator[dict[str, Given]]:
    """Give all predictions to be changed, and write the file whole when the block is left.

    Raises:
        StateError: the file is damaged or cannot be written; it is left as it is.
    """
    path = path or default_path()
    try:
        with state_file.locked(path):
            found = read(path)
            yield found
            kept = {key: dataclasses.asdict(given) for key, given in sorted(found.items())}
            state_file.write(path, json.dumps({"schema": SCHEMA, "predictions": kept}, indent=1) + "\n")
    except OSError as error:
        raise _broken(path, f"it cannot be written ({type(error).__name__})", "make its folder writable") from error


def _broken(path: pathlib.Path, problem: str, step: str = "move it away, and it is begun anew") -> StateError:
    return StateError(f"{path}: {problem}. Your predictions are kept until this kernel ends. Next: {step}")


def asked(source: str) -> list[Question]:
    """Return the questions that a cell asks by `predict.ask`, in order; what is no Python, or no literal, asks none."""
    found = []
    for call in calls(source, "ask"):
        with contextlib.suppress(ValueError, TypeError):
            key, text, choices = (ast.literal_eval(each) for each in call.args)
            found.append(Question(key, text, tuple(choices)))
    return found


def calls(source: str, name: str) -> list[ast.Call]:
    """Return a cell's calls of `predict.NAME`, in the order of their lines."""
    try:
        nodes = ast.walk(ast.parse(source))
    except SyntaxError:
        return []
    made = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == f"predict.{name}"]
    return sorted(made, key=lambda call: (call.lineno, call.col_offset))


def questions(folder: pathlib.Path | None = None) -> dict[str, list[Question]]:
    """Return what each notebook of the course asks, by the notebook's name, in the course's order.

    Raises:
        EraError: this is not the course's repository.
        ValueError: a notebook cannot be read.
    """
    folder = folder or eras.root() / "notebooks"
    found = {}
    for path in sorted(folder.glob("[0-9]*.ipynb")):
        try:
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name} is no notebook. Next: git checkout notebooks/{path.name}") from error
        found[path.stem] = [question for source in sources for question in asked(source)]
    return found


def slips(name: str, cells: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with a notebook's questions: a cell's place (0 for the notebook), and why.

    Args:
        name: the notebook's; its number begins the key of each of its questions, so no two notebooks share one.
        cells: the place and the source of each code cell, in order.
    """
    open_questions: dict[str, tuple[int, Question]] = {}
    seen: set[str] = set()
    for place, source in cells:
        if source.startswith("%%"):
            if "predict." in source:
                yield place, "a question in an era's kernel: the learner's buttons are in the course's own"
            continue
        if calls(source, "say") or calls(source, "forget"):
            yield place, "predict.say and predict.forget are the learner's: no notebook says what is predicted"
        for call in calls(source, "answer"):
            key = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            if key not in open_questions or open_questions[key][0] == place:
                yield place, f"predict.answer({key!r}): no cell above asks it, or it was answered already"
                continue
            yield from ((place, why) for why in _wrong_answer(call, open_questions.pop(key)[1]))
        questions_here = asked(source)
        if len(questions_here) != len(calls(source, "ask")):
            yield place, "predict.ask takes a key, a text and a list of choices, all literal: the summary reads them"
        for question in questions_here:
            if not question.key.startswith(f"{name.partition('_')[0]}-") or question.key in seen:
                yield place, f"the key {question.key!r} does not begin with the notebook's number, or is used twice"
            seen.add(question.key)
            open_questions[question.key] = (place, question)
    for place, question in open_questions.values():
        yield place, f"predict.ask({question.key!r}) is never answered in a cell below"
    if len(seen) < 2:
        yield (
            0,
            f"{len(seen)} questions are asked, at least 2 should be: predict.ask before a run, predict.answer after",
        )


def _wrong_answer(call: ast.Call, question: Question) -> Iterator[str]:
    holds = call.args[1] if len(call.args) > 1 else None
    if holds is None or isinstance(holds, ast.Constant):
        yield f"the answer to {question.key!r} is typed: it must come from the run's figures, or it outlives them"
    elif isinstance(holds, ast.Dict):
        listed = [key.value for key in holds.keys if isinstance(key, ast.Constant)]
        if sorted(listed) != sorted(question.choices):
            yield f"the answer to {question.key!r} judges {listed}, and the choices are {list(question.choices)}"
