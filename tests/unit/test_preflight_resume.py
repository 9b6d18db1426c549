"""What is compared with the arguments as they were given, and the checkpoint that a run goes on from."""

import json
import types

import pytest
import small
import transformers
import trl

from failurelab_preflight.answer import Verdict
from failurelab_preflight.judges.given import judge_refused
from failurelab_preflight.judges.resume import judge_resume
from failurelab_preflight.stage import cuts, own_code
from failurelab_preflight.stage.callbacks import errors_noted
from failurelab_preflight.training import Load, Training


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
