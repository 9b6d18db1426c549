"""Scripts in several processes, started from a notebook: real ranks that talk to each other, and a rank that fails."""

import pytest

from failurelab_course.notebook.torchrun import RankFailed, Torchrun

SUM = """
import os, sys
import torch
from torch import distributed

distributed.init_process_group("gloo")
own = torch.tensor([10.0 ** distributed.get_rank()])
distributed.all_reduce(own)
print(os.environ["WORLD_SIZE"], sys.argv[1], own.item())
"""
FAILS = """
import os
import torch
from torch import distributed

distributed.init_process_group("gloo")
if os.environ["RANK"] == "1":
    raise ValueError("of this rank alone")
distributed.barrier()
"""


@pytest.fixture(scope="module")
def torchrun():
    launcher = Torchrun()
    yield launcher
    launcher.close()


@pytest.mark.slow
def test_ranks_meet_and_rank_0_is_heard(torchrun, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sum.py").write_text(SUM)
    assert torchrun(2, "sum.py", "given") == "2 given 11.0\n" == capsys.readouterr().out
    assert torchrun(1, "sum.py", "alone") == "1 alone 1.0\n"


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_is_named(torchrun, tmp_path, monkeypatch):
    """Without this the others would wait for it in their next common call."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "sum.py").write_text(SUM)
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 failed:.*ValueError: of this rank alone"):
        torchrun(2, "fails.py")
    assert torchrun(2, "sum.py", "again") == "2 again 11.0\n"
