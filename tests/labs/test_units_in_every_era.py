"""Helpers and guards work unchanged in every era: their unit tests run again in the old stacks, two eras at once.

The oldest stack, the farthest from today's, runs each file that asks a library something. The others run what their
libraries decide where they differ from it. A file in TODAY asks none of these libraries: it reads numbers, texts, TOML
or options, and has the same answer in every stack.
"""

import concurrent.futures
import os
import re

import pytest

from failurelab_course import eras

UNIT = eras.root() / "tests" / "unit"
OLD = [era.name for era in eras.known() if era.name != eras.TODAY]
TODAY = "devices expect issue observe predicates preflight_repairs registry shapes symptoms vllm_stand_in"
OLDEST = (
    "adapter_paths adapters alignment gradients guard_faults guard_report guard_script guards logits logits_guard "
    "logits_repair measure mismatch models no_gpu node placement preflight_batch preflight_controls preflight_more "
    "preflight_reward preflight_script preflight_step preflight_tokens reward_guard rollouts second_device simulate "
    "step_guard textbook trainers updates zero3"
)
RUNS = {
    "trl-0.14": OLDEST,
    # Its transformers and peft are newer: what generates, scores and gets gradients. No DeepSpeed is in it.
    "trl-0.14-tf-4.52": (
        "adapter_paths adapters alignment gradients guards logits logits_guard logits_repair measure models placement "
        "rollouts trainers"
    ),
    # Its trl alone is newer: what trains, and what is said of that.
    "trl-0.15": (
        "adapter_paths guard_script guards logits_guard measure mismatch preflight_batch preflight_more "
        "preflight_reward preflight_step preflight_tokens reward_guard step_guard textbook trainers zero3"
    ),
    # What trl 0.22 decides by itself: checkpointing at each generation, and the step.
    "trl-0.22": (
        "adapter_paths adapters alignment gradients guard_script guards logits_guard logits_repair preflight_step "
        "rollouts step_guard textbook trainers"
    ),
}

# Labs train to the end in each of these stacks, and their proof holds that what is right learns.
LEARNS = "tests/unit/test_trainers.py::test_grpo_learns_sums"


def test_every_file_runs_in_the_oldest_stack_or_says_why_not():
    """Next, for a new file: put its name into OLDEST, or into TODAY if it asks no library of a stack."""
    there = [path.stem.removeprefix("test_") for path in UNIT.glob("test_*.py")]
    assert sorted([*TODAY.split(), *OLDEST.split()]) == sorted(there)
    assert list(RUNS) == OLD
    assert {name for names in RUNS.values() for name in names.split()} == set(OLDEST.split())


@pytest.fixture(scope="module")
def runs():
    """The unit tests of each era, in a process of its own; one thread each, for the models are tiny."""

    def unit_tests(name):
        return eras.run(
            eras.find(name),
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--deselect", LEARNS]
            + [str(UNIT / f"test_{subject}.py") for subject in RUNS[name].split()],
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
