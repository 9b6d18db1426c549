"""One optimizer step of several processes beside its definition: two real ones, by gloo, in every way of training.

Each spawn runs many cases one after another (`ranks_child`), for starting the libraries takes longest.
"""

import dataclasses
import json
import math
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from small import qwen2

from failurelab.textbook import apart, gradient, rows, together
from failurelab.textbook.fields import Options
from failurelab.textbook.ranks import ALONE, Ranks

CHILD = pathlib.Path(__file__).with_name("ranks_child.py")
PATIENCE = 600  # seconds, a limit against hanging

DDP = ("ddp=", "groups on both ranks=", "grpo", "bnpo", "scaled by the batch", "two steps from a generation=", "beta")
DDP += ("an epoch's rest", "checkpointing", "bf16", "lora=", "entropy")
PLANTED = {
    "rank left out": together.LEFT_OUT,
    "summed": together.SUMMED,
    "divided twice": together.DIVIDED,
    "tokens of rank 0": together.OF_ONE,
    "own tokens": "each rank divides by its own tokens",
    "same prompts": together.SAME_PROMPTS,
    "same numbers": together.SAME_NUMBERS,
    "advantages of rank 0": "advantages mixed between ranks",
    "weights apart": together.DRIFTED,
    "batch dropped": "one rank's batch dropped",
    "not averaged": together.OWN_GRADIENTS,
}
ZERO = ("zero1=", "zero2=", "zero3=", "zero3 two steps from a generation", "zero3 lora=", "zero2 bf16", "zero3 bf16")
ZERO += ("zero3 beta", "zero3 checkpointing")
FSDP = ("fsdp2=", "fsdp2 two steps from a generation", "fsdp2 lora=", "fsdp2 checkpointing", "fsdp2 bf16")


def launch(folder, *names, count=2, children=None):
    """Run cases in so many processes; return the answers of each rank, in the order of the cases."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(count):
        own = {name: str(value) for name, value in (numbers | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        path = [*sys.path, str(CHILD.parent)]
        variables = os.environ | own | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str((children or {}).get(rank, CHILD)), str(folder), *names]
        with (folder / f"log-{rank}").open("wb") as log:
            started.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
    try:
        for process in started:
            process.wait(PATIENCE)
    finally:
        for process in started:
            process.kill()
    answers = []
    for rank in range(count):
        path = folder / f"answers-{rank}"
        answers.append([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
    return answers


def held(answers, count=2):
    """Hold that every case is right on each rank, in the same words, and ends with the weights of a run without."""
    for own in zip(*answers, strict=True):
        for answer in own:
            assert "error" not in answer, answer
            assert answer["verdict"] == "HELD" and not answer["told"], answer
            assert answer["reason"] == own[0]["reason"]
            assert answer["plain"] in (None, answer["weights"]), f"{answer['case']}: the run is another one"


@pytest.mark.slow
def test_ddp_holds_and_each_mistake_of_several_processes_is_named_on_all_ranks_and_told_once(tmp_path):
    answers = launch(tmp_path, *DDP, *PLANTED)
    held([own[: len(DDP)] for own in answers])
    for own in zip(*(each[len(DDP) :] for each in answers), strict=True):
        for answer in own:
            assert answer.get("verdict") == "FOUND" and answer["named"] == PLANTED[answer["case"]], answer
            assert bool(answer["told"]) == (answer["rank"] == 0), answer


@pytest.mark.slow
def test_zero_holds_at_every_stage(tmp_path):
    answers = launch(tmp_path, *ZERO, "zero2 rank left out", "zero3 rank left out")
    held([own[: len(ZERO)] for own in answers])
    assert all(answer["named"] == together.LEFT_OUT for own in answers for answer in own[len(ZERO) :])


@pytest.mark.slow
def test_a_model_sharded_by_fsdp2_holds(tmp_path):
    answers = launch(tmp_path, *FSDP, "fsdp2 rank left out")
    held([own[: len(FSDP)] for own in answers])
    assert all(answer["named"] == together.LEFT_OUT for own in answers for answer in own[len(FSDP) :])


@pytest.mark.slow
def test_deepspeed_in_one_process_holds(tmp_path):
    held(launch(tmp_path, "zero2=", "zero3=", count=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dies before training", "dies before the comparison", "dies in a pass", "hangs before the comparison"]
)
def test_a_rank_that_dies_or_hangs_is_named_and_the_others_end(name, tmp_path):
    """In each phase: they go on, or end as they would without the guard."""
    answers = launch(tmp_path, name)
    told = " ".join(answers[0][0]["told"])
    assert "could not check" in told and "rank 1" in told, answers[0]
    assert bool(answers[1]) == name.startswith("hangs")


@pytest.mark.slow
def test_a_guard_on_one_rank_only_is_told_and_the_run_goes_on(tmp_path):
    first, second = launch(tmp_path, "a guard on rank 0 alone")
    assert "rank 1 did not come" in first[0]["told"][0] and not second[0]["told"]
    assert first[0]["weights"] == second[0]["weights"]


@pytest.mark.slow
def test_ranks_that_run_different_scripts_are_told(tmp_path):
    other = tmp_path / "other.py"
    other.write_text(CHILD.read_text() + "# another one\n")
    for own in launch(tmp_path, "ddp", children={1: other}):
        assert "the script is" in " ".join(own[0]["told"]) or own[0]["rank"], own
        assert own[0]["verdict"] is None


class Two(Ranks):
    """A rank whose other one says what it says itself, and has no rows."""

    def share(self, value):
        return [value, value]


def test_rows_of_other_ranks_count_where_the_loss_is_divided_and_have_no_gradient_here():
    """The parts of two ranks, computed one after the other, add up to the gradient of all rows."""
    made = rows.rows_of([(1, 2)] * 4, [(3, 4), (5,), (6, 7, 8), (9, 2)], [(1.0,), (0.0,), (0.5,), (2.0,)], [0] * 4, [2])
    options, model = Options(loss_type="dapo"), qwen2()
    every = [dataclasses.replace(row, rank=number // 2, micro=number // 2) for number, row in enumerate(made)]
    whole = gradient.expected_gradient(model, every, options)
    parts = [
        gradient.expected_gradient(model, [dataclasses.replace(row, here=row.rank == rank) for row in every], options)
        for rank in (0, 1)
    ]
    total = {name: parts[0][name] + parts[1][name] for name in whole}
    assert apart.measure_apart(total, whole).distance < 1e-5 and apart.norm(parts[0]) / apart.norm(whole) > 0.1


def test_an_error_of_one_rank_is_raised_on_all_of_its_kind():
    with pytest.raises(gradient.OutOfMemory, match="rank 0: no room"):
        Two(1, 2).agree(lambda: (_ for _ in ()).throw(gradient.OutOfMemory("no room")))
    assert ALONE.total(lambda: 2.0) == 2.0 and ALONE.share("own") == ["own"]


def test_factors_of_ranks_have_names():
    def is_one(size):
        return math.isclose(size, 1, abs_tol=0.02)

    assert together.name_factors([1.0, 0.0, 1.0], [5, 5, 5], is_one)[0] == together.LEFT_OUT
    assert together.name_factors([0.75, 1.5], [10, 5], is_one)[0] == "each rank divides by its own tokens"
    assert not together.name_factors([0.7, 1.1], [10, 5], is_one)[0]
