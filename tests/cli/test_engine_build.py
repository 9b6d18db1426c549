"""DeepSpeed's operation, as set-up has built it, and how its processes end; not in every era: all have one torch."""

import os
import shutil
import subprocess
import sys

import pytest
from tests.files import write_program

from failurelab_course.experiments import deepspeed

pytestmark = pytest.mark.slow

START = """
from failurelab_course.experiments import deepspeed
with deepspeed.one_process():
    print("READY")
"""

# A thread that torch has called from C++, as gloo's are, still works in Python when the script is through. The
# callback is there before its future is done, so it runs in that thread and in no other.
STILL_AT_WORK = """
import os, threading
from failurelab_course.experiments import deepspeed
deepspeed.end_without_teardown()
import torch
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
torch.distributed.init_process_group("gloo")

at_work = threading.Event()

def still(future):
    at_work.set()
    while True:
        pass

promised = torch.futures.Future()
held = promised.then(still), torch.distributed.group.WORLD
threading.Thread(target=promised.set_result, args=(None,), daemon=True).start()
at_work.wait()
print("READY")
"""


@pytest.mark.parametrize("last, status", [("", 0), ("raise ValueError('mine')", 1)])
def test_a_thread_that_is_still_at_work_does_not_end_a_process_in_an_abort(last, status):
    done = subprocess.run([sys.executable, "-c", STILL_AT_WORK + last], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (status, "READY\n"), done.stderr
    assert ("ValueError: mine" in done.stderr) == bool(last)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="NOT RUN: there is no C++ compiler")
def test_a_half_done_build_is_recovered(tmp_path):
    """A killed build leaves a lock, on which every later process waits for good, and half a library.

    A stand-in for the compiler copies what set-up has compiled (ninja's commands end with the file to make). The
    system's ninja comes first on the path: another release of it would build again what is there, and is not asked.
    """
    folder = tmp_path / deepspeed.OPERATION
    folder.mkdir()
    (folder / "lock").touch()
    (folder / f"{deepspeed.OPERATION}.so").write_bytes(b"\x7fELF")
    programs = tmp_path / "programs"
    built = deepspeed.extensions() / deepspeed.OPERATION
    write_program(
        programs / "c++",
        "#!/bin/sh\nfor output; do :; done\n"
        f'case "$output" in *.o|*.so) exec cp "{built}/$output" "$output";; esac\nexec {shutil.which("c++")} "$@"\n',
    )
    write_program(programs / "ninja", f"#!/bin/sh\necho used >> {tmp_path / 'used'}\nexit 1\n")
    kept = {key: value for key, value in os.environ.items() if key not in (*deepspeed.LAUNCHED, "LOCAL_WORLD_SIZE")}
    kept |= {"PATH": f"{programs}:{os.environ['PATH']}", "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", START], env=kept, capture_output=True, text=True, timeout=300)
    assert "READY" in done.stdout, done.stdout + done.stderr
    assert not (folder / "lock").exists() and not (tmp_path / "used").exists()
    assert (folder / f"{deepspeed.OPERATION}.so").stat().st_size > 10_000


def test_an_era_that_cannot_be_written(tmp_path, monkeypatch):
    """Shared read-only: torch's lock and ninja's log of DeepSpeed's operation go into a copy at home, once."""
    shared = tmp_path / "era" / "torch_extensions"
    (shared / deepspeed.OPERATION).mkdir(parents=True)
    (shared / deepspeed.OPERATION / "built.so").write_text("whole")
    os.utime(shared / deepspeed.OPERATION / "built.so", (1, 1))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(shared))
    assert deepspeed.extensions() == shared
    monkeypatch.setattr(deepspeed.os, "access", lambda path, mode: False)
    own = deepspeed.extensions()
    assert own.is_relative_to(tmp_path / ".cache") and own == deepspeed.extensions()
    built = own / deepspeed.OPERATION / "built.so"
    assert built.read_text() == "whole" and built.stat().st_mtime == 1, "an older copy would be built again"
    assert deepspeed._surroundings()["TORCH_EXTENSIONS_DIR"] == str(own)
    assert [path.name for path in own.parent.iterdir()] == [own.name]
