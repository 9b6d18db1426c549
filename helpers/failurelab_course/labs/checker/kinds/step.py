"""The kind `step`: a trainer whose optimizer steps are held against the textbook: the first, a later one, the last.

As the kind `trainer`. In addition the gradients of three steps are compared with those of GRPO's definition for the
options that the trainer has, and it is told which options these are. The first step cannot show everything: there the
policy is its own reference, and every ratio is 1. And a repair has to last until the end.
"""

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

from failurelab import handles, textbook
from failurelab_course.labs.checker.base import CheckRun
from failurelab_course.labs.checker.kinds import trainer as trainer_kind

STEPS = (1, 8)  # at the later one the weights have moved; a wrong fix is stopped behind it
NOTHING = textbook.Apart(0.0, 0.0, 1.0)  # of a step whose rewards leave no gradient
# Of the definition, beside beta: with another one a step may be right, and is another algorithm's.
OPTIONS = (
    "loss_type", "scale_rewards", "epsilon", "epsilon_high", "delta", "num_iterations", "importance_sampling_level",
    "mask_truncated_completions", "sync_ref_model", "reward_weights", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty",
)  # fmt: skip


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Build the script's trainer, train it, and fill in `run.metrics`."""
    trainer_kind.measure(script, run, _compared)


def steps_of(trainer: Any) -> tuple[int, ...]:
    """Return the numbers of the steps that are compared."""
    return tuple(sorted({*STEPS, max(trainer.args.max_steps, *STEPS)}))


def other_options(args: Any) -> str:
    """Return the options of the algorithm that are not this release's defaults, as `name=value`."""
    usual = {field.name: field.default for field in dataclasses.fields(args) if field.name in OPTIONS}
    other = {name: getattr(args, name) for name in OPTIONS if name in usual and getattr(args, name) != usual[name]}
    return ", ".join(f"{name}={value}" for name, value in other.items())


@contextlib.contextmanager
def _compared(trainer: Any, run: CheckRun) -> Iterator[None]:
    metrics = run.metrics
    metrics["other_options"] = other_options(trainer.args)
    metrics["beta"] = getattr(trainer, "beta", trainer.args.beta)
    with _counted(trainer, run), compared(trainer, metrics, "step") as reports:
        try:
            yield
        finally:
            if reports:
                metrics["other_texts"] = any(report.texts for report in reports)


@contextlib.contextmanager
def compared(trainer: Any, metrics: dict[str, Any], prefix: str) -> Iterator[list[Any]]:
    """Hold the trainer's steps of a block against the textbook; yield the reports, which grow.

    `PREFIX_cosine`, `PREFIX_size` and `PREFIX_found` are the worst of them, where every step could be compared;
    `PREFIX_cosine_first`, if the kind has it, is that of the first step whose rewards leave a gradient.
    """
    with textbook.compare(trainer, steps_of(trainer), with_suspects=False) as comparison:
        reports = comparison.reports
        try:
            yield reports
        finally:
            if reports and all(report.verdict != "NOT CHECKED" for report in reports):
                apart = [report.apart for report in reports if report.apart] or [NOTHING]
                metrics[f"{prefix}_cosine"] = min(each.cosine for each in apart)
                metrics[f"{prefix}_size"] = max((each.size for each in apart), key=lambda size: abs(size - 1))
                metrics[f"{prefix}_found"] = next((report.named for report in reports if report.named), "")
                if f"{prefix}_cosine_first" in metrics:
                    metrics[f"{prefix}_cosine_first"] = apart[0].cosine


@contextlib.contextmanager
def _counted(trainer: Any, run: CheckRun) -> Iterator[None]:
    """Count the tokens that the policy draws for the loss, ends too, and those of them that its masks let through."""
    drawn, trained, within = 0, 0, False

    def generate(method: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal drawn
        out = method(*args, **kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        new = getattr(out, "sequences", out)[:, ids.shape[1] :]  # (completions, tokens)
        ends = (new == run.tokenizer.eos_token_id).int()
        drawn += int((ends.cumsum(1) - ends == 0).sum()) * within
        return out

    def score(method: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal trained, within
        within = True
        try:
            batch = method(*args, **kwargs)
        finally:
            within = False
        trained += int((batch["completion_mask"] * batch.get("tool_mask", 1)).sum())
        return batch

    what = "the checker's count of tokens"
    try:
        with (
            handles.wrap_method(trainer.model, "generate", generate, what),
            handles.wrap_method(trainer, "_generate_and_score_completions", score, what),
        ):
            yield
    finally:
        run.metrics["tokens_dropped"] = 1 - trained / drawn if drawn else None
