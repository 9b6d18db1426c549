"""What a lab's script really does, measured from outside: the part that is common to all kinds of labs.

A script that prints "fixed" has repaired nothing, and a warning that is gone is no gradient. So the checker imports the
script, calls the one function that it must define, and measures by itself. Which function, and what is measured,
depends on the lab's kind; each has a module of its name in `kinds`, with a function `measure(script_module, run)`:

    trainer     build_trainer(model_path, output_dir) -> a Trainer, which the checker trains
    loop        train(model, tokenizer, steps), a training loop written by hand
    zero3       build_trainer(model_path, output_dir) -> a Trainer, trained under a ZeRO-3 engine
    placement   load_model(model_path, rank) -> models, for each simulated rank of a node
    node        COMMAND, and prepare(model_path, output_dir) -> model, config, on a simulated node
    logits      build_trainer(model_path, output_dir) -> a Trainer, whose logits are read
    launch      both build_trainer and load_model(model_path, rank), each measured whatever fails
    policies    build_trainer(model_path, output_dir) -> a Trainer, whose engine is compared with it
    weights     importance_weights(policy_logps, engine_logps, mask), of a loop of one's own
    step        build_trainer(model_path, output_dir) -> a Trainer, whose steps are compared with the textbook's
    ranks       build_trainer(model_path, output_dir) -> the same of two processes, which train together
    log_probs   log_probs(model, input_ids, attention_mask, completion_length), a scoring function

It runs in the era's Python, in a process of its own (see `server`).
"""

import errno
import importlib
import os
import pathlib
import traceback
import types
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from failurelab_course.experiments import deepspeed, models
from failurelab_course.experiments.quiet import count_warnings
from failurelab_course.labs.checker import scorer
from failurelab_course.labs.checker.base import CheckRun, Measured, Refused, import_script
from failurelab_course.labs.metrics import agree, of

WARNING = "None of the inputs have requires_grad=True"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def run(
    script: pathlib.Path,
    model_path: pathlib.Path,
    output_dir: pathlib.Path,
    trainer_class: str,
    kind: str = "trainer",
    *,
    device: str = "cpu",
    facts: Mapping[str, Any] | None = None,
    accuracy_before: float | None = None,
    stop_after: int = 0,
) -> Measured:
    """Import `script`, let it do its work and measure; no error of the script leaves this function.

    Args:
        script: defines the function that the kind calls.
        model_path: the model that the script is given, and that accuracy before training is measured on.
        output_dir: for the trainer.
        trainer_class: for the kind `trainer`, the class of trl or transformers that the trainer must be an instance of.
        kind: one of the above.
        device: `cpu` or `cuda`, where the script must compute; of the process's GPUs it is the current one.
        facts: what the script's ANSWER may say beside figures that are measured here, by name.
        accuracy_before: of the model as it is given, where it is known; else the scorer measures it.
        stop_after: see `CheckRun`.
    """
    metrics: dict[str, Any] = dict.fromkeys(of(kind))
    metrics |= {"error": "", "error_stage": "", "answer": "", "answer_claims": 0, "answer_wrong": 0}
    metrics |= {"warnings": 0} if "warnings" in metrics else {}
    measured = Measured(metrics)
    try:
        clean, tokenizer = models.load(str(model_path))
    except models.ModelError as error:
        measured.environment = str(error)
        return measured
    start = {name: tensor.clone() for name, tensor in clean.state_dict().items()}
    # What a user would see is counted: the script's own filters, set in the block, take effect.
    with scorer.start(clean, tokenizer) as score, count_warnings(WARNING) as shown:
        work = CheckRun(
            model_path, output_dir, trainer_class, metrics, clean, tokenizer, score, start, device, stop_after
        )
        if "accuracy_before" in metrics:
            metrics["accuracy_before"] = score() if accuracy_before is None else accuracy_before
        measure_kind = importlib.import_module(f"{__package__}.kinds.{kind}").measure
        transformers.set_seed(0)
        try:
            module = import_script(script)
            measure_kind(module, work)
            answer(module, metrics, facts or {})
        except Refused as error:
            measured.refused = str(error)
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a script are its outcome too
            metrics |= {"error": f"{type(error).__name__}: {_first_line(error)}", "error_stage": work.stage}
            measured.environment = _environment(error, script)
            measured.traceback = "".join(traceback.format_exception(error))
    metrics |= {"warnings": shown.count} if "warnings" in metrics else {}
    return measured


def answer(module: types.ModuleType, metrics: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Compare the ANSWER that a script gives, if any, with the lab's facts and with what was measured.

    `ANSWER = {"verdict": "harmless", "tensors_without_gradient": 0}`: a verdict, and what supports it. A broken lab may
    ask for one as well as for a repair: then the lab's facts say what was so before the repair.

    Raises:
        Refused: it is not of this form, or names what is neither a fact nor a figure.
    """
    given = getattr(module, "ANSWER", None)
    if given is None:
        return
    if not isinstance(given, dict) or "verdict" not in given:
        raise Refused("ANSWER is a dictionary with a verdict and figures, such as {'verdict': 'broken', 'warnings': 3}")
    claims = {name: value for name, value in given.items() if name != "verdict" and value not in (None, "")}
    for name, value in claims.items():
        if name not in metrics and name not in facts:
            raise Refused(f"ANSWER claims {name!r}, which is no figure that this lab measures")
        truth = facts.get(name, metrics.get(name))
        if isinstance(value, str) and truth is not None and not isinstance(truth, str):
            raise Refused(f"ANSWER claims {name} = {value!r}, which is no number")
        if not isinstance(value, int | float | str):
            raise Refused(f"ANSWER claims {name} = {value!r}, which is neither a number nor a text")
    metrics["answer"] = str(given["verdict"] or "")
    metrics["answer_claims"] = len(claims)
    metrics["answer_wrong"] = sum(
        not agree(value, facts.get(name, metrics.get(name))) for name, value in claims.items()
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else ""


def _environment(error: BaseException, script: pathlib.Path) -> str:
    """Return why an error is the machine's or the stack's fault and not the script's, or an empty text."""
    if isinstance(error, MemoryError):
        return "this machine has not enough memory for the run"
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU has not enough free memory for the run: {_first_line(error)}"
    if isinstance(error, deepspeed.EngineError):
        return str(error)  # no DeepSpeed, no compiler: raised before the script's own function is called
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return f"this machine has no room for the run: {os.strerror(error.errno)}"
    if isinstance(error, ImportError):
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        frames = [name for name in frames if not name.startswith("<frozen")]
        if frames and pathlib.Path(frames[-1]).resolve() != pathlib.Path(script).resolve():
            return f"the library stack does not import: {_first_line(error)}"
    return ""
