"""Predictions: asked before a run, answered after the reader has chosen; shown at once where nobody looks."""

import pytest
from tests.kernels import PATIENCE, Notebook

from failurelab_course.notebook import predict

CHOICES = ["none", "some", "all 26"]
ASK = f"from failurelab_course.notebook import predict\npredict.ask('01-changed', 'How many?', {CHOICES})"
ANSWER = "predict.answer('01-changed', 'all 26', because='Every one.')"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def shown(monkeypatch):
    """What is put out as text where nobody looks, in order."""
    texts = []
    monkeypatch.setattr(predict, "_asked", {})
    monkeypatch.setattr(predict.notebook, "_display", lambda data, _: texts.append(data["text/plain"]))
    return texts


def test_where_nobody_looks_the_answer_is_shown_at_once(shown):
    """Papermill, nbval and the stored outputs: the same on every machine, and no widget."""
    predict.ask("01-changed", "How many of the `26` tensors change?", CHOICES)
    changed = 26
    holds = {"none": changed == 0, "some": 0 < changed < 26, "all 26": changed == 26}
    predict.answer("01-changed", holds, because="Every one.")
    assert shown == [
        "Your prediction: How many of the `26` tensors change?\n  ( ) none\n  ( ) some\n  ( ) all 26",
        "Answer: “all 26”.\nEvery one.",
    ]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: predict.answer("01-other", "some"), "01-other was not asked in this kernel. Next: run the cell above"),
        (lambda: predict.answer("01-changed", "25"), "“25” is none of its choices, .* Next: the same words"),
        (lambda: predict.answer("01-changed", {"none": 1, "some": 1}), "“none”, “some” did. Next: conditions"),
        (lambda: predict.ask("01-x", "Why?", ["a", "a"]), "two or more, all different"),
    ],
)
def test_a_slip_is_told_in_a_line(shown, call, match):
    predict.ask("01-changed", "How many?", CHOICES)
    with pytest.raises(predict.PredictionError, match=match) as error:
        call()
    assert "\n" not in str(error.value) and len(error.value._render_traceback_()) == 1


def test_a_number_is_asked_for_and_shown_at_once_where_nobody_looks(shown):
    predict.ask_number("04-memory", "How much for `7B`?", "GiB")
    predict.answer_number("04-memory", 13.25, because="Two bytes a weight.")
    assert shown == [
        "Your prediction: How much for `7B`?\n  ____ GiB",
        "Measured: 13.2 GiB.\nTwo bytes a weight.",
    ]


@pytest.fixture(scope="module")
def learner():
    """A kernel that a server would call a notebook's."""
    started = Notebook(JPY_SESSION_NAME="notebooks/01.ipynb")
    yield started
    started.end()


def displays(messages):
    return [(kind, content["data"]) for kind, content in messages if kind.endswith("display_data")]


def send(learner, asked, model, state):
    """Change a widget of this model, as the browser does; return what is displayed for that."""
    states = {content["comm_id"]: content["data"]["state"] for kind, content in asked if kind == "comm_open"}
    (comm,) = [id for id, known in states.items() if known.get("_model_name") == model]
    content = {"comm_id": comm, "data": {"method": "update", "state": state, "buffer_paths": []}}
    pressed, sent = learner.client.session.msg("comm_msg", content), []
    learner.client.shell_channel.send(pressed)
    while not sent or sent[-1][1].get("execution_state") != "idle":
        message = learner.client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") == pressed["header"]["msg_id"]:
            sent.append((message["msg_type"], message["content"]))
    return displays(sent)


@pytest.mark.parametrize(
    ("order", "choice", "told"),
    [
        ("choose, then run", 2, "“all 26”: right."),
        ("Run All, then choose", 1, "“some”, it is “all 26”."),
    ],
)
def test_an_answer_waits_for_the_choice(learner, order, choice, told):
    """The question with its buttons; the answer stands beside what was chosen, and HTML takes the buttons' place."""
    pressed = "ToggleButtonsModel", {"index": choice}
    question = learner.run(ASK).messages
    ((kind, asked),) = displays(question)
    assert kind == "display_data" and WIDGET in asked and "( ) some" in asked["text/plain"]
    if order == "choose, then run":
        assert send(learner, question, *pressed) == []
        sent = displays(learner.run(ANSWER).messages)
    else:
        ((kind, waits),) = displays(learner.run(ANSWER).messages)
        assert kind == "display_data" and "waits" in waits["text/plain"] and "26" not in waits["text/html"]
        sent = send(learner, question, *pressed)
    replaced, answered = [data for kind, data in sent if kind == "update_display_data"]
    assert WIDGET not in replaced and f"You said “{CHOICES[choice]}”." in replaced["text/html"]
    assert answered["text/plain"] == f"You said {told}\nEvery one."


def test_a_run_that_came_out_otherwise_is_no_error_to_a_reader(learner):
    """“conditions that cover every outcome once” is for the author; a reader hears what to do next."""
    learner.run(ASK)
    ran = learner.run("predict.answer('01-changed', {'none': True, 'some': True})")
    ((_, said),) = displays(ran.messages)
    assert not ran.error and "Restart Kernel" in said["text/plain"] and "conditions" not in said["text/html"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("1,400", "You said “1,400 GiB”: right, measured: 1,500 GiB."),
        ("7", "You said “7 GiB”, measured: 1,500 GiB."),
    ],
)
def test_a_number_is_compared_with_the_figure(learner, said, told):
    """What is no number gets a line, and the answer goes on waiting."""
    ask = "from failurelab_course.notebook import predict\npredict.ask_number('04-memory', 'How much?', 'GiB')"
    asked = learner.run(ask).messages
    learner.run("predict.answer_number('04-memory', 1500)")
    for wrong in ("much", "nan", "50 %", "1,5", "1e999"):  # 1,5 is 1.5 for many, and never 15
        assert send(learner, asked, "TextModel", {"value": wrong}) == []
    sent = send(learner, asked, "TextModel", {"value": said})
    _, answered = [data for kind, data in sent if kind == "update_display_data"]
    assert answered["text/plain"] == told


def test_a_run_started_from_a_notebook_has_no_reader(learner):
    """`!failurelab run` or nbval in a notebook's cell: the variable is inherited there, and nobody looks."""
    made = f"""
import jupyter_client
sent = []
manager, client = jupyter_client.manager.start_new_kernel()
ran = client.execute_interactive({ASK!r}, output_hook=sent.append, timeout=180)
client.stop_channels()
manager.shutdown_kernel(now=True)
(data,) = [m["content"]["data"] for m in sent if m["msg_type"] == "display_data"]
ran["content"]["status"], {WIDGET!r} in data"""
    assert learner.run(made).value == "('ok', False)"
