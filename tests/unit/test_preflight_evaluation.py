"""Evaluation and resuming: what a real run comes to after hours, seen in the cut one."""

import dataclasses
import json
import types

import datasets
import pytest
import small
import transformers
import trl

from failurelab.preflight.answer import Verdict
from failurelab.preflight.judges.evaluation import judge_evaluation, judge_resume
from failurelab.preflight.judges.given import judge_refused
from failurelab.preflight.stage import cuts, own_code, rewards
from failurelab.preflight.stage.callbacks import errors_noted
from failurelab.preflight.stage.evaluation import evaluate_once, evaluation_sets
from failurelab.preflight.training import Load, Source, Training
from failurelab_course.experiments import models

ROWS = datasets.Dataset.from_dict({"prompt": ["1+1=", "2+2="] * 4, "answer": ["2", "4"] * 4})


def needs_answer(completions, answer, **_):
    return [float(completion == right) for completion, right in zip(completions, answer)]


def goes_on(completions, **columns):
    return [0.5 if columns.get("answer") is None else float(len(text)) for text in completions]


def training(tmp_path, function, evaluated, source="", **asked):
    """Return what is judged: a trainer that has taken one step's rewards, and has evaluated its sets."""
    model, tokenizer = models.load("tiny")
    config = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "report_to": []}
    if cuts.counts_prompts():
        config["per_device_train_batch_size"] = 1
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", bf16=False, **config)
    given = {"processing_class": tokenizer, "train_dataset": ROWS, "eval_dataset": evaluated, "args": args}
    trainer = trl.GRPOTrainer(model=model, reward_funcs=[function], **given)
    judged = Training(trainer, {"eval_strategy": "steps"} | asked, dataset=ROWS, source=Source("train.py", source))
    with rewards.differing_rewards(judged):
        trainer.train()
        for name, rows in evaluation_sets(trainer).items():
            judged.evaluations[name] = evaluate_once(judged, trainer.evaluate, rows, name)
        judged.trains_evaluated = not evaluate_once(judged, trainer.evaluate, trainer.train_dataset).error
    return judged


def test_a_set_without_a_column_that_a_function_needs(tmp_path):
    """Nothing was said of evaluation, and the run ended in a TypeError at its first one."""
    lacking = ROWS.remove_columns("answer")
    if cuts.counts_prompts():  # trl 0.14 cannot evaluate
        (found,) = judge_evaluation(training(tmp_path, needs_answer, ROWS))
        assert found.verdict is Verdict.SUSPECTED and "this release" in found.evidence
        return
    (found,) = judge_evaluation(training(tmp_path, needs_answer, lacking))
    assert found.key == "evaluation:reward_funcs[0]" and found.verdict is Verdict.FOUND and found.tried
    assert "lacks the column 'answer'" in found.evidence and "TypeError" in found.evidence
    (found,) = judge_evaluation(training(tmp_path, goes_on, lacking))
    assert "goes on without it" in found.evidence
    held, found = judge_evaluation(training(tmp_path, needs_answer, {"whole": ROWS, "less": lacking}))
    assert held.verdict is Verdict.HELD and found.fault == "less"
    (held,) = judge_evaluation(training(tmp_path, needs_answer, ROWS))
    assert held.verdict is Verdict.HELD


@pytest.mark.skipif(cuts.counts_prompts(), reason="trl 0.14 cannot evaluate")
def test_a_set_that_cannot_be_evaluated(tmp_path):
    (found,) = judge_evaluation(training(tmp_path, needs_answer, ROWS.rename_column("prompt", "question")))
    assert found.verdict is Verdict.FOUND and "ends in KeyError" in found.evidence


@pytest.mark.skipif(cuts.counts_prompts(), reason="trl 0.14 cannot evaluate")
def test_a_metric_that_no_evaluation_returns(tmp_path):
    """A misspelt name of a metric was passed over, and the run ended in a KeyError at its first evaluation."""
    judged = training(tmp_path, needs_answer, {"left": ROWS, "right": ROWS}, load_best_model_at_end=True)
    judged.arguments["metric_for_best_model"] = "eval_left_lose"
    (found,) = [finding for finding in judge_evaluation(judged) if finding.part == "metric_for_best_model"]
    assert found.verdict is Verdict.FOUND and found.undo.values["metric_for_best_model"] == "eval_left_loss"
    for metric, accused in (("left_loss", False), ("eval_left_loss", False), (None, True), ("nothing_like_it", True)):
        judged.arguments["metric_for_best_model"] = metric  # None is "loss", which is of no set
        assert [finding.accuses for finding in judge_evaluation(judged)].count(True) == accused, metric
    judged.arguments["load_best_model_at_end"] = False
    judged.arguments["metric_for_best_model"] = None
    assert not [finding for finding in judge_evaluation(judged) if finding.accuses]


@pytest.mark.skipif(cuts.counts_prompts(), reason="trl 0.14 cannot evaluate")
def test_a_best_checkpoint_by_the_loss_of_an_evaluation(tmp_path):
    """The least trained checkpoint was loaded at the end, for its KL divergence was the smallest."""
    judged = training(tmp_path, needs_answer, ROWS, load_best_model_at_end=True)
    # before trl 1.5 the reward is not returned: there is no better metric to name
    judged.evaluations[""] = dataclasses.replace(judged.evaluations[""], metrics=("eval_loss", "eval_reward"))
    (found,) = [finding for finding in judge_evaluation(judged) if finding.accuses]
    assert found.verdict is Verdict.SUSPECTED and found.part == "metric_for_best_model"
    assert found.undo.values == {"metric_for_best_model": "eval_reward", "greater_is_better": True}
    for healed in (found.undo.values, {"load_best_model_at_end": False}):
        judged.arguments = {"eval_strategy": "steps", "load_best_model_at_end": True, **healed}
        assert not [finding for finding in judge_evaluation(judged) if finding.accuses] and not judged.notes
    judged.arguments = {"eval_strategy": "steps", "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    assert not [finding for finding in judge_evaluation(judged) if finding.accuses] and judged.notes  # it was chosen
    for greater, told in ((True, 0), (False, 1)):
        judged.arguments |= {"metric_for_best_model": "reward", "greater_is_better": greater}
        found = [finding for finding in judge_evaluation(judged) if finding.accuses]
        assert [finding.part for finding in found] == ["greater_is_better"] * told  # it was the worst checkpoint
    judged.arguments["greater_is_better"] = None
    judged.evaluations[""] = dataclasses.replace(judged.evaluations[""], metrics=("eval_loss",))  # such as of SFT
    judged.arguments["metric_for_best_model"] = None
    assert not [finding for finding in judge_evaluation(judged) if finding.accuses]


@pytest.mark.parametrize(
    ("given", "undone"),
    [
        ({"load_best_model_at_end": True, "save_strategy": "steps"}, {"load_best_model_at_end": False}),
        ({"dataloader_prefetch_factor": 2}, {"dataloader_prefetch_factor": None}),
        ({"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 500}, {}),
        ({"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1}, {}),
    ],
)
def test_arguments_that_transformers_compares_are_compared_as_given(tmp_path, given, undone):
    """They are cut before transformers sees them: what it refuses was trained for three steps, and nothing was said."""
    cutting = cuts.CutArguments(3, str(tmp_path))
    with cutting.cut():
        arguments = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    said, undo = cutting.refused(arguments)
    assert bool(said) is bool(undone) and undo == undone
    assert [finding.part for finding in judge_refused(said, undo)] == ["arguments"] * bool(undone)


@pytest.mark.parametrize(
    ("asked", "raises"), [({}, True), ({"eval_strategy": "steps", "load_best_model_at_end": True}, False)]
)
def test_a_callback_of_a_library_reads_arguments_as_given(tmp_path, asked, raises):
    """`EarlyStoppingCallback` asserts what is cut: it stood under NOT CHECKED, with the fault and without it."""
    cutting = cuts.CutArguments(3, str(tmp_path))
    with cutting.cut():
        config = {"use_cpu": True, "bf16": False, "report_to": []}
        arguments = trl.GRPOConfig(str(tmp_path), **config, **asked | ({"save_strategy": "steps"} if asked else {}))
    stopping = transformers.EarlyStoppingCallback(3)
    handler = types.SimpleNamespace(callbacks=[stopping])
    trainer = types.SimpleNamespace(args=arguments, callback_handler=handler, state=transformers.TrainerState())
    control, own = transformers.TrainerControl(), own_code.OwnCode(tmp_path / "train.py")
    with errors_noted(trainer, own, [stopping], cutting.uncut(arguments)) as findings:
        stopping.on_train_begin(arguments, trainer.state, control)
    assert [finding.verdict for finding in findings] == [Verdict.SUSPECTED] * raises


@pytest.mark.parametrize(
    ("asked", "source", "verdict"),
    [
        ({}, "", Verdict.NOT_APPLICABLE),
        ({"eval_strategy": "no"}, "trainer.train()\nprint(trainer.evaluate())", Verdict.NOT_CHECKED),
        ({"eval_strategy": "epoch"}, "", Verdict.SUSPECTED),
        ({"eval_on_start": True}, "", Verdict.NOT_CHECKED),
    ],
)
def test_evaluation_is_never_passed_over_in_silence(asked, source, verdict):
    trainer = types.SimpleNamespace(eval_dataset=None, reward_funcs=[])
    (answer,) = judge_evaluation(Training(trainer, asked, source=Source("train.py", source)))
    assert answer.verdict is verdict


HERE = "the folder"
CONFIG = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    ("files", "resume", "verdict", "said"),
    [
        ({}, None, Verdict.NOT_APPLICABLE, "anew"),
        ({}, HERE, Verdict.SUSPECTED, "no trainer_state.json"),
        ({}, "nowhere", Verdict.SUSPECTED, "is not there"),
        ({}, True, Verdict.SUSPECTED, "no checkpoint"),
        ({"trainer_state.json": {"global_step": 5}, "config.json": CONFIG}, HERE, Verdict.NOT_CHECKED, "of this"),
        ({"trainer_state.json": {"global_step": 500}}, HERE, Verdict.SUSPECTED, "ends at once"),
        (
            {"trainer_state.json": {}, "config.json": CONFIG | {"model_type": "llama"}},
            HERE, Verdict.SUSPECTED, "model_type llama and not qwen2",
        ),
        ({"trainer_state.json": {}, "adapter_config.json": {"r": 8}}, HERE, Verdict.SUSPECTED, "an adapter"),
    ],
)  # fmt: skip
def test_a_checkpoint_to_resume_from_is_looked_at(files, resume, verdict, said, tmp_path):
    """A folder that is not there, or of another model, was passed over: preflight began anew without a word."""
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    trainer, model = types.SimpleNamespace(train_dataset=None), small.qwen2()
    trainer.model = model
    load = Load("qwen", {}, model.config, False)
    given = str(folder) if resume == HERE else resume
    asked = {"max_steps": 100, "output_dir": str(tmp_path / "fresh")}
    (answer,) = judge_resume(Training(trainer, asked, loads=[load], resume=given))
    assert answer.verdict is verdict and said in f"{answer.evidence} {answer.why}"


def test_the_last_checkpoint_is_found_and_the_option_alone_does_nothing(tmp_path):
    for step in (5, 40, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    trainer = types.SimpleNamespace(train_dataset=None, model=small.qwen2())
    (answer,) = judge_resume(Training(trainer, {"output_dir": str(tmp_path)}, resume=True))
    assert "checkpoint-40" in answer.evidence
    (answer,) = judge_resume(Training(trainer, {"resume_from_checkpoint": "old"}))
    assert answer.verdict is Verdict.SUSPECTED and "no Trainer reads it" in answer.evidence
