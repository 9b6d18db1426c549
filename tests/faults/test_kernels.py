"""Faults of a notebook's kernel and of an era's: killed, stopped, out of memory, in an endless loop, with children.

A small program plays the notebook's kernel: it holds an era's kernel, as `%%era` does, and runs the cell that it is
given. The era is today's, whose kernel starts without a library of the course.
"""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from tests.faults.conftest import notebook

fault = pytest.mark.fault
PLAY = """
import os, sys
from failurelab_course.notebook import kernel
kernel.INTERRUPT_SECONDS = 3.0
era = kernel.EraKernel("today")
for cell in sys.argv[1:]:
    try:
        era.run(cell)
    except BaseException as error:  # an interrupt is none that `except Exception` takes
        print(f"{type(error).__name__}: {error}", flush=True)
era.stop()
print("ended", flush=True)
"""
CHILD = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"


@pytest.fixture
def play(case):
    """Return a function that starts the notebook's part with these cells."""

    def start(*cells, **options):
        return case.start(sys.executable, "-c", PLAY, *cells, **options)

    return start


def clean(case, play):
    case.clean(case.end(play("print('it', 'runs')")), "^it runs$")


def kernel_of(process):
    """Return the keeper and the era's kernel below it."""
    keeper, kernel = [], []
    for child in psutil.Process(process.pid).children(recursive=True):
        words = " ".join(child.cmdline())
        (kernel if "ipykernel_launcher" in words and "keeper.py" not in words else keeper).append(child)
    return next(one for one in keeper if "keeper.py" in " ".join(one.cmdline())), kernel[0]


def begun(path, rest):
    return f"{CHILD}open({str(path)!r}, 'w').write('begun')\n{rest}"


LOOP = "while True: pass"


@fault("an era's kernel is killed in a cell", "SIGKILL, as memory's end comes; it has a child in another session")
def test_an_era_s_kernel_is_killed(case, play, pipe):
    path, read = pipe
    running = play(begun(path, LOOP), "print('again')")
    assert read(running) == "begun"
    kernel_of(running)[1].kill()
    done = case.end(running)
    case.shows(done, "^EraKernelDied: the kernel of era today died while this cell ran in it .killed by SIGKILL")
    assert "its variables are lost. Next: run the cells of this era again" in case.line
    assert done.line("^again$") and done.line("^ended$")
    case.status = None
    clean(case, play)


@fault("an era's kernel is stopped in a cell, then Ctrl-C", "SIGSTOP to it, SIGINT to the notebook's kernel")
def test_an_era_s_kernel_is_stopped(case, play, pipe):
    path, read = pipe
    running = play(begun(path, LOOP))
    assert read(running) == "begun"
    kernel_of(running)[1].suspend()
    os.kill(running.pid, signal.SIGINT)
    case.shows(case.end(running), "^EraInterrupted: .*the cell still runs .* s after the interrupt. Next: %era_stop")
    case.status = None
    clean(case, play)


@fault("an era's keeper is killed", "SIGKILL to the process between both kernels")
def test_the_keeper_is_killed(case, play, pipe):
    path, read = pipe
    running = play(begun(path, LOOP))
    assert read(running) == "begun"
    kernel_of(running)[0].kill()
    case.shows(case.end(running), "^EraKernelDied: the kernel of era today died while this cell ran in it")
    case.status = None
    assert case.left() == []
    clean(case, play)


@fault("the notebook's kernel is killed in an era's cell", "SIGKILL to it; the era's has a child in another session")
def test_the_notebook_s_kernel_is_killed(case, play, pipe):
    path, read = pipe
    running = play(begun(path, LOOP))
    assert read(running) == "begun"
    running.kill()
    case.end(running)
    assert case.left() == []
    case.line, case.status = "JupyterLab's own: the kernel has died, it will restart", None
    clean(case, play)


@fault("an era's cell runs out of memory", "a limit of 1 GB of data on the era's kernel")
def test_an_era_s_cell_runs_out_of_memory(case, play):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (10**9, 10**9))"
    done = case.end(play(limit, "held = bytearray(2 * 10**9)", "print('and', 'on')"))
    case.shows(done, "^EraCellError: .*MemoryError")
    assert done.line("^and on$")
    case.status = None
    clean(case, play)


@fault("an era's cell hangs, then Ctrl-C", "an endless loop, SIGINT to the notebook's kernel")
def test_an_era_s_cell_hangs(case, play, pipe):
    path, read = pipe
    running = play(begun(path, LOOP), "print('and', 'on')")
    assert read(running) == "begun"
    os.kill(running.pid, signal.SIGINT)
    done = case.end(running)
    case.shows(done, "^EraInterrupted: .*interrupted")
    assert done.line("^and on$")
    case.status = None
    clean(case, play)


@fault("an era's cell prints 100 MB", "a hundred prints of a million bytes")
def test_an_era_s_cell_prints_100_mb(case, play):
    done = case.end(play("for _ in range(100): print('x' * 10**6)\nprint('the', 'end')"))
    assert done.out.count("x") >= 10**8
    done.out = done.out.replace("x" * 10**6, "")
    case.shows(done, "^the end$", 0)
    clean(case, play)


@fault("an era's cell asks for input", "input(), where nobody can answer")
def test_an_era_s_cell_asks_for_input(case, play):
    case.shows(case.end(play("input()")), "^EraCellError: .*StdinNotImplementedError", 0)
    clean(case, play)


@fault("an era's cell forks", "a forked child that sleeps, and one that leaves its session")
def test_an_era_s_cell_forks(case, play):
    cell = (
        "import os, time\nfor _ in range(2):\n    if not os.fork():\n        os.setsid(); time.sleep(1000); os._exit(0)"
    )
    case.shows(case.end(play(f"{cell}\nprint('the', 'end')")), "^the end$", 0)
    clean(case, play)


@fault("a disk without room for an era's kernel", "the temporary folder is a tmpfs with 2 inodes")
def test_no_room_for_a_kernel(case, play, mount):
    mount(case.temporary, "nr_inodes=2")
    done = case.end(play("print('it', 'runs')"))
    case.shows(done, "^EraMagicError: the kernel of era today cannot be started: .*No space left on device.*Next: ")
    case.status = None
    subprocess.run(["mount", "-o", "remount,nr_inodes=1000", str(case.temporary)], check=True)
    clean(case, play)
    case.look()
    mount.end(case.temporary)


RUNS = {
    "a notebook's kernel is killed in a cell": (
        "SIGKILL to itself, with a child in another session",
        f"{CHILD}import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "it crashed, or the system ended it: memory may have run out",
        (1, 3),
    ),
    "a notebook's cell hangs": (
        "an endless loop, over the time limit",
        f"{CHILD}while True: pass",
        "over its time limit of 15 s",
        (1,),
    ),
    "a notebook's cell ends its kernel": ("os._exit(0)", "import os\nos._exit(0)", "it crashed, or the system", (1, 3)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=fault(name, how), id=name) for name, (how, *_) in RUNS.items()]
)
def test_a_run(case, room, name):
    """`failurelab run` of one notebook."""
    _, cell, line, statuses = RUNS[name]
    mine = room.notebook.read_text()
    room.notebook.write_text(notebook("first = 1", cell))
    case.kept = room.kept()
    done = case.run("run", "01", "--out", "results", "--time-limit", "15")
    case.shows(done, line)
    assert done.status in statuses
    room.notebook.write_text(mine)
    case.kept = room.kept()
    case.clean(case.run("run", "01", "--out", "results"), "1 of 1 PASS")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=fault("Ctrl-C during a run", "SIGINT to the command's group"), id="ctrl-c"),
        pytest.param(signal.SIGTERM, marks=fault("`failurelab run` is ended", "SIGTERM to the command"), id="ended"),
        pytest.param(signal.SIGKILL, marks=fault("`failurelab run` is killed", "SIGKILL to the command"), id="killed"),
    ],
)
def test_a_run_that_is_ended(case, room, pipe, number):
    path, read = pipe
    mine = room.notebook.read_text()
    room.notebook.write_text(notebook(begun(path, LOOP)))
    case.kept = room.kept()
    running = case.start("run", "01", "--out", "results")
    assert read(running) == "begun"
    if number != signal.SIGKILL:
        os.killpg(running.pid, number) if number == signal.SIGINT else running.terminate()
        case.shows(case.end(running), "01_mine: interrupted")
    else:
        running.kill()
        case.end(running)
        case.line, case.status = "nothing: the command itself is gone", -9
    assert case.left() == []
    room.notebook.write_text(mine)
    case.kept = room.kept()
    case.clean(case.run("run", "01", "--out", "results"), "1 of 1 PASS")
    for path in case.temporary.glob("failurelab-run-*" if number == signal.SIGKILL else "nothing"):
        shutil.rmtree(path)  # of the command that was killed: nobody is there to remove it


@fault("two runs at once write evidence", "two commands with one folder for their results, each with two records")
def test_two_runs_write_evidence(case, room):
    """Every record of both is whole: each kernel has a file of its own."""
    cell = (
        "from failurelab_course.experiments import observe\n"
        "for n in range(50): observe.record('ground', 'measured', {'n': n}, case=NAME)"
    )
    for number in ("02", "03"):
        path = room.folder / "notebooks" / f"{number}_measures.ipynb"
        path.write_text(notebook(f"NAME = '{number}'", cell))
    runs = [case.start("run", number, "--out", "results") for number in ("02", "03")]
    done = [case.end(run) for run in runs]
    for one in done:
        case.shows(one, "1 of 1 PASS", 0)
    lines = [line for path in (room.folder / "results").rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == 100
    case.clean(case.run("run", "02", "--out", "results"), "1 of 1 PASS")


@fault("the disk is full at a run's results", "the folder of results is a tmpfs with 64 KiB")
def test_no_room_for_results(case, room, mount):
    room.notebook.write_text(notebook("print('x' * 200_000)"))
    case.kept = room.kept()
    folder = mount(room.folder / "results", "size=64k")
    done = case.run("run", "01", "--out", "results")
    case.shows(done, "No space left on device", 3)
    subprocess.run(["mount", "-o", "remount,size=20m", str(folder)], check=True)
    case.clean(case.run("run", "01", "--out", "results"), "1 of 1 PASS")
    case.look()
    mount.end(folder)
