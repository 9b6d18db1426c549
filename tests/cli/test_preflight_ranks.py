"""Scripts that a launcher starts in several processes: two real ones are run, and the answer says which one does what.

What one rank does alone is told with its number, whether it raises, ends, dies, hangs, or waits in a call to which the
others do not come; and nothing is left running.
"""

import json
import sys

import pytest
import torch
from tests.cli import one_session
from tests.cli.one_session import scripts

from failurelab_preflight import cli, launcher_line
from failurelab_preflight.session import _with_folder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are on the CPU")]

RANKED = """\
import os
import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback, set_seed

RANK, LOAD = int(os.environ["RANK"]), {{}}
rows = [(a, a) for a in range(32)]  # of several lengths


class Own(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        {step}


{first}"""


def script(first="", step="pass", last="", device=8, kind="GRPOTrainer", options=""):
    sizes = f"per_device_train_batch_size={device}, max_completion_length=16, {options}"
    given = {"model": "AutoModelForCausalLM.from_pretrained(PATH, **LOAD)", "more": "callbacks=[Own()],"}
    return one_session.script(RANKED.format(step=step, first=first), sizes, kind=kind, last=last, **given)


def line_of(text, words):
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)


def failures(answers):
    return {answer.failure for answer in answers}


SAVES = """\
state = PartialState()
assert (state.num_processes, state.process_index) == (2, RANK) == (int(os.environ["WORLD_SIZE"]), dist.get_rank())
if state.is_main_process:
    for kind in (AutoModelForCausalLM, AutoTokenizer):
        kind.from_pretrained(PATH).save_pretrained("merged")
state.wait_for_everyone()
PATH = "merged"
"""
FOR_CARDS = """\
torch.cuda.set_device(RANK)
dist.init_process_group("nccl")
dist.barrier(device_ids=[RANK])
assert dist.get_world_size() == 2
LOAD = {"device_map": {"": int(os.environ["LOCAL_RANK"])}}
set_seed(42 + RANK)
"""
HEALTHY = {
    "one rank saves, and all load": (script(SAVES), ()),
    "NCCL, a device's number, a seed by rank": (script(FOR_CARDS), ("backend nccl -> gloo", "device_map")),
    "groups on both ranks": (script(device=2), ()),
}
ALONE = {
    "raises": script(step="assert RANK == 0, 'rows of this rank'"),
    "ends before training": script(last="if RANK == 0:\n    "),
    "dies": script(step="RANK == 0 or os.kill(os.getpid(), 9)"),
}
TOLD = {"raises": "AssertionError: rows of this rank", "ends before training": "without training", "dies": "SIGKILL"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A session of two processes in today's stack, and its folder; nothing is left of it at the end."""
    path = tmp_path_factory.mktemp("two")
    with scripts(path, processes=2) as run:
        yield run
    assert not _with_folder(path / "session")


def test_two_real_processes_train_and_what_each_does_alone_is_told_with_its_number(two):
    """A healthy script is judged whole; of a broken one rank 1's own error stands first, not that rank 0 lost it."""
    for name, (text, cuts) in HEALTHY.items():
        result = two(text)
        cut = "; ".join(result.cut)
        assert not result.error and not result.found, (name, result.error, result.found)
        held = {"F1", "F3b", "F21", "F23"}
        if name != "groups on both ranks":  # there each has one prompt a batch, and half of each group
            held |= {"F7", "F22"}
        assert held <= failures(result.held), name
        assert any(answer.failure == "F21" and "2 processes" in answer.evidence for answer in result.held)
        assert "2 real processes, by gloo" in cut and all(text in cut for text in cuts), cut
    for name, text in ALONE.items():
        error = two(text).error
        assert error.startswith("rank 1 of 2: ") and TOLD[name] in error and "gloo" not in error, error
    both = two(script(step="raise ValueError('of all')")).error
    assert both.startswith("train.py, line") and "of all" in both  # of every rank, so with no number


OWN_TOKENS = """\
class OwnTokens(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        return made | {"num_items_in_batch": made["completion_mask"].sum() * dist.get_world_size()}
"""


def test_a_step_that_several_ranks_alone_can_take_is_found(two):
    (found,) = two(script(OWN_TOKENS, kind="OwnTokens")).found
    assert found.failure == "F21" and "each rank divides by its own tokens" in found.evidence
    assert "2 processes" in found.evidence


def test_a_reference_that_one_rank_alone_has_is_found(two):
    """A policy that rank 0 alone has loaded is sent to the others, whose references are of what they had loaded."""
    other = "for weight in RANK * [*trainer.ref_model.parameters()]:\n    weight.data *= 1.5\n"
    result = two(script("torch.cuda.is_available()\n", last=other, options="beta=0.1, "))
    (found,) = result.found
    assert found.failure == "F19" and found.evidence.startswith("on rank 1")
    assert "F5" in failures(result.not_checked)  # what the script does where it sees GPUs was not seen


def test_ranks_that_wait_in_different_calls_are_told_where(tmp_path):
    """On GPUs this hangs until NCCL's own limit. Rank 0 is told with its line, and rank 1 with where it was."""
    text = script(step="RANK or dist.all_gather_object([None, None], state.global_step)")
    with scripts(tmp_path, processes=2, limit=60) as run:
        error = run(text).error
    assert "the ranks do not come to the same calls" in error and "rank 1" in error, error
    assert f"rank 0 waited for the others in train.py, line {line_of(text, 'all_gather_object')}" in error
    assert not _with_folder(tmp_path / "session")


def test_a_rank_that_hangs_is_named_and_the_other_is_ended(tmp_path):
    """Rank 0 waits for a part of the time limit."""
    text = script(step="while RANK == 1: pass")
    line = line_of(text, "while RANK")
    with scripts(tmp_path, processes=2, limit=60) as run:
        error = run(text).error
    assert "rank 0 waited" in error and f"rank 1 was training 3 steps (line {line})" in error, error
    assert not _with_folder(tmp_path / "session")


def test_a_launch_as_it_is_typed(tmp_path, monkeypatch, capsys):
    """The launcher's parser reads the line; its processes stand under Cut, and an error of rank 1 gives status 3."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script(device=2, first="assert RANK == 0"))
    words = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "4", "train.py"]
    assert cli.main(["--json", "out.json", "--all", "--", *words]) == 3
    assert "rank 1 of 2: train.py" in " ".join(capsys.readouterr().out.split())
    assert "4 processes -> 2, by gloo on the CPU" in json.loads((tmp_path / "out.json").read_text())["cut"]


def test_a_batch_that_trl_refuses_at_the_launch_s_own_size(tmp_path, monkeypatch):
    """Three processes are cut to two: trl refuses the same batch, of an odd size as well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script(device=3).replace("num_generations=4", "num_generations=6"))
    told = cli.ask(launcher_line.Launch("train.py", world_size=3), again=False)
    assert any(answer.failure == "F22" for answer in told.suspected), told
