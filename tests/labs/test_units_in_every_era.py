"""Helpers and guards work unchanged in every era: their unit tests run again in the old stacks, two eras at once.

The oldest stack, the farthest from today's, runs the files that ask a library something. The others run what their
libraries decide where they differ from it. A file in TODAY asks none of these libraries: it reads numbers, texts, TOML
or options, and has the same answer in every stack; or labs are proved by it in their own (nodes, simulated devices);
or it starts processes of its own, or asks what old releases do not have (turns).
A single test that no library of a stack decides is in OWN, and runs today alone too.
"""

import concurrent.futures
import os
import re

import pytest

from failurelab_course import eras

UNIT = eras.root() / "tests" / "unit"
OLD = [era.name for era in eras.known() if era.name != eras.TODAY]
TODAY = (
    "atlas experiments issue names node predicates preflight_repairs preflight_together ranks registry "
    "reward_guard simulate symptoms textbook_turns"
)
OLDEST = (
    "adapter_paths adapters alignment gradients guard_faults guard_report guard_script guards logits logits_guard "
    "logits_repair mismatch models no_gpu placement preflight_batch preflight_controls preflight_evaluation "
    "preflight_more preflight_releases preflight_reward preflight_script preflight_step preflight_tokens rewards "
    "rollouts second_device step_guard textbook textbook_algorithms textbook_engines trainers updates"
)
RUNS = {
    "trl-0.14": OLDEST,
    # Its transformers are newer: the name of an argument that is swallowed, and no garbage rollouts.
    "trl-0.14-tf-4.52": "alignment logits_guard logits_repair rollouts",
    # Its trl alone is newer: what trains, how a batch is counted, and the engine that is handed over. DeepSpeed is the
    # oldest stack's, where lab 09 is proved with it; preflight_step compares a step of its trainer with the textbook.
    "trl-0.15": "logits_guard preflight_batch preflight_more preflight_step textbook_algorithms trainers zero3",
    # What trl 0.22 and PEFT 0.17 decide: checkpointing at each generation, the way to the trainer, and the step.
    "trl-0.22": (
        "adapter_paths adapters gradients guard_script guards logits_guard preflight_step rollouts step_guard textbook "
        "textbook_algorithms textbook_engines textbook_options trainers"
    ),
}
# The slow ones of those whose answer is this house's in every stack.
OWN = {
    # Faults are planted in lines of the guards.
    "guard_faults": "test_a_fault_in_a_guard_costs_one_warning_and_no_run",
    # torch's alone, which is one version in all stacks.
    "logits": "test_two_processes_average_their_gradients_as_with_full_logits",
    # What is said of a wrong step, whose gradient other tests of these files compare in each stack.
    "preflight_step": ("test_tensors_without_a_gradient_are_another_judge_s_finding test_a_wrong_gradient_is_found"),
    # The script's function is called with texts.
    "preflight_reward": "test_what_a_function_can_never_reward",
    "step_guard": "test_a_wrong_gradient_stops_the_run",
    "textbook_algorithms": "test_each_suspect_is_named",
    # Gradients of the textbook itself, one for each mistake, are held against a gradient.
    "textbook": (
        "test_a_planted_mistake_is_named test_a_reference_that_is_the_policy_itself "
        "test_rows_that_a_step_should_not_train_on_or_should"
    ),
}


def test_every_file_runs_in_an_old_stack_or_says_why_not():
    """Next, for a new file: put its name into OLDEST, or into TODAY if it asks no library of a stack."""
    there = [path.stem.removeprefix("test_") for path in UNIT.glob("test_*.py")]
    assert list(RUNS) == OLD
    assert sorted([*TODAY.split(), *{name for names in RUNS.values() for name in names.split()}]) == sorted(there)


def test_what_runs_today_alone_is_there():
    """A test that was renamed would run in every stack again, unseen."""
    for subject, names in OWN.items():
        text = (UNIT / f"test_{subject}.py").read_text()
        assert [name for name in names.split() if f"def {name}(" not in text] == []


@pytest.fixture(scope="module")
def runs():
    """The unit tests of each era, in a process of its own; one thread each, for the models are tiny."""

    def unit_tests(name):
        return eras.run(
            eras.find(name),
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
            + [str(UNIT / f"test_{subject}.py") for subject in RUNS[name].split()]
            + [f"--deselect=tests/unit/test_{of}.py::{test}" for of, tests in OWN.items() for test in tests.split()],
            cwd=eras.root(),
            env={"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        return dict(zip(OLD, pool.map(unit_tests, OLD)))


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_unit_tests_pass_in_the_era(runs, name):
    """Nothing failed, and something ran: an era in which nothing was collected proves nothing."""
    done = runs[name]
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
    assert done.returncode == 0, tail
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 50, tail
