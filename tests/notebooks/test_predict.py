"""Predictions: asked before a run, kept, answered after it; and nothing of a learner where nobody looks."""

import contextlib
import html
import json
import os
import queue
import types
from unittest import mock

import jupyter_client
import nbformat
import pytest

from failurelab_course import processes
from failurelab_course.notebook import predict
from failurelab_course.notebook.predict import Given, PredictionError

CHOICES = ["none", "some", "all 26"]
TEXT = "How many of the `26` tensors change?"
BUTTONS = []


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A learner of one's own, in a kernel that has asked nothing yet."""
    monkeypatch.setenv("FAILURELAB_PREDICTIONS", str(tmp_path / "course" / "predictions.json"))
    monkeypatch.delenv(processes.MARK, raising=False)
    monkeypatch.setattr(predict, "_asked", {})
    monkeypatch.setattr(predict, "_spoken", set())


@pytest.fixture
def shown(monkeypatch):
    """What is put out as text, in order; buttons are made and shown nowhere, and what replaces them is put out."""
    texts = []

    def display(data, *_, **__):
        texts.append(data["text/plain"])
        return types.SimpleNamespace(update=lambda data, **_: texts.append("now " + data["text/plain"]))

    monkeypatch.setattr(predict.notebook, "_display", display)
    monkeypatch.setattr("IPython.display.display", display)
    show = predict._show_buttons
    monkeypatch.setattr(predict, "_show_buttons", lambda question, note: BUTTONS.append(show(question, note)))
    return texts


@pytest.fixture
def reader(monkeypatch):
    """Somebody looks, as in JupyterLab."""
    monkeypatch.setattr(predict, "_is_interactive", lambda: True)


def kept():
    return {key: (given.said, given.came) for key, given in predict.read().items()}


def ask(key="01-changed"):
    """Ask; return the widgets of the choice and of the note, or None where there are none."""
    BUTTONS.clear()
    predict.ask(key, TEXT, CHOICES)
    return BUTTONS[0] if BUTTONS else None


def plant(folder, name, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Two notebooks with three questions, as they stand in files."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    plant(folder, "00_start", "x = 1", f"predict.ask('00-gain', 'Does it learn?', {CHOICES})", "%%era a\nx")
    plant(folder, "01_two", f"predict.ask('01-a', 'A ' 'and `b`?', {CHOICES})\npredict.ask('01-c', 'C?', {CHOICES})")
    course = predict.questions(folder)
    monkeypatch.setattr(predict, "questions", lambda: course)
    return course


# A learner in JupyterLab


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ("all 26", "You said “all 26”: right."),
        ("some", "You said “some”, it is “all 26”."),
        (None, "No prediction was made. It is “all 26”."),
    ],
)
def test_the_answer_stands_beside_what_was_said(reader, shown, chosen, told):
    """Chosen with a real widget's button; kept at once; the buttons go when the answer comes."""
    choice, note = ask()
    assert choice.value is None and kept() == {}
    if chosen:
        choice.value = chosen
        assert kept() == {"01-changed": (chosen, None)}
        assert chosen in note.value and "may change it" in note.value
    changed = 26
    holds = {"none": changed == 0, "some": 0 < changed < 26, "all 26": changed == 26}
    predict.answer("01-changed", holds, because="Every one.")
    assert shown[-1] == f"{told}\nEvery one."
    assert shown[-2].startswith("now Your prediction: How many") and "( ) some" in shown[-2]
    assert kept() == {"01-changed": (chosen, "all 26")}


def test_a_prediction_may_change_until_the_answer_is_shown(reader, shown):
    """Also after a restart of the kernel; what is clicked after the answer is not taken."""
    ask()[0].value = "none"
    predict._asked.clear()  # a restart
    choice, note = ask()
    assert choice.value == "none"
    choice.value = "some"
    predict.answer("01-changed", "all 26")
    choice.value = "all 26"
    assert "shown already" in note.value and "stays “some”" in note.value
    assert kept() == {"01-changed": ("some", "all 26")}


def test_a_rerun_keeps_the_first_answer_until_it_is_forgotten(reader, shown, capsys):
    """Another run may bring another answer; what was said stays, and is asked again after `forget`."""
    ask()[0].value = "some"
    predict.answer("01-changed", "all 26")
    predict._asked.clear()
    assert ask() is None and "You said “some”" in shown[-1] and 'predict.forget("01-changed")' in shown[-1]
    predict.answer("01-changed", "some")
    assert "You said “some”: right." in shown[-1] and kept() == {"01-changed": ("some", "some")}
    predict.forget("01")
    assert kept() == {} and "Forgotten: 01-changed" in capsys.readouterr().out
    assert ask()[0].value is None


def test_without_a_prediction_the_question_is_open_again(reader, shown):
    """Run All shows every answer at once; whoever reads afterwards may still predict, by running the cell.

    A choice that the course no longer has is no prediction.
    """
    with predict.change() as state:
        state["01-changed"] = Given("about half", None)
    assert ask()[0].value is None
    predict.answer("01-changed", "some")
    assert "No prediction was made" in shown[-1]
    choice, _ = ask()
    assert choice.value is None
    choice.value = "some"
    assert kept() == {"01-changed": ("some", None)}


@pytest.mark.parametrize("server", [True, False], ids=["a server's kernel", "another front end"])
def test_predictions_without_widgets(monkeypatch, shown, capsys, server):
    """An era's kernel has none, another front end has no server: `say` does what a button does."""
    monkeypatch.setattr(predict, "_is_interactive", lambda: server)
    monkeypatch.setattr(predict, "_show_buttons", mock.Mock(side_effect=ModuleNotFoundError))
    assert ask() is None and 'predict.say("01-changed", "...")' in shown[-1]
    predict.say("01-changed", "some")
    assert "You said “some”" in capsys.readouterr().out and kept() == {"01-changed": ("some", None)}
    predict.answer("01-changed", "some")
    assert "You said “some”: right." in shown[-1]
    predict.say("01-changed", "none")
    assert "stays “some”" in capsys.readouterr().out and kept() == {"01-changed": ("some", "some")}


# Slips and a broken file


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: predict.answer("01-other", "some"), "01-other was not asked in this kernel. Next: run the cell above"),
        (lambda: predict.say("01-other", "some"), "01-other was not asked"),
        (lambda: predict.say("01-changed", "25"), "“25” is none of its choices. Next: one of “none”, “some”"),
        (lambda: predict.answer("01-changed", "25"), "“25” is none of its choices, .* Next: the same words"),
        (lambda: predict.answer("01-changed", {"none": 0, "some": False}), "one choice must hold, and none did. Next"),
        (lambda: predict.answer("01-changed", {"none": 1, "some": 1}), "“none”, “some” did. Next: conditions"),
        (lambda: predict.ask("01-x", "Why?", ["a"]), "two or more, all different"),
        (lambda: predict.ask("01-x", "Why?", ["a", "a"]), "two or more, all different"),
    ],
)
def test_a_slip_is_told_in_a_line(shown, call, match):
    ask()
    with pytest.raises(PredictionError, match=match) as error:
        call()
    assert "\n" not in str(error.value) and len(error.value._render_traceback_()) == 1
    assert kept() == {}


BROKEN = {
    "half": '{"schema": 1, "pred',
    "other": '{"schema": 1}',
    "list": "[]",
    "newer": '{"schema": 2, "predictions": {}}',
    "fields": '{"schema": 1, "predictions": {"01-changed": {"when": 3}}}',
    "value": '{"schema": 1, "predictions": {"01-changed": {"said": 3}}}',
    "no folder": None,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named_and_stops_nothing(planted, reader, shown, content, capsys):
    """What is said holds in this kernel; the file is left as it is, for there may be something to save in it."""
    path = predict.default_path()
    if content is None:
        path.parent.write_text("a file where the folder should be: also for root, who may write everywhere")
    else:
        path.parent.mkdir()
        path.write_text(content)
    choice, note = ask("01-a")
    choice.value = "some"
    assert note.value.startswith(html.escape("You said “some”", quote=False)) and f"{path}: " in note.value
    assert "Next: " in note.value
    predict.answer("01-a", "some", because="So it is.")
    assert shown[-1].splitlines()[0] == "You said “some”: right." and shown[-1].count(f"{path}: ") == 1
    predict.summary()
    said = capsys.readouterr().out
    assert "Right: 1 of 1" in said and f"{path}: it " in said
    with pytest.raises(PredictionError, match="Next: "):
        predict.forget("01")
    assert content is None or path.read_text() == content


def test_a_change_that_fails_leaves_the_file_whole():
    """The file is replaced by a whole one, or not at all."""
    with predict.change() as state:
        state["01-a"] = Given("x", "y")
    before = predict.default_path().read_bytes()
    with contextlib.suppress(RuntimeError), predict.change() as state:
        state["01-b"] = Given("x", "y")
        raise RuntimeError("the kernel is interrupted")
    assert predict.default_path().read_bytes() == before


# Where nobody looks


def test_where_nobody_looks_nothing_of_a_learner_is_shown_or_kept(shown, monkeypatch):
    """Papermill, nbval and the stored outputs: the same on every machine, whatever the learner there has said."""
    with predict.change() as state:
        state["01-changed"] = Given("some", None)
    monkeypatch.setenv(processes.MARK, "a-run")
    assert ask() is None
    assert shown[-1] == f"Your prediction: {TEXT}\n  ( ) none\n  ( ) some\n  ( ) all 26"
    predict.answer("01-changed", "all 26", because="Every one.")
    assert shown[-1] == "Answer: “all 26”.\nEvery one."
    predict.say("01-changed", "none")
    assert kept() == {"01-changed": ("some", None)}


# The summary


def test_the_summary_counts_what_was_predicted_only(planted, reader, shown, capsys):
    """Asked, said, came, and the verdict for each; what was not predicted, or not run, is neither right nor wrong."""
    with predict.change() as state:
        state["00-gain"] = Given("some", "some")
        state["01-a"] = Given(None, "none")
        state["09-retired"] = Given("some", "none")
        state["01-c"] = Given("a choice that the course no longer has", None)
    predict.summary()
    questions, counts = shown
    assert [line.split("  ")[0] for line in counts.splitlines()[2:]] == ["00_start", "01_two", "the course"]
    assert [line.split()[-3:] for line in counts.splitlines()[2:]] == [
        ["1", "1", "1"],
        ["2", "0", "0"],
        ["3", "1", "1"],
    ]
    assert "✓ right" in questions and "– no prediction" in questions and "– not run yet" in questions
    assert "A and b?" in questions and "retired" not in questions
    assert "Right: 1 of 1 predictions." in capsys.readouterr().out
    with predict.change() as state:
        state["01-c"] = Given("all 26", "some")
    predict.summary()
    assert "✗ not as predicted" in shown[2] and "Right: 1 of 2 predictions." in capsys.readouterr().out


def test_the_summary_without_a_reader_has_the_questions_only(planted, shown, capsys):
    with predict.change() as state:
        state["00-gain"] = Given("some", "some")
    predict.summary()
    assert len(shown[0].splitlines()) == 5 and "some" not in shown[0] and "right" not in shown[0]
    assert "3 questions." in capsys.readouterr().out


def test_a_damaged_notebook_is_named(tmp_path):
    (tmp_path / "03_bad.ipynb").write_text("{")
    with pytest.raises(ValueError, match=r"03_bad\.ipynb is no notebook"):
        predict.questions(tmp_path)


def test_marks_are_legible():
    """As a verdict table's: each brings its own ground, with a contrast of at least 7 to 1."""

    def light(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    for mark in (predict.RIGHT, predict.OTHER, predict.NONE, predict.NOT_RUN):
        assert (light(mark.ground) + 0.05) / (light(mark.ink) + 0.05) >= 7
        assert mark.words in mark.html


# A real kernel, as a Jupyter server starts one


class Kernel:
    """A kernel with what its front end is sent; `press` is what the front end sends when a button is pressed."""

    def __init__(self, environment):
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=180)
        self.widgets = {}

    def run(self, source):
        """Run a cell; return the outputs, and what came to replace one."""
        return self._until_idle(self.client.execute(source))

    def press(self, choice):
        """Press the button with this number, as the browser does."""
        (comm,) = [id for id, state in self.widgets.items() if state.get("_model_name") == "ToggleButtonsModel"]
        content = {"comm_id": comm, "data": {"method": "update", "state": {"index": choice}, "buffer_paths": []}}
        message = self.client.session.msg("comm_msg", content)
        self.client.shell_channel.send(message)
        return self._until_idle(message["header"]["msg_id"])

    def _until_idle(self, asked):
        outputs = []
        while True:
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=180)
                content, kind = message["content"], message["msg_type"]
                if message["parent_header"].get("msg_id") != asked:
                    continue
                if kind == "comm_open":
                    self.widgets[content["comm_id"]] = content["data"]["state"]
                elif kind in ("display_data", "update_display_data"):
                    outputs.append((kind, content["data"]))
                elif kind == "error":
                    raise AssertionError(content["traceback"])
                elif kind == "status" and content["execution_state"] == "idle":
                    return outputs

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


ASK = f"from failurelab_course.notebook import predict\npredict.ask('01-changed', 'How many?', {CHOICES})"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def kernel():
    """Start kernels that a server would call a notebook's; they are ended with the test."""
    started = []

    def start(**more):
        started.append(Kernel(dict(os.environ) | {"JPY_SESSION_NAME": "notebooks/01.ipynb"} | more))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_a_button_that_is_pressed_is_kept_and_answered(kernel):
    """In a real kernel: the question with its buttons, a press, the file, and the answer that knows of it."""
    learner = kernel()
    ((kind, asked),) = learner.run(ASK)
    assert kind == "display_data" and WIDGET in asked and "( ) some" in asked["text/plain"]
    learner.press(1)
    assert json.loads(predict.default_path().read_text())["predictions"]["01-changed"]["said"] == "some"
    replaced, answered = learner.run("predict.answer('01-changed', 'all 26')")
    assert (
        replaced[0] == "update_display_data" and WIDGET not in replaced[1] and "said “some”" in replaced[1]["text/html"]
    )
    assert answered[1]["text/plain"] == "You said “some”, it is “all 26”."
    assert predict.OTHER.html in answered[1]["text/html"]


def test_a_run_started_from_a_notebook_has_no_reader(kernel):
    """`!failurelab run` or nbval in a notebook's cell: the variable is inherited there, and nobody looks."""
    inside = kernel()
    made = f"""
import jupyter_client
sent = []
manager, client = jupyter_client.manager.start_new_kernel()
ran = client.execute_interactive({ASK!r}, output_hook=sent.append, timeout=180)
client.stop_channels()
manager.shutdown_kernel(now=True)
(data,) = [m["content"]["data"] for m in sent if m["msg_type"] == "display_data"]
display({{"text/plain": ran["content"]["status"] + str({WIDGET!r} in data)}}, raw=True)"""
    ((_, data),) = inside.run(made)
    assert data["text/plain"] == "okFalse"
