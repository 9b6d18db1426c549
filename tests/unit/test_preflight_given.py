"""What is compared with the arguments as they were given."""

import types

import pytest
import transformers
import trl

from failurelab_preflight.finding import Verdict
from failurelab_preflight.judges.releases import refused
from failurelab_preflight.stage import cuts, own_code
from failurelab_preflight.stage.callbacks import errors_noted


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"load_best_model_at_end": True, "save_strategy": "steps"}, True),
        ({"dataloader_prefetch_factor": 2}, True),
        (
            {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 500},
            False,
        ),
        ({"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1}, False),
    ],
)
def test_arguments_that_transformers_compares_are_compared_as_given(tmp_path, given, says):
    """They were cut before transformers saw them: what it refuses was trained for three steps, and nothing was said."""
    findings = []
    with cuts.CutArguments(3, str(tmp_path)).cut():
        try:
            trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
        except ValueError as error:
            findings += refused(error)
    assert [finding.part for finding in findings] == ["arguments"] * says
    assert not list(refused(ValueError("another one")))


@pytest.mark.parametrize(
    ("asked", "raises"), [({}, True), ({"eval_strategy": "steps", "load_best_model_at_end": True}, False)]
)
def test_a_callback_of_a_library_reads_arguments_as_given(tmp_path, asked, raises):
    """`EarlyStoppingCallback` asserts what is cut: it stood under NOT CHECKED, with the fault and without it."""
    cutting = cuts.CutArguments(3, str(tmp_path))
    with cutting.cut():
        config = {"use_cpu": True, "bf16": False, "report_to": []}
        arguments = trl.GRPOConfig(str(tmp_path), **config, **asked | ({"save_strategy": "steps"} if asked else {}))
        cutting.settle(arguments)
    stopping = transformers.EarlyStoppingCallback(3)
    handler = types.SimpleNamespace(callbacks=[stopping])
    trainer = types.SimpleNamespace(args=arguments, callback_handler=handler, state=transformers.TrainerState())
    control, own = transformers.TrainerControl(), own_code.OwnCode(tmp_path / "train.py")
    with errors_noted(trainer, own, [stopping], cutting.uncut(arguments)) as findings:
        stopping.on_train_begin(arguments, trainer.state, control)
    assert [finding.verdict for finding in findings] == [Verdict.SUSPECTED] * raises
