"""What DeepSpeed does without, and how its processes end; not in every era: all have one torch."""

import os
import subprocess
import sys
from unittest import mock

import pytest

from failurelab_course.experiments import deepspeed

pytestmark = pytest.mark.slow

START = """
from failurelab_course.experiments import deepspeed
with deepspeed.one_process():
    import deepspeed as library
    library.init_distributed(dist_backend="gloo")
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


def test_a_launched_process_is_told_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(deepspeed.torch.cuda, "is_available", lambda: False)
    launcher = dict.fromkeys(deepspeed.LAUNCHED, "1")
    with mock.patch.dict(os.environ, launcher | {"DS_ACCELERATOR": ""}), deepspeed.ready():
        assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_what_is_replaced_in_deepspeed_is_put_back(monkeypatch):
    from deepspeed import comm, ops

    monkeypatch.setattr("deepspeed.__version__", "0.19.7")  # 0.19.8 waits for each gathering by itself

    def functions():
        return ops.__compatible_ops__, comm.all_gather_into_tensor

    before = functions()
    with deepspeed.one_process():
        assert not any(now is own for now, own in zip(functions(), before))
    assert all(now is own for now, own in zip(functions(), before))


def test_no_compiler_is_needed(tmp_path):
    """On a CPU DeepSpeed would build an operation that no training calls: a minute, or an error without g++."""
    folders = {"PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    kept = {name: value for name, value in os.environ.items() if name not in (*deepspeed.LAUNCHED, "CXX")}
    done = subprocess.run([sys.executable, "-c", START], env=kept | folders, capture_output=True, text=True)
    assert "READY" in done.stdout, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
