"""Helpers and guards work unchanged in every era: their unit tests run again in the old stacks, two eras at once.

The oldest stack, the farthest from today's, runs the files that ask a library something. The others run what their
libraries decide where they differ from it. A file in TODAY asks none of these libraries: it reads numbers, texts, TOML
or options, and has the same answer in every stack; or labs are proved by it in their own (nodes, simulated devices);
or it starts processes of its own, or asks what old releases do not have (turns).
A single test that no library of a stack decides is in OWN, and runs today alone too. SOME names the others, where they
are few.
"""

import concurrent.futures
import os
import re

import pytest

from failurelab_course import eras

UNIT = eras.root() / "tests" / "unit"
OLD = [era.name for era in eras.known() if era.name != eras.TODAY]
TODAY = (
    "atlas experiments known_gradients names node predicates preflight_repairs preflight_together ranks registry "
    "reward_guard simulate symptoms textbook_queued textbook_turns"
)
OLDEST = (
    "adapter_paths adapters alignment gradients guard_faults guard_report guard_script guards ledger logits "
    "logits_guard mismatch models no_gpu placement plants preflight_batch preflight_between "
    "preflight_more preflight_releases preflight_reward preflight_script preflight_step preflight_tokens rewards "
    "rollouts second_device step_guard textbook textbook_algorithms textbook_engines trainers updates"
)
RUNS = {
    "trl-0.14": OLDEST,
    # Its transformers are newer: the name of an argument that is swallowed, and no garbage rollouts.
    "trl-0.14-tf-4.52": "alignment logits_guard rollouts",
    # Its trl alone is newer: what trains, how a batch is counted, and the engine that is handed over. DeepSpeed is the
    # oldest stack's, where lab 09 is proved with it; preflight_step compares a step of its trainer with the textbook.
    "trl-0.15": "logits_guard preflight_batch preflight_more preflight_step textbook_algorithms trainers zero3",
    # What trl 0.22 and PEFT 0.17 decide: checkpointing at each generation, the way to the trainer, and the step.
    "trl-0.22": (
        "adapter_paths adapters gradients guard_script guards logits_guard preflight_step rollouts step_guard textbook "
        "textbook_algorithms textbook_engines textbook_options trainers"
    ),
}
# A reward function is called with texts. A release decides what it does with None, with columns and special tokens.
SOME = {
    "preflight_reward": (
        "test_none_is_masked_by_the_releases_that_mask_it test_columns_that_the_trainer_drops "
        "test_tags_that_the_trainer_leaves_out_where_it_decodes "
        "test_what_the_trainer_handed_over_is_what_a_function_is_asked_with"
    ),
}
# The slow ones of those whose answer is this house's in every stack.
OWN = {
    # Faults are planted in lines of the guards.
    "guard_faults": "test_a_fault_in_a_guard_costs_one_warning_and_no_run",
    # torch's alone, which is one version in all stacks.
    "logits": "test_two_processes_average_their_gradients_as_with_full_logits",
    # A run without a reference, which trl 0.14 does not know.
    "preflight_between": "test_what_a_callback_writes_into_the_weights",
    # What is said of a wrong step, whose gradient other tests of these files compare in each stack.
    "preflight_step": "test_a_step_is_judged[without_a_gradient] test_a_step_is_judged[opposite_sign]",
    "step_guard": "test_a_wrong_gradient_stops_the_run",
    "textbook_algorithms": "test_each_suspect_is_named test_a_mistake_planted_in_online_dpo_is_named",
    # A hub that does not answer: the other half of the test asks each stack's hub client.
    "models": "test_a_hub_id_is_loaded_from_the_cache[closed]",
    # torch's fake tensors; labs on simulated devices are proved in their stacks.
    "second_device": "test_what_needs_no_values_runs_on_a_simulated_device",
    # Gradients of the textbook itself, one for each mistake, are held against a gradient; and differences whose curve
    # is made by hand, of a size that was chosen for today's step.
    "textbook": (
        "test_a_planted_mistake_is_named "
        "test_rows_that_a_step_should_not_train_on_or_should test_a_difference_over_a_strong_curve_is_no_slope "
        "test_a_band_that_known_mistakes_lie_in_holds_nothing test_a_gradient_that_equal_rewards_do_not_give_is_found "
        "test_mistakes_are_found_in_16_bits test_losses_below_zero_are_the_library_s_own"
    ),
}


def test_every_file_runs_in_an_old_stack_or_says_why_not():
    """Next, for a new file: put its name into OLDEST, or into TODAY if it asks no library of a stack."""
    there = [path.stem.removeprefix("test_") for path in UNIT.glob("test_*.py")]
    assert list(RUNS) == OLD
    assert sorted([*TODAY.split(), *{name for names in RUNS.values() for name in names.split()}]) == sorted(there)


def test_what_runs_today_alone_is_there():
    """A test that was renamed would run in every stack again, unseen."""
    for subject, names in [*OWN.items(), *SOME.items()]:
        text = (UNIT / f"test_{subject}.py").read_text()
        assert [name for name in names.split() if f"def {name.partition('[')[0]}(" not in text] == []


def arguments_of(subject):
    """Return what pytest is given: a file, or some of its tests."""
    file = str(UNIT / f"test_{subject}.py")
    return [f"{file}::{name}" for name in SOME[subject].split()] if subject in SOME else [file]


@pytest.fixture(scope="module")
def runs(request):
    """The unit tests of each era (with -k, of those that are asked for), in a process of its own with one thread."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = [spec.params["name"] for spec in specs if spec]

    def unit_tests(name):
        try:
            era = eras.find(name)
        except eras.EraError as error:
            return error
        return eras.run(
            era,
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
            + [asked for subject in RUNS[name].split() for asked in arguments_of(subject)]
            + [f"--deselect=tests/unit/test_{of}.py::{test}" for of, tests in OWN.items() for test in tests.split()],
            cwd=eras.root(),
            env={"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(unit_tests, names)))


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_unit_tests_pass_in_the_era(runs, name):
    """Nothing failed, and something ran: an era in which nothing was collected proves nothing."""
    done = runs[name]
    if isinstance(done, eras.EraError):
        raise done
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
    assert done.returncode == 0, tail
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 50, tail
