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


@pytest.mark.slow
def test_ranks_meet_and_one_that_fails_ends_the_others(tmp_path, monkeypatch, capsys):
    """Rank 0 is heard. Without an end the others would wait for the failed rank in their next common call."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "fails.py").write_text(FAILS)
    torchrun = Torchrun()
    assert torchrun(2, "sum.py", "given") == "2 given 11.0\n" == capsys.readouterr().out
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 failed:.*ValueError: of this rank alone"):
        torchrun(2, "fails.py")
    assert torchrun(1, "sum.py", "again") == "1 again 1.0\n"
    torchrun.close()
