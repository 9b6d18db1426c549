"""`%%era`: cells of a real notebook kernel run in another library stack, and nothing of it is left behind."""

import base64
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal

import psutil
import pytest
from tests.files import write_program
from tests.kernels import PATIENCE, Notebook

from failurelab_course import eras
from failurelab_course.notebook import magics, values
from failurelab_course.notebook.kernel import EraInterrupted, EraKernel

pytestmark = pytest.mark.slow

OLD = "trl-0.14"


def _notebook():
    started = Notebook()
    load = "%load_ext failurelab_course.notebook.magics\nfrom failurelab_course.notebook import magics"
    assert started.run(load).status == "ok"
    yield started
    started.end()


notebook = pytest.fixture(_notebook, scope="module", name="notebook")
own_notebook = pytest.fixture(_notebook, name="own_notebook")


def interrupted(notebook, cell):
    return notebook.run(cell, "runs", lambda _: notebook.manager.interrupt_kernel())


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_text_values_and_the_result_come_back(notebook):
    assert notebook.run("a, b, c = [1, 2.5], {'x': None}, 'é'").status == "ok"
    output = notebook.run(
        f"%%era {OLD} -i a,b -i c -o total,versions -o nothing\n"
        "import importlib.metadata, sys\n"
        "print(a, b, c)\n"
        "print('careful', file=sys.stderr)\n"
        "total, nothing = sum(a) * float('inf'), (None, True)\n"
        "versions = {'trl': importlib.metadata.version('trl'), 'torch': 'torch' in sys.modules}\n"
        "sys.prefix"
    )
    assert (output.status, output.text, output.errors) == ("ok", "[1, 2.5] {'x': None} é\n", "careful\n")
    assert output.kinds == ["execute_result"]
    assert output.messages[0][1]["data"] == {"text/plain": repr(str(eras.find(OLD).folder))}
    after = notebook.run("print(total, versions, nothing)")
    # A kernel starts in about a second, for torch is imported when it is asked for.
    assert after.text == "inf {'trl': '0.14.0', 'torch': False} [None, True]\n"


def test_the_kernel_lives_on_and_is_not_this_one(notebook):
    """Variables stay between cells, apart from the notebook's own; `today` is a process of its own, started early.

    It imports trl in the background, without noise. A cell runs in several eras: what comes back is told apart.
    """
    output = notebook.run("magics.start('today')\nprint(magics.kernel('today')._ready)\nhere = 1")
    assert (output.status, output.text) == ("ok", "False\n")
    notebook.run(f"%%era {OLD}\nthere = 2")
    assert notebook.run(f"%%era {OLD} -o pid\nimport os; pid = os.getpid(); print(there, 'here' in dir())").text == (
        "2 False\n"
    )
    cell = (
        "%%era today -o today\nimport os, sys\nprint('trl.trainer.grpo_trainer' in sys.modules, 'GRPOTrainer' in dir())"
    )
    output = notebook.run(f"{cell}\nimport trl; today = os.getpid(); print(trl.__version__)")
    assert (output.text, output.errors) == (f"True False\n{importlib.metadata.version('trl')}\n", "")
    assert notebook.run("import os; print(len({pid, today, os.getpid()}), 'there' in dir())").text == "3 False\n"
    cell = "import os\ncame = [here + 1, os.environ['FAILURELAB_ERA']]"
    assert notebook.run(f"%%era {OLD},today -i here -o came\n{cell}").status == "ok"
    assert notebook.run("came").value == f"{{'{OLD}': [2, '{OLD}'], 'today': [2, 'today']}}"
    assert notebook.run(f"%%era {OLD}\nprint(came[1])").text == f"{OLD}\n"
    error = notebook.run(f"%%era {OLD},today --raises KeyError\n{{}}[0]").error
    assert error["ename"] == "EraMagicError" and "in several eras. Next: show the error in one" in error["evalue"]


def test_pictures_come_back_as_png(notebook):
    """Pictures of matplotlib are inline, without a magic; other displays, updates and clearing come back in order."""
    output = notebook.run(
        f"%%era {OLD}\n"
        "import matplotlib.pyplot as plt\n"
        "from IPython.display import HTML, clear_output, display\n"
        "handle = display(HTML('<b>1</b>'), display_id=True)\n"
        "handle.update(HTML('<b>2</b>'))\n"
        "clear_output(wait=True)\n"
        "plt.plot([1, 2]);"
    )
    assert output.status == "ok" and output.errors == ""
    assert output.kinds == ["display_data", "update_display_data", "clear_output", "display_data"]
    first, update = output.messages[0][1], output.messages[1][1]
    assert first["transient"] == update["transient"] and update["data"]["text/html"] == "<b>2</b>"
    assert base64.b64decode(output.messages[-1][1]["data"]["image/png"]).startswith(b"\x89PNG")


def test_an_error_fails_the_cell_with_the_era_s_own_traceback(notebook):
    """The traceback is the old stack's and counts lines as the reader does; no frame of ours; the cell has failed.

    Nobody can answer a question of another kernel, so asking one fails at once.
    """
    output = notebook.run(f"%%era {OLD} -o never\n\ndef divide():\n    1 / 0\ndivide()")
    assert output.status == "error" and output.error["ename"] == "EraCellError"
    assert output.error["evalue"] == f"ZeroDivisionError: division by zero (in era {OLD})"
    assert "----> 5 divide()" in output.traceback and "----> 4     1 / 0" in output.traceback
    assert "notebook/kernel.py" not in output.traceback and output.traceback.count("Traceback") == 1
    assert notebook.run("never").error["ename"] == "NameError"
    output = notebook.run(f"%%era {OLD}\ninput('your name? ')")
    assert output.status == "error" and "does not support input requests" in output.error["evalue"]


def test_a_cell_that_must_end_in_an_error(notebook):
    expected = '%%era trl-0.14 --raises "no grad here"\nkept = 7\n'
    shown = notebook.run(expected + "raise RuntimeError('there is no grad here')")
    assert (shown.status, shown.text) == ("ok", "RuntimeError: there is no grad here (expected)\n")
    assert notebook.run("%%era trl-0.14\nkept").value == "7"
    whole = f"%%era {OLD} --raises JSONDecodeError --traceback\nimport json, torch\njson.loads('')"
    lines = notebook.run(whole).text.splitlines()
    assert lines[:3] == [
        "Traceback (most recent call last):",
        '  File "the cell", line 3, in <module>',
        "    json.loads('')",
    ]
    assert lines[-1].startswith("JSONDecodeError: ") and not any("/bin/" in line or "IPython" in line for line in lines)
    assert notebook.run(expected + "raise KeyError('another')").error["ename"] == "EraCellError"
    assert "ended without the error that it was to show: 'no grad here'" in notebook.run(expected).traceback


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%%era trl-0.13\n1", "unknown era 'trl-0.13'"),
        (f"%%era {OLD} -x\n1", "-x"),
        (f"%%era {OLD} -i no_such\n1", "-i: no_such"),
        (f"%%era {OLD} -i magics\n1", "-i: magics"),
        (f"%%era {OLD} -o no_such\n1", f"-o (era {OLD}): no_such"),
    ],
)
def test_bad_input_is_one_line(notebook, cell, message):
    output = notebook.run(cell)
    assert output.status == "error" and output.error["ename"] == "EraMagicError"
    assert message in output.error["evalue"] and output.error["traceback"] == [
        f"EraMagicError: {output.error['evalue']}"
    ]


def test_an_interrupt_reaches_the_era_and_keeps_its_variables(notebook, gone):
    """Stop in the notebook stops the old stack's cell, shows where it was, and costs nothing else.

    One that handles it goes on; one that cannot be interrupted is told in bounded time, and stopping its era ends it.
    """
    loop = f"%%era {OLD}\nimport os, time\nkept = 7\nprint('runs', os.getpid())\nwhile True: time.sleep(0.05)"
    output = interrupted(notebook, loop)
    assert output.status == "error" and output.error["ename"] == "EraInterrupted"
    assert "KeyboardInterrupt" in output.traceback and "time.sleep(0.05)" in output.traceback
    assert notebook.run(f"%%era {OLD}\nkept").value == "7"
    output = interrupted(
        notebook,
        f"%%era {OLD} -o saved\ntry:\n    print('runs')\n    while True: time.sleep(0.05)\n"
        "except KeyboardInterrupt:\n    saved = True",
    )
    assert output.status == "ok" and notebook.run("saved").value == "True"
    notebook.run("from failurelab_course.notebook import kernel; kernel.INTERRUPT_SECONDS = 0.5")
    ignores = loop.replace("kept = 7", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    output = interrupted(notebook, ignores)
    assert output.error["ename"] == "EraInterrupted" and f"Next: %era_stop {OLD}" in output.error["evalue"]
    assert notebook.run(f"kernel.INTERRUPT_SECONDS = 15\n%era_stop {OLD}").status == "ok"
    assert gone([int(output.text.split()[1])]) == []


def test_an_interrupt_at_any_moment_reaches_the_era(monkeypatch):
    """Also one that comes while the kernel's life is looked at, in the handler of another exception."""
    kernel, looks = magics.kernel(OLD), []

    def look(how):
        looks.append(how)
        if len(looks) == 1:
            signal.raise_signal(signal.SIGINT)

    try:
        kernel.run("import time")
        monkeypatch.setattr(kernel, "_check_alive", look)
        with pytest.raises(EraInterrupted):
            kernel.run("while True: time.sleep(0.05)")
        assert kernel.run("kept = 1", fetch=["kept"]) == {"kept": 1}
    finally:
        magics.stop(OLD)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL, which the system sends when memory runs out"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    ],
)
def test_a_crash_names_the_era_and_the_next_cell_starts_anew(notebook, gone, end, how):
    start = f"%%era {OLD} -o child\nimport os, subprocess\nchild = subprocess.Popen(['sleep', '1000']).pid\nchild"
    child = int(notebook.run(start).value)
    output = notebook.run(f"%%era {OLD}\n{end}")
    assert output.status == "error" and output.error["ename"] == "EraKernelDied"
    assert output.error["evalue"].startswith(f"the kernel of era {OLD} died while this cell ran in it ({how});")
    assert ("in string_at" in output.error["evalue"]) == ("SIGSEGV" in how)
    assert gone([child]) == []
    assert notebook.run(f"%%era {OLD}\n'child' in dir()").value == "False"


def test_an_end_between_two_cells_is_told_unless_it_was_asked_for(notebook, gone):
    """Had the next cell started a new kernel without a word, it would complain of variables that were there before."""
    pid = int(notebook.run(f"%%era {OLD}\nimport os; os.getpid()").value)
    os.kill(pid, signal.SIGKILL)
    assert gone([pid]) == []
    output = notebook.run(f"%%era {OLD}\n1")
    assert output.error["ename"] == "EraKernelDied" and "variables are lost" in output.error["evalue"]
    assert notebook.run(f"%%era {OLD}\nvalue = 1\nexit()").status == "ok"
    assert notebook.run(f"%%era {OLD}\n'value' in dir()").value == "False"


# One starts plain processes, one in a session of its own, and one whose parent has gone: all are the kernel's.
CHILDREN = f"""%%era {OLD} -o pids
import os, subprocess
children = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sleep", "1000"], start_new_session=True)]
orphan = int(subprocess.check_output("sleep 1000 >/dev/null & echo $!", shell=True))
pids = [os.getpid(), orphan, *(child.pid for child in children)]
"""
# It holds every pipe of the notebook's kernel, so that an end of file alone would come too late.
FORK = "import os, time\nchild = os.fork()\nif not child:\n    os.setsid(); time.sleep(1000); os._exit(0)\nchild"
# A call of C that holds the interpreter: no thread of the era's kernel can look for its parent meanwhile. A flush of
# ipykernel 7 returns before its text is sent; the second one returns after that.
BUSY = f"""%%era {OLD}
import ctypes, sys
print('busy', flush=True); sys.stdout.flush()
ctypes.PyDLL(None).sleep(1000)"""


@pytest.mark.parametrize("how", ["restart", "shutdown", "SIGKILL in a long call, and a fork lives on"])
def test_no_kernel_outlives_the_notebook_s_own(own_notebook, gone, how):
    kernel, *children = json.loads(own_notebook.run(CHILDREN + "pids").value)
    assert len(children) == 3 and all(map(running, [kernel, *children]))
    folder = pathlib.Path(psutil.Process(kernel).environ()["FAILURELAB_KERNEL_LOG"]).parent
    assert folder.is_dir()
    fork = None
    if how == "restart":
        own_notebook.manager.restart_kernel()
    elif how == "shutdown":
        own_notebook.manager.shutdown_kernel()
    else:
        fork = int(own_notebook.run(FORK).value)
        own_notebook.client.execute(BUSY)
        while own_notebook.client.get_iopub_msg(timeout=PATIENCE)["msg_type"] != "stream":
            pass
        own_notebook.manager.signal_kernel(signal.SIGKILL)
    try:
        assert gone([kernel]) == []
        assert fork is None or running(fork), "the fork was to live on"
        assert fork or gone(children) == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for pid in filter(running, [*children, *([fork] if fork else [])]):
            os.kill(pid, signal.SIGKILL)


def test_a_kernel_that_never_starts_shows_why(tmp_path):
    kernel = EraKernel("today")
    kernel.era = dataclasses.replace(kernel.era, name="broken", folder=tmp_path)
    write_program(kernel.era.python, "#!/bin/sh\necho 'no module named ipykernel' >&2\nexit 5\n")
    with pytest.raises(magics.EraKernelDied, match=r"did not start \(exit status 5\)") as caught:
        kernel.run("1")
    assert "Next: failurelab eras remove broken" in str(caught.value)
    assert "ipykernel" in str(caught.value)
    assert not kernel.alive


def test_the_python_interface_works_without_a_notebook(capsys):
    kernel = magics.kernel(OLD)
    try:
        assert kernel.run("print('hello')\ny = x + 1\ny", send={"x": 1}, fetch=["y"]) == {"y": 2}
        assert capsys.readouterr().out == "hello\n2\n"
        child = os.fork()
        if not child:
            try:
                magics.stop()  # what a forked worker's exit does: these kernels are not its own to stop
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert kernel.run("", fetch=["y"]) == {"y": 2}
    finally:
        magics.stop(OLD)
    assert not kernel.alive


def test_values_are_carried_whole_or_refused():
    """JSON alone would turn a key 1 into "1" and a list within itself into an endless recursion."""
    carried = {"a": [1, -0.5, True, None, "ü"], "b": {"c": {"d": []}}, "e": float("-inf")}
    assert json.loads(values.pack(carried)) == carried
    loop = []
    loop.append(loop)
    for value in (loop, [{2: 3}], [range(2)]):
        with pytest.raises(values.NotSendable):
            values.pack({"v": value})
