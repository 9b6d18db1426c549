"""A class on one server: seats that work at once, and what goes wrong at one of them while the others go on."""

import concurrent.futures
import os
import pathlib
import socket

import hub
import pytest
import seat

NOTEBOOK = "notebooks/01_requires_grad_warning.ipynb"


def log_in(class_: hub.Hub, name: str) -> seat.Seat:
    return seat.Seat(class_.url, name, class_.users[name])


def test_two_seats_run_a_notebook_at_once_and_others_fail_beside_them(room):
    """Five learners come. Two run notebook 01; one asks for too much memory, one's kernel is killed, one has no home.

    All files of the course are read-only, for root too. So what the two see is what the notebook stores, or something
    wants to write where learners share.
    """
    with hub.Hub(room, seats=5) as class_:
        workers = [log_in(class_, name) for name in ("seat1", "seat2")]
        greedy, killed, homeless = (log_in(class_, name) for name in ("seat3", "seat4", "seat5"))
        os.chown(room / "home" / "seat5", 0, 0)
        with concurrent.futures.ThreadPoolExecutor() as room_of_learners:
            list(room_of_learners.map(seat.Seat.open, workers))
            runs = [room_of_learners.submit(each.run, NOTEBOOK) for each in workers]
            check_greedy(greedy)
            check_killed(killed)
            check_homeless(homeless, class_)
            done = [run.result() for run in runs]
        for cells in done:
            assert not [
                seat.text_of(c["outputs"]) for c in cells if "error" in {o["output_type"] for o in c["outputs"]}
            ]
            stored = hub.expected(hub.ROOT / NOTEBOOK)
            assert len(stored) >= 8
            assert {c["id"]: hub.said(c["outputs"]) for c in cells if hub.compared(c)} == stored
        check_shared(workers[0], room)
        workers[0].close()
        assert not class_.wait_until_gone("seat1") and class_.processes("seat2")
    assert class_.left == [], "a seat outlived its hub"


def check_greedy(learner: seat.Seat) -> None:
    """More than the limit: an error in that cell, the reason under it, and the kernel lives."""
    learner.open()
    kernel = seat.Kernel(learner)
    said = seat.text_of(kernel.run("much = bytearray(64 << 30)"))
    assert "MemoryError" in said and "a process of this seat may hold 6144 MiB" in said and "Next: " in said
    said = seat.text_of(kernel.run("import torch\nmuch = torch.ones(64 << 30, dtype=torch.uint8)"))
    assert "you tried to allocate" in said and "This cell ran out of memory" in said
    assert seat.text_of(kernel.run("print(6 * 7)")) == "42\n"
    kernel.end()


def check_killed(learner: seat.Seat) -> None:
    """What the system does where memory runs out: the kernel is named as dead, and the next one works."""
    learner.open()
    kernel = seat.Kernel(learner)
    # Seats are ended before the hub, and before the system's own programs.
    assert seat.text_of(kernel.run("print(open('/proc/self/oom_score_adj').read().strip())")) == "500\n"
    assert "KernelDied: restarting" in seat.text_of(kernel.run("import os\nos.kill(os.getpid(), 9)"))
    kernel.end()
    kernel = seat.Kernel(learner)
    assert seat.text_of(kernel.run("print(6 * 7)")) == "42\n"
    kernel.end()


def check_homeless(learner: seat.Seat, class_: hub.Hub) -> None:
    """A home folder that is not the learner's: the hub says so; mended, the seat opens."""
    home = class_.room / "home" / learner.name
    line = f"your copy of the course, {home}/failurelab, cannot be made: Permission denied. Next: "
    with pytest.raises(seat.SeatFailed) as told:
        learner.open()
    assert line in str(told.value)
    os.chown(home, class_.ids[learner.name], -1)
    learner.open()


def check_shared(learner: seat.Seat, room: pathlib.Path) -> None:
    """Copies are the learner's own; the rest is linked, and cannot be written, by root neither."""
    copy = room / "home" / learner.name / "failurelab"
    start = copy / "labs" / "01_frozen_embeddings" / "start.py"
    assert start.is_file() and start.stat().st_uid != 0
    assert (copy / "helpers").is_symlink() and (copy / ".eras").is_symlink()
    kernel = seat.Kernel(learner)
    for place in ("helpers/failurelab", ".venv", ".eras/trl-0.14", ".hub/course/kernels"):
        said = seat.text_of(kernel.run(f"open('{hub.ROOT / place}/written', 'w')"))
        assert "Read-only file system" in said
    asked = "import subprocess; print(subprocess.run(['failurelab', 'lab', 'list'], capture_output=True, text=True))"
    assert "returncode=0" in seat.text_of(kernel.run(asked))
    kernel.end()


def test_no_port_is_left(room):
    """Two learners and one port: the second finds none, the first goes on; closed, it gives the port back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with hub.Hub(room, seats=2, FAILURELAB_SEAT_PORTS=f"{port}-{port}") as class_:
        first, second = (log_in(class_, name) for name in class_.users)
        first.open()
        with pytest.raises(seat.SeatFailed, match=f"the server is out of ports: none from {port} to {port} is free"):
            second.open()
        first.close()
        second.open()  # the port was given back
        assert second.ask("GET", f"{second.url}/api/status")["kernels"] == 0
        assert not class_.wait_until_gone("seat1")
    assert class_.left == []


def test_no_seat_is_left(room):
    """JupyterHub's own limit: who comes too late is told."""
    with hub.Hub(room, seats=2, FAILURELAB_SEATS="1") as class_:
        first, second = (log_in(class_, name) for name in class_.users)
        first.open()
        with pytest.raises(seat.SeatFailed, match="429"):
            second.open()
        assert first.ask("GET", f"{first.url}/api/status")["kernels"] == 0
    assert class_.left == []


def test_a_port_of_the_class_is_taken(room):
    """One line, exit status 1, and nothing was started."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        class_ = hub.Hub(room, seats=1, FAILURELAB_HUB_PORT=str(port))
        assert class_.run() == 1
    said = class_.log.strip().splitlines()
    assert len(said) == 1 and said[0].startswith(f"ERROR port {port}, for the class, is taken by another program")
    assert class_.processes() == []


def test_a_class_that_does_not_fit(room):
    """More seats than memory: refused before anybody has logged in, with the number that would fit."""
    class_ = hub.Hub(room, seats=1, FAILURELAB_SEATS="100000")
    assert class_.run() == 1
    said = class_.log.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("ERROR 100000 seats do not fit") and "would fit. Next: " in said[0]
