"""Batch arithmetic: what the installed trl refuses is handed to it as it is, and what a step is, is said."""

import dataclasses
import types

import datasets
import pytest
import small
import trl

from failurelab_course.experiments import models
from failurelab_preflight.finding import Verdict
from failurelab_preflight.judges import batch
from failurelab_preflight.stage import cuts
from failurelab_preflight.training import Training

SIZES = [(8, 8, 1), (4, 8, 1), (6, 4, 2), (3, 2, 1), (2, 1, 1)]


def training(trainer=None, world_size=1, rows=64, **arguments):
    dataset = datasets.Dataset.from_dict({"prompt": ["1+1="] * rows})
    trainer = trainer or small.grpo(*models.load())
    return Training(trainer=trainer, arguments=arguments, dataset=dataset, world_size=world_size)


def judge(**options):
    """Return what is said of the batch itself; of the loss's scale there is more."""
    return [answer for answer in batch.judge_batch(training(**options)) if answer.failure == "F22"]


def asked(size, generations, accumulated=1, **more):
    names = ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps")
    of_this_trl = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    rounds = dict.fromkeys(of_this_trl & {"steps_per_generation", "generation_batch_size"})
    return dict(zip(names, (size, generations, accumulated))) | rounds | more


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_refuses_what_this_trl_refuses(size, model, tokenizer):
    """Each size is handed to the real trainer; trl 0.14 refuses none, and then one generation is told by the judge."""
    error = None
    try:
        small.grpo(model, tokenizer, ["1+1="] * 64, **asked(*size))
    except ValueError as caught:
        error = caught
    assert cuts.is_refused(asked(*size), 1) == (error is not None)
    if error is not None:
        assert batch.refused(error).failure == "F22"
    else:
        findings = [answer for answer in judge(**asked(*size)) if answer.verdict is Verdict.FOUND]
        assert len(findings) == (size[1] == 1)


@pytest.mark.parametrize(("size", "generations", "refused"), [(8, 4, False), (3, 4, True)])
def test_an_evaluation_whose_batch_splits_groups(size, generations, refused, tmp_path):
    """The cut took the evaluation away before trl could refuse it: a script that ends at its start was "healthy"."""
    given = asked(generations, generations) | {"eval_strategy": "steps", "per_device_eval_batch_size": size}
    if cuts.counts_prompts():
        assert not cuts.is_refused(given, 1)
        return
    assert cuts.is_refused(given, 1) == refused and not cuts.is_refused(given | {"eval_strategy": "no"}, 1)
    assert not refused or cuts.make_divide(given, 1) == {"per_device_eval_batch_size": generations}
    if size == 3:  # 6 in two processes
        assert cuts.make_divide(given, 2) == {"per_device_eval_batch_size": generations // 2}
    made = cuts.CutArguments(3, str(tmp_path))
    error = None
    with made.cut():
        try:
            config = trl.GRPOConfig("out", use_cpu=True, eval_steps=5, **{n: v for n, v in given.items() if v})
            made.settle(config)
            small.evaluated(config)
        except ValueError as caught:
            error = batch.refused(caught)
    assert (error is not None) == refused


def test_generations_that_are_set_too_late_to_be_refused():
    """Where the config is made they are checked; a round of generation stays as it was made then."""
    if "generation_batch_size" in asked(8, 4):
        (found,) = judge(**asked(8, 3, generation_batch_size=8))
        assert found.key == "F22:num_generations" and found.verdict is Verdict.FOUND and found.ends


def test_a_batch_is_judged_for_the_launch_and_not_for_this_machine():
    """Six completions are no multiple of four on one device; on two they are."""
    assert [cuts.is_refused(asked(6, 4), world) for world in (1, 2)] == [not cuts.counts_prompts(), False]
    (told,) = judge(world_size=2, **asked(6, 4))
    assert told.verdict is Verdict.NOT_CHECKED  # no prompts came
    assert f"{12 * 4 if cuts.counts_prompts() else 12} completions of" in told.why


@pytest.mark.parametrize(
    ("prompts", "size", "wanted", "world", "verdict"),
    [
        (["a"] * 4 + ["b"] * 4, 8, 4, 1, Verdict.HELD),
        ([*"abcdefgh"], 8, 4, 1, Verdict.NOT_CHECKED),
        ([], 8, 4, 1, Verdict.NOT_CHECKED),
        (["a"] * 4 + ["b"] * 4, 8, 4, 2, Verdict.HELD),
        # a group lies on both, and what the other one has is not seen here
        (["a"] * 4, 6, 4, 2, Verdict.HELD if cuts.counts_prompts() else Verdict.NOT_CHECKED),
    ],
)
def test_numbers_that_divide_say_nothing_of_the_prompts_that_arrived(prompts, size, wanted, world, verdict):
    """A stream in trl 0.15: no prompt is repeated, and it was HELD by arithmetic."""
    made = type("OfTrl", (types.SimpleNamespace,), {"__module__": "trl.trainer"})
    config = trl.GRPOConfig("out", use_cpu=True, bf16=False)
    asked_of = training(made(num_generations=4, args=config), world, **asked(size, wanted))
    asked_of.reward_inputs = {"prompts": prompts, "completions": prompts}
    (answer,) = (answer for answer in batch.judge_batch(asked_of) if answer.failure == "F22")
    assert answer.verdict is verdict


def test_what_is_not_about_batches():
    assert batch.refused(ValueError("Unrecognized model")) is None
    assert batch.refused(RuntimeError("must be divisible by num_generations")) is None
    assert list(batch.judge_batch(training(per_device_train_batch_size=3))) == []  # other trainers


def test_a_trainer_that_is_none_of_trl_s_counts_its_batch_itself():
    """Its prompts are counted, and its groups drawn, by code of its own: F22 was said of it by trl's arithmetic."""

    class Vendored:
        args = None

    (finding,) = batch.judge_batch(training(Vendored(), **asked(1, 8)))
    assert finding.verdict is Verdict.NOT_CHECKED and "Vendored" in finding.why
