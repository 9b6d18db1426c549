"""Batch arithmetic: what the installed trl refuses is handed to it as it is, and what a step is, is said."""

import dataclasses
import functools
import json
import sys

import datasets
import pytest
import small
import trl

from failurelab.preflight.answer import Verdict
from failurelab.preflight.judges import batch
from failurelab.preflight.judges.given import judge_deepspeed, judge_given
from failurelab.preflight.repairs import EditableScript
from failurelab.preflight.script_text import Text
from failurelab.preflight.stage import cuts
from failurelab.preflight.training import Load, Training
from failurelab_course.experiments import models

SIZES = [(8, 8, 1), (4, 8, 1), (4, 8, 2), (6, 4, 1), (6, 4, 2), (3, 2, 1), (2, 1, 1), (12, 4, 4)]


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


@pytest.mark.parametrize(("size", "generations", "refused"), [(8, 4, False), (3, 4, True), (6, 4, True)])
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
            small.evaluated(config)
        except ValueError as caught:
            error = batch.refused(caught)
    assert (error is not None) == refused


def test_generations_that_are_set_too_late_to_be_refused():
    """Where the config is made they are checked; a round of generation stays as it was made then."""
    if "generation_batch_size" not in asked(8, 4):
        return
    (found,) = judge(**asked(8, 3, generation_batch_size=8))
    assert found.key == "F22:num_generations" and found.verdict is Verdict.FOUND and found.ends


def test_a_batch_is_judged_for_the_launch_and_not_for_this_machine():
    """Six completions are no multiple of four on one device; on two they are."""
    assert [cuts.is_refused(asked(6, 4), world) for world in (1, 2)] == [not cuts.counts_prompts(), False]
    assert [answer.verdict for answer in judge(world_size=2, **asked(6, 4))] == [Verdict.HELD]


def test_a_group_of_one_is_found_where_trl_takes_it():
    assert [answer.verdict for answer in judge(**asked(2, 1))] == [Verdict.FOUND]


def test_what_one_step_is():
    (held,) = judge(world_size=2, **asked(8, 4, 3))
    counts_prompts = "8 counts prompts" in held.evidence
    assert ("192 completions of 48 prompts" if counts_prompts else "48 completions of 12 prompts") in held.evidence


def test_another_error_is_not_about_batches():
    assert batch.refused(ValueError("Unrecognized model")) is None
    assert batch.refused(RuntimeError("must be divisible by num_generations")) is None


def test_other_trainers_have_no_such_arithmetic():
    assert list(batch.judge_batch(training(per_device_train_batch_size=3))) == []


def iter_rows():
    yield {"prompt": "a"}


class OfTrl:
    __module__ = "trl.trainer"


@pytest.mark.parametrize(
    ("given", "part", "words"),
    [
        (
            {"train_dataset": {"train": [1, 2], "test": [3]}},
            "train_dataset",
            ["dict with train, test", "dataset['train']"],
        ),
        ({"train_dataset": [{"prompt": "a"}]}, "train_dataset", ["a list of 1", "Dataset.from_list"]),
        ({"reward_funcs": [len, [1.0, 0.0]]}, "reward_funcs[1]", ["cannot be called", "do not call it"]),
        ({"reward_funcs": 0.5}, "reward_funcs[0]", ["float '0.5'"]),
        ({"model": OfTrl}, "model", ["the class OfTrl", "a model or its name"]),
        ({"args": {"beta": 0}}, "args", ["GRPOConfig(**args)"]),
        ({"train_dataset": iter_rows()}, "train_dataset", ["a generator", "from_list(list(rows))"]),
        ({"train_dataset": "trl-lib/tldr"}, "train_dataset", ["load_dataset"]),
        ({"reward_funcs": ["a_reward"]}, "reward_funcs[0]", ["the text 'a_reward'", "without quotes"]),
        ({"train_dataset": datasets.Dataset.from_dict({"prompt": []})}, "train_dataset", ["0 rows"]),
        (
            {"train_dataset": datasets.Dataset.from_dict({"prompt": [[1, 2], [3]]}), "reward_funcs": len},
            "train_dataset",
            ["token ids"],
        ),
        ({"train_dataset": datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]]})}, "", []),
        ({"train_dataset": datasets.Dataset.from_dict({"prompt": ["1+1="]})}, "", []),
        (
            {"train_dataset": datasets.Dataset.from_dict({"question": ["1+1="]}), "reward_funcs": len},
            "train_dataset",
            ["the columns question", "the column prompt"],
        ),
        ({"reward_funcs": [len, "a/reward-model"], "model": "a/model", "train_dataset": None}, "", []),
    ],
)
def test_what_a_trainer_cannot_take_is_told_with_what_it_takes(given, part, words, monkeypatch):
    """It was an AttributeError in a library, and of a DatasetDict "one prompt to train on"."""
    monkeypatch.setattr(sys.modules["__main__"], "a_reward", len, raising=False)
    findings = list(judge_given(given, OfTrl()))
    assert [finding.part for finding in findings] == [part] * bool(part)
    assert all(word in f"{findings[0].evidence} {findings[0].repair}" for word in words)


class GRPOTrainer(OfTrl):
    pass


class Scorer:
    async def __call__(self, completions, **_):
        return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "lacks", "word"),
    [
        (functools.partial(sum, start=0), "get_callable_name", "AttributeError"),
        (Scorer(), "event_loop", "coroutine"),
        (Scorer().__call__, "event_loop", "coroutine"),
        (Scorer(), "nothing", ""),
        (functools.partial(sum, start=0), "nothing", ""),
        (len, "get_callable_name", ""),
    ],
)
def test_what_a_release_asks_of_a_reward_function(function, lacks, word, monkeypatch):
    """The cut run has a stand-in, which has a name and answers at once."""
    import trl.trainer.utils as utils

    loops = {"start_event_loop", *(each for each in vars(utils) if "event_loop" in each)}
    for name in ("get_callable_name", *loops):
        monkeypatch.setattr(utils, name, None, raising=False)
        if lacks in name:
            monkeypatch.delattr(utils, name)
    findings = list(judge_given({"reward_funcs": [function]}, GRPOTrainer()))
    assert [finding.part for finding in findings] == ["reward_funcs[0]"] * bool(word)
    assert all(word in finding.evidence for finding in findings)


@pytest.mark.parametrize(
    ("dataset", "made"),
    [
        ([{"prompt": "a"}], "train_dataset=datasets.Dataset.from_list(rows)"),
        ({"train": [1], "test": [2]}, "train_dataset=rows['train']"),
    ],
)
def test_a_container_is_made_into_what_the_trainer_takes_by_an_edit(dataset, made):
    (finding,) = judge_given({"train_dataset": dataset}, OfTrl())
    text = Text("train.py", "import a\ntrainer = T(train_dataset=rows)\n")
    given = EditableScript(lambda file: text)
    given.calls = lambda kind, index=-1: iter([(text, text.tree.body[1].value)])
    (edited,) = finding.undo.change(given).files.values()
    assert made in edited


@pytest.mark.parametrize(
    ("name", "value", "told"), [("beta", "1e-3", 0.001), ("learning_rate", "2e-5", 2e-5), ("beta", 1e-3, None)]
)
def test_a_number_that_a_file_gives_as_a_text_is_told(name, value, told, tmp_path):
    """The run ended in a TypeError of arithmetic, which named neither the argument nor the file."""
    args = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    setattr(args, name, value)
    found = list(judge_given({"args": args}, OfTrl()))
    assert [each.undo.values for each in found] == [{name: told}] * (told is not None)


ZERO = {"zero_optimization": {"stage": 2}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": "auto"}}}


@pytest.mark.parametrize(
    ("config", "undone"),
    [
        (ZERO | {"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
        (ZERO | ADAM | {"gradient_clipping": 0.5}, {"learning_rate": 1e-5, "max_grad_norm": 0.5}),
        (ZERO | {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 64}, {"per_device_train_batch_size": 4}),
        (ZERO | {"fp16": {"enabled": True}}, {"fp16": True}),
        (ZERO | {"train_batch_size": 64}, {}),
        (ZERO | {"train_batch_size": 32, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}, None),
    ],
)
@pytest.mark.parametrize("way", ["dict", "file", "launch"])
def test_a_deepspeed_configuration_that_contradicts_the_arguments(config, undone, way, tmp_path):
    """The engine is cut away, and with it the comparison that ends the real run: nothing was said."""
    given = cuts._values(trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))
    judged = training(world_size=2, **given | asked(8, 4, 2))
    if way == "launch":
        judged.deepspeed = {"config": config, "file": "zero2.json", "refused": ""}
    else:
        (tmp_path / "zero2.json").write_text(json.dumps(config))
        judged.arguments["deepspeed"] = config if way == "dict" else str(tmp_path / "zero2.json")
    (finding,) = judge_deepspeed(judged)
    assert finding.part == "deepspeed" and finding.accuses is (undone is not None)
    assert (finding.undo.values if finding.undo else {}) == (undone or {})


@pytest.mark.parametrize(
    ("stage", "options", "by_trainer", "count"),
    [
        (3, {"device_map": "auto"}, False, 1),
        (3, {"device_map": "auto"}, True, 0),  # as trl loads it where no engine runs
        (3, {}, False, 0),
        (2, {"device_map": "auto"}, False, 0),
    ],
)
def test_a_device_map_where_zero_3_divides_the_model(stage, options, by_trainer, count):
    """Only a line of transformers told it, on the machines that were paid for."""
    judged = training(**asked(8, 4))
    judged.zero_stage, judged.loads = stage, [Load("a/model", options, None, by_trainer)]
    assert [finding.key for finding in judge_deepspeed(judged)] == ["given:device_map"] * count


def test_a_deepspeed_configuration_that_cannot_be_taken():
    for deepspeed in ("nowhere.json", {"gradient_accumulation_steps": 4}):
        (finding,) = judge_deepspeed(training(**asked(8, 4, deepspeed=deepspeed)))
        assert finding.verdict is Verdict.SUSPECTED and "deepspeed" in finding.key
    refused = training(**asked(8, 4))
    refused.deepspeed = {"config": {}, "file": "ds.json", "refused": "ds.json is not there"}
    assert [finding.verdict for finding in judge_deepspeed(refused)] == [Verdict.SUSPECTED]
    assert not list(judge_deepspeed(training(**asked(8, 4))))


def test_a_trainer_that_is_none_of_trl_s_counts_its_batch_itself():
    """Its prompts are counted, and its groups drawn, by code of its own: F22 was said of it by trl's arithmetic."""

    class Vendored:
        args = None

    (finding,) = batch.judge_batch(training(Vendored(), **asked(1, 8)))
    assert finding.verdict is Verdict.NOT_CHECKED and "Vendored" in finding.why


def test_a_plain_trainer_takes_a_list():
    assert not list(judge_given({"train_dataset": [1, 2]}, object()))
