"""The sign of life under a cell that runs long: it comes while nothing is put out, and leaves nothing behind."""

import nbclient
import nbformat
import pytest

# A cell does not sleep: it goes on once the sign is there.
READY = (
    "import time\nfrom failurelab_course.notebook import live\n"
    "live.PATIENCE = live.STEP = 0.05\nlive.watch(get_ipython())"
)
UNTIL = "sign = get_ipython().failurelab_signs._sign\nwhile not sign._shown: time.sleep(0.01)\n"


class Client(nbclient.NotebookClient):
    """Keeps what a front-end was sent beside streams: per cell, kind and text."""

    def process_message(self, msg, cell, cell_index):
        """Keep, then go on as ever."""
        if msg["msg_type"] in ("display_data", "update_display_data", "clear_output"):
            text = msg["content"].get("data", {}).get("text/plain", "")
            self.sent = [*getattr(self, "sent", []), (cell_index, msg["msg_type"], text)]
        return super().process_message(msg, cell, cell_index)


def run(monkeypatch, *sources, watched=True):
    """Run cells as a Jupyter server's kernel would, or as papermill's; return the cells' outputs and what was sent."""
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb") if watched else monkeypatch.delenv("JPY_SESSION_NAME", False)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (READY, *sources)])
    client = Client(notebook, kernel_name="python3", allow_errors=True, timeout=300)
    client.execute()
    return [cell.outputs for cell in notebook.cells[1:]], getattr(client, "sent", [])


def test_a_silent_cell_shows_it_and_stores_nothing(monkeypatch):
    (outputs,), sent = run(monkeypatch, UNTIL)
    assert outputs == []
    shown = [each for each in sent if each[0] == 1]
    assert shown[0][1] == "display_data" and shown[0][2].startswith("still running: ")
    assert shown[-1][1] == "clear_output"


@pytest.mark.parametrize(
    ("ending", "kind"),
    [("print('said')", "stream"), ("6 * 7", "execute_result"), ("1 / 0", "error"), ("display(7)", "display_data")],
)
def test_an_output_takes_its_place(ending, kind, monkeypatch):
    """Also an error: what is cleared at a cell's end must not be its traceback."""
    (outputs,), sent = run(monkeypatch, UNTIL + ending)
    assert [output.output_type for output in outputs] == [kind]
    assert any(text.startswith("still running") for _, _, text in sent)


def test_after_an_output_it_does_not_come(monkeypatch):
    """It could not be cleared without the output that came before it."""
    wait = "print('said')\nsign = get_ipython().failurelab_signs._sign\nassert sign._over.wait(60)"
    (outputs,), sent = run(monkeypatch, wait)
    assert [output.output_type for output in outputs] == ["stream"]
    assert not [each for each in sent if each[0] == 1]


def test_an_eras_cell_names_its_era(monkeypatch):
    """The magic is a stand-in: what counts is the cell's first line."""
    magic = "get_ipython().register_magic_function(lambda line, cell: exec(cell, get_ipython().user_ns), 'cell', 'era')"
    outputs, sent = run(monkeypatch, magic, f"%%era trl-0.14 -o x\n{UNTIL}")
    assert outputs == [[], []]
    assert any(text.startswith("still running in trl-0.14: ") for _, _, text in sent)


def test_where_nobody_looks_there_is_none(monkeypatch):
    """Papermill, nbval, and so the stored outputs: nothing is hooked into the shell there."""
    (outputs,), sent = run(monkeypatch, "hasattr(get_ipython(), 'failurelab_signs')", watched=False)
    assert outputs[0].data["text/plain"] == "False"
    assert not sent
