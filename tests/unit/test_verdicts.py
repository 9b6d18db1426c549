"""The verdict on a failure: what is unknown, could not show, or could not be seen is never HELD."""

import dataclasses
import math
import re

import pytest

from failurelab import failures
from failurelab.errors import FailureLabError
from failurelab.failures import figures, loader, verdicts

# Of each mechanism a healthy run that could have shown it, and what is otherwise where it is found.
RUNS = {
    "F1 cut off by checkpointing": (
        {"adapter_tensors": 0, "tensors_trainable": 25, "tensors_without_gradient": 0},
        {"tensors_without_gradient": 24},
    ),
    "F2 an adapter cut off by checkpointing": (
        {"adapter_tensors": 28, "tensors_trainable": 28, "tensors_without_gradient": 0},
        {"tensors_without_gradient": 28},
    ),
    "F2 element 0": (
        {"adapter_tensors": 28, "steps_done": 3, "error": ""},
        {"steps_done": 0, "error": "RuntimeError: element 0 of tensors does not require grad"},
    ),
    "F3a rows that nobody reads": ({"rows_made": 9, "rows_needed": 9}, {"rows_made": 73}),
    "F3b rows of other positions": (
        {"rows_made": 9, "rows_scored": 32, "positions_off": 0},
        {"positions_off": -1},
    ),
    "F3b other scores": (
        {"rows_made": 0, "log_prob_error": 1e-6, "log_prob_rounding": 1e-4},
        {"log_prob_error": 0.3},
    ),
    "F4 hooks on while it generates": (
        {"zero_stage": 3, "generations": 2, "generates_without_hooks": True},
        {"generates_without_hooks": False},
    ),
    "F5 refused": (
        {"models_in_4bit": 2, "models_loaded": 2, "placement_refused": False, "ranks_refused": 0},
        {"placement_refused": True},
    ),
    "F5 moved in silence": ({"models_loaded": 2, "tensors_elsewhere": 0}, {"tensors_elsewhere": 26}),
    "F5 what else does not fit": ({"placement_problems": 0}, {"placement_problems": 1}),
    "F6 scales of another GPU": ({"models_in_4bit": 1, "quantization_elsewhere": 0}, {"quantization_elsewhere": 14}),
    "F7 mask": ({"prompt_lengths": 2, "draw_gap": 1e-5, "draw_rounding": 0.01}, {"draw_gap": 2.0}),
    "F7 last token": ({"tokens_drawn": 8, "draw_gap": 1e-5, "draw_rounding": 0.01}, {"draw_gap": 2.0}),
    "F8 replaced": ({"adapter_tensors": 28, "adapter_effect": 2.0, "adapter_lost": 0.0}, {"adapter_lost": 1.0}),
    "F9 rounded to nothing": ({"tensors_trainable": 26, "elements_moved": 1.0}, {"elements_moved": 0.004}),
    "F10 equal rewards": ({"groups": 8, "flat_groups": 3}, {"flat_groups": 8}),
    "F10 equal completions": ({"groups_drawn": 12, "groups_alike": 1}, {"groups_alike": 12}),
    "F11 completions": ({"rollouts": 32, "clipped": 0.2}, {"clipped": 1.0}),
    "F11 prompts": ({"prompt_lengths": 3, "prompts_cut": 0}, {"prompts_cut": 2}),
    "F12 plain text": ({"prompt_lengths": 3, "prompts_without_template": 0}, {"prompts_without_template": 8}),
    "F13 another end": ({"ends_drawn": 8, "ends_not_seen": 0}, {"ends_not_seen": 8}),
    "F13 padding is trained on": (
        {"tokens_trained": 300, "draw_lengths": 4, "padding_trained": 0},
        {"padding_trained": 40},
    ),
    "F13 the end is lost": ({"completions_paid": 32, "ends_drawn": 30, "ends_handed": 30}, {"ends_handed": 0}),
    "F14 right answers are not paid": (
        {"rewards_asked": 40, "margin": 1.0, "margin_if_given": 1.0},
        {"margin": 0.0},
    ),
    "F14 columns of another row": ({"completions_paid": 32, "columns_moved": 0}, {"columns_moved": 24}),
    "F14 no numbers": ({"rewards_paid": 40, "rewards_invalid": 0}, {"rewards_invalid": 2}),
    "F15 temperature left out": ({"temperature_asked": 0.3, "temperature_off": 0.0}, {"temperature_off": 0.43}),
    "F16 old weights": ({"policy_moved": 0.2, "policy_gap": 0.001}, {"policy_gap": 0.2}),
    "F16 another model draws": (
        {"drawn_by_others": True, "policy_moved": 0.2, "policy_gap_grown": 0.0},
        {"policy_gap_grown": 1.0},
    ),
    "F17 summed log-ratios": ({"tokens_drawn": 256, "effective_share": 0.98}, {"effective_share": 0.64}),
    "F17 weights of a batch": ({"tokens_drawn": 256, "effective_batch": 0.98}, {"effective_batch": 0.3}),
    "F18 encoded again": ({"tokens_trained": 300, "foreign_tokens": 0}, {"foreign_tokens": 12}),
    "F18 another context": ({"tokens_trained": 300, "moved_tokens": 0}, {"moved_tokens": 200}),
    "F19 another reference": (
        {"beta": 0.04, "adapter_effect": 2.0, "kl_at_first_step": 0.0},
        {"kl_at_first_step": 0.3},
    ),
    "F20 scaled": (
        {"step_size_cut": 1.0, "step_size_off": 0.001, "step_size_most": 0.02, "step_cosine": 1.0}
        | {"step_cosine_least": 0.999, "step_size": 1.001},
        {"step_size_off": 1.0, "step_size": 2.0},
    ),
    "F21 direction": (
        {"rewards_spread": 1.0, "step_cosine": 1.0, "step_cosine_least": 0.999},
        {"step_cosine": -1.0},
    ),
    "F21 size": (
        {"rewards_spread": 1.0, "step_size": 1.0, "step_size_off": 0.0, "step_size_most": 0.02},
        {"step_size": 0.5, "step_size_off": 0.5},
    ),
    **{
        f"F21 {name}": (applies | {"step_cosine": 1.0, "step_cosine_least": 0.999}, {"step_cosine": 0.5})
        for name, applies in {
            "padding": {"prompts_padded": True, "prompt_lengths": 2},
            "penalty": {"penalty_asked": True},
            "bounds": {"bounds_asked": True},
            "cut completions": {"cut_asked": True},
            "a loss below zero": {"loss_overridden": True, "losses_negative": 1},
        }.items()
    },
    "F21 whatever its gradient is": ({"step_fault": ""}, {"step_fault": "the same prompts on every rank"}),
    "F22 a remainder": ({"completions_a_group": 4, "completions_left_over": 0}, {"completions_left_over": 2}),
    "F22 a group of one": ({"completions_a_group": 4}, {"completions_a_group": 1}),
    "F22 groups of other prompts": ({"groups": 4, "groups_mixed": 0}, {"groups_mixed": 4}),
    "F23 frozen": ({"tensors_total": 54, "tensors_trainable": 28}, {"tensors_trainable": 0}),
    "F23 left out of the optimizer": (
        {"tensors_total": 54, "tensors_not_optimized": 0},
        {"tensors_not_optimized": 28},
    ),
}
MECHANISMS = {f"{failure.id} {each.name}": (failure, each) for failure in failures.all() for each in failure.mechanisms}


@pytest.fixture(params=MECHANISMS)
def run(request):
    """A failure with one of its mechanisms alone, that one, and the figures of a healthy and of a broken run."""
    failure, mechanism = MECHANISMS[request.param]
    healthy, changed = RUNS[request.param]
    return dataclasses.replace(failure, mechanisms=(mechanism,)), mechanism, healthy, healthy | changed


def test_a_broken_run_is_found_in_both_languages(run):
    failure, mechanism, _, broken = run
    for language in ("en", "zh"):
        found = verdicts.judge(failure, [broken], language=language)
        assert (found.verdict, found.mechanism) == (verdicts.FOUND, mechanism.name)
        assert found.says and "{" not in found.says


def test_held_needs_a_control_that_was_seen(run):
    failure, mechanism, healthy, broken = run
    planted = verdicts.judge(failure, [healthy], {mechanism.control: broken}).verdict
    if mechanism.control.startswith(verdicts.NO_PLANT):  # it applies to what was found alone
        assert planted == verdicts.NOT_APPLICABLE
        return
    assert planted == verdicts.HELD
    without = verdicts.judge(failure, [healthy])
    assert without.verdict == verdicts.NOT_CHECKED and mechanism.control in without.missing
    blind = verdicts.judge(failure, [healthy], {mechanism.control: healthy})
    assert blind.verdict == verdicts.NOT_CHECKED and mechanism.control in blind.missing


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_a_figure_that_is_unknown_is_never_held_and_is_named(run, unknown):
    failure, mechanism, healthy, broken = run
    for name in mechanism.figures:
        control = {mechanism.control: {key: value for key, value in broken.items() if healthy.get(key) != value}}
        judged = verdicts.judge(failure, [healthy | {name: unknown}], control)
        others = [one for one in mechanism.found if name not in one.names and not one.holds(healthy)]
        asked_first = {each for one in (*mechanism.applies, *mechanism.needs) for each in one.names}
        if others and name not in asked_first:
            continue  # another figure says that it is not there, whatever this one is
        assert judged.verdict == verdicts.NOT_CHECKED and name in judged.missing


def test_what_the_run_could_not_show_is_not_checked(run):
    failure, mechanism, healthy, broken = run
    for need in mechanism.needs:
        assert need.op in (">", ">=") and not need.holds({need.figure: -1})
        judged = verdicts.judge(failure, [healthy | {need.figure: -1}], {mechanism.control: broken})
        assert judged.verdict != verdicts.HELD
        decided = mechanism.applies if judged.verdict == verdicts.NOT_APPLICABLE else mechanism.found
        assert need.figure in judged.missing or any(need.figure in one.names for one in decided)


def test_a_failure_is_held_by_all_its_mechanisms_and_found_by_one():
    failure, mask, last = failures.get("F7"), *failures.get("F7").mechanisms
    controls = {mask.control: {"draw_gap": 3.0}, last.control: {"draw_gap": 3.0}}
    one_length = {"prompt_lengths": 1, "tokens_drawn": 8, "draw_gap": 0.001, "draw_rounding": 0.01}
    judged = verdicts.judge(failure, [one_length], controls)
    assert (judged.verdict, judged.mechanism, judged.missing) == ("NOT CHECKED", "mask", "it needs prompt_lengths > 1")
    assert verdicts.judge(failure, [one_length, one_length | {"prompt_lengths": 2}], controls).verdict == verdicts.HELD
    assert verdicts.judge(failure, [one_length, one_length | {"draw_gap": 2.0}], controls).verdict == verdicts.FOUND


def test_what_applies_nowhere_is_told_as_that():
    plain = {"adapter_tensors": 0, "tensors_trainable": 25, "tensors_without_gradient": 0}
    assert verdicts.judge(failures.get("F2"), [plain]).verdict == verdicts.NOT_APPLICABLE
    assert verdicts.judge(failures.get("F2"), [plain | {"adapter_tensors": None}]).verdict == verdicts.NOT_CHECKED
    assert verdicts.judge(failures.get("F2"), []).verdict == verdicts.NOT_CHECKED


def test_no_groups_are_not_flat_groups():
    assert verdicts.judge(failures.get("F10"), [{"groups": 0, "flat_groups": 0}]).verdict == verdicts.NOT_CHECKED


def test_each_mechanism_has_its_runs_and_each_figure_its_name():
    assert list(MECHANISMS) == list(RUNS)
    for figure in figures.table().values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", figure.name)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"found": ["no_such_figure > 0"]}, "is no figure"),
        ({"found": ["groups >"]}, "is no predicate"),
        ({"found": []}, "1 to 4"),
        ({"needs": ["groups > 0"] * 4}, "1 to 4"),
        ({"says": "{no_such_figure} are wrong"}, "is no figure"),
        ({"control": ""}, "it is empty"),
    ],
)
def test_a_slip_in_a_mechanism_is_told(row, said):
    whole = {"name": "flat", "found": ["groups > 0"], "control": "c", "says": "s", "says_zh": "s"}
    with pytest.raises(FailureLabError, match=said):
        loader._mechanism(loader.Table("F98.toml", whole | row, loader.RegistryError))


def test_what_cannot_be_planted_is_never_held():
    failure = failures.get("F9")
    lacking = dataclasses.replace(failure.mechanisms[0], control=f"{verdicts.NO_PLANT}it is too large")
    failure = dataclasses.replace(failure, mechanisms=(lacking,))
    healthy = {"tensors_trainable": 26, "elements_moved": 1.0}
    judged = verdicts.judge(failure, [healthy], {lacking.control: {"elements_moved": 0.0}})
    assert judged.verdict == verdicts.NOT_CHECKED and "too large" in judged.missing
