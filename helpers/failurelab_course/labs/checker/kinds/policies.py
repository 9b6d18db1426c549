"""The kind `policies`: a trainer whose rollouts may come from another policy than the one that is trained.

As the kind `trainer`. In addition every generation in the process is watched, whichever model it is of: at which
temperature it draws, what else bends its draws, and which ids. The log-probabilities that came with the rollouts are
compared with the policy's own, and the temperature of the scores is read from the gradient of the logits.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers

from failurelab import handles
from failurelab._unwrap import unwrap
from failurelab.logits import completion_logps
from failurelab.measure.scores import scoring_temperature
from failurelab_course.experiments import models
from failurelab_course.labs.checker.base import CheckRun
from failurelab_course.labs.checker.kinds import trainer as trainer_kind
from failurelab_course.labs.checker.kinds.trainer import Score, score

# Options of sampling that scores know nothing of, and what they are where they do nothing.
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Build the script's trainer, train it, and fill in `run.metrics`."""
    trainer_kind.measure(script, run, _watched)


@contextmanager
def _watched(trainer: Any, run: CheckRun) -> Iterator[None]:
    metrics, drawn, scores = run.metrics, set(), []
    metrics |= {"foreign_tokens": 0, "other_sampling": "", "drawn_by_policy": 0}
    policy = unwrap(trainer.model)
    temperatures: list[float] = []
    gaps: list[float] = []
    generate = transformers.GenerationMixin.generate

    def noted(model: Any, *args: Any, **kwargs: Any) -> Any:
        out = generate(model, *args, **kwargs)
        metrics["drawn_by_policy"] += model is policy
        config = kwargs.get("generation_config") or model.generation_config
        temperatures.append(float(kwargs.get("temperature") or config.temperature or 1.0))
        bent = {name: kwargs.get(name, getattr(config, name, None)) for name in PLAIN}
        off = {name: value for name, value in bent.items() if value not in (None, PLAIN[name])}
        if not 0 < off.get("top_k", 0) < model.config.vocab_size:
            off.pop("top_k", None)
        metrics["other_sampling"] = ", ".join(f"{name}={value}" for name, value in off.items())
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        end = run.tokenizer.eos_token_id
        for row in getattr(out, "sequences", out)[:, ids.shape[1] :].tolist():
            drawn.add(tuple(row[: row.index(end) + 1] if end in row else row))
        return out

    def read(_: Any, args: tuple, rows: Any) -> None:
        if isinstance(rows, torch.Tensor) and rows.requires_grad and rows.shape[-1] > 1 and temperatures:
            kept, sampled = rows.detach().clone(), temperatures[-1]
            rows.register_hook(lambda gradient: _off(kept, gradient, sampled, metrics))

    def compare(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = method(*args, **kwargs)
        _rollouts(batch, trainer, run, drawn, scores, gaps)
        drawn.clear()
        return batch

    # at the head and first of its hooks: what a script divides after it, in whichever place, is in the gradient
    hook = trainer.model.get_output_embeddings().register_forward_hook(read, prepend=True)
    try:
        with mock.patch.object(transformers.GenerationMixin, "generate", noted):
            if callable(getattr(trainer, "_generate_and_score_completions", None)):
                with handles.wrap_method(trainer, "_generate_and_score_completions", compare, "the checker's look"):
                    yield
            else:
                yield
    finally:
        hook.remove()
        if gaps:
            metrics["policy_gap_first"], last = gaps[0], gaps[-max(1, len(gaps) // 4) :]
            metrics["policy_gap"] = sum(last) / len(last)
        if scores:
            score(scores, run, trainer.state.max_steps)


def _off(rows: torch.Tensor, gradient: torch.Tensor, sampled: float, metrics: dict[str, Any]) -> None:
    scored = scoring_temperature(rows, gradient)
    if scored is not None:
        metrics["temperature_off"] = max(abs(scored / sampled - 1), metrics["temperature_off"] or 0.0)


@torch.no_grad()
def _rollouts(batch: dict, trainer: Any, run: CheckRun, drawn: set, scores: list[Score], gaps: list[float]) -> None:
    """Score a batch of rollouts, count what nobody drew, and compare its log-probabilities with the policy's."""
    answers, mask = dict(models.sums()), batch["completion_mask"].bool()
    for prompt, kept, ids, counts in zip(batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"], mask):
        asked = run.tokenizer.decode(prompt[kept.bool()], skip_special_tokens=True)
        ids = ids[counts].tolist()
        right = models.reward([run.tokenizer.decode(ids, skip_special_tokens=True)], [answers.get(asked, "")])[0]
        scores.append((trainer.state.global_step, asked, right, run.tokenizer.eos_token_id in ids))
        run.metrics["foreign_tokens"] += 0 if tuple(ids) in drawn else len(ids)
    engine = batch.get("sampling_per_token_logps")
    if engine is None or engine.shape != mask.shape:
        return
    whole = (torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1) for part in ("ids", "mask"))
    with torch.random.fork_rng(), handles.keep_modes(trainer.model):
        policy = completion_logps(trainer.model.eval(), *whole, mask.shape[1], trainer.args.temperature)
    gaps.append(float((policy - engine).abs()[mask].nan_to_num(nan=99.0).mean()))
