"""Rollouts that are garbage: generation in train mode under gradient checkpointing, measured and repaired.

What goes wrong: `generate()` in train mode with gradient checkpointing and the KV cache in use returns other tokens
than in eval mode, without an error. The model switches the cache off internally, and `generate` goes on as if there
were one.

- transformers up to 4.48: no cache comes back, so the whole sequence is fed again, but `cache_position` is the last
  position alone. The 4-D causal mask built from it is a full square: every token sees those after it. The mask is built
  for batches with padding, and always with eager attention; prompts of equal length with sdpa are right.
- transformers 4.49 to 4.52: `generate` keeps its own cache, which the layers do fill: right.
- transformers 4.53 to 5.23: each checkpointed layer drops the cache (`GradientCheckpointingLayer`), and `generate`
  feeds one token a step: each new token is predicted from the last one alone.
- transformers 5.24 and later: a layer drops the cache only while gradients are enabled, and `generate` disables them:
  right. Not for GPT-2, whose model drops the cache before it calls its layers, and not for a loop of one's own that
  leaves gradients enabled.

A policy trained on such rollouts gets worse, with healthy gradients and no message. Since 0.22, trl switches
checkpointing off while it generates; with transformers before 5.24 a bare `generate` is wrong all the same.

Sources: `_update_model_kwargs_for_generation` (transformers, generation/utils.py), `Qwen2Model.forward` (4.48),
`GradientCheckpointingLayer` (modeling_layers.py); https://github.com/huggingface/trl/issues/3683,
https://github.com/huggingface/trl/pull/3882.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from failurelab import _greedy, failures, gradients
from failurelab._unwrap import unwrap
from failurelab.errors import raises_own
from failurelab.failures import verdicts
from failurelab.failures.predicates import Value
from failurelab.handles import Handle, eval_mode, keep_modes, unseen, wrap_method

# By how many nats a log-probability may differ between two ways to compute it, by the bytes of the weights' numbers.
ROUNDING = {2: 0.5, 4: 0.01, 8: 0.01}
_OPEN = 8  # tokens of a completion that are predicted without a causal mask, as a control


@contextlib.contextmanager
def safe_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, `generate` on this model agrees with eval mode: checkpointing is off, and so is dropout.

    Every module's mode and checkpointing flag is restored after, also when generation raises. The checkpointing
    function and its arguments are never touched, so what comes back is what was there. May be nested. For plain models,
    PEFT's and other wrappers; parameters that are partitioned (ZeRO-3) still have to be gathered by the caller.
    """
    with eval_mode(model), contextlib.ExitStack() as stack:
        for _, module in list(gradients.checkpointed(model)):
            stack.enter_context(mock.patch.object(module, "gradient_checkpointing", False))
        yield model


def repair(model: nn.Module) -> Handle:
    """Run every `model.generate` from now on inside `safe_generation`; `remove()` on the handle takes that back.

    For trainers that generate by themselves: `rollouts.repair(trainer.model)` before `trainer.train()`. A model may be
    repaired before PEFT or a trainer wraps it.

    Raises:
        AttributeError: the model has no `generate`, such as a DistributedDataParallel wrapper: repair what it wraps.
    """

    def around(generate: Any, *args: Any, **kwargs: Any) -> Any:
        with safe_generation(generate.__self__):
            return generate(*args, **kwargs)

    return wrap_method(model, "generate", around, "generation is safe under gradient checkpointing")


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One prompt, completed greedily in both states.

    `error` is the greatest difference, in nats, between the log-probability with which a token was chosen in train mode
    and the one that the policy in eval mode gives to the same token.
    """

    prompt: str
    training: str
    evaluation: str
    agrees: bool
    error: float


@dataclasses.dataclass(frozen=True)
class RolloutReport:
    """Generation as a trainer does it, against generation in eval mode with gradient checkpointing off; both greedy.

    Attributes:
        rollouts: the prompts with both completions; `agrees` if these are the same, token by token.
        error: the greatest of all differences between the log-probability that a token was chosen with and the one the
            policy gives it, in nats. 0 except for rounding, if generation draws from the policy.
        mean_error: their mean over the tokens.
        rounding: an `error` up to this is rounding.
        training_logp: mean log-probability, in nats a token, that the policy in eval mode gives the completions that
            were generated in train mode.
        evaluation_logp: the same for the completions that were generated in eval mode.
        checkpointing: the kind of gradient checkpointing: `off`, `reentrant`, `non-reentrant` or `unknown`.
        use_cache: the argument with which `generate` called the model's forward; None without one.
        dropout: whether dropout would be at work in train mode; the comparison leaves it out.
        figures: what the registry's F7 is about.
        planted: the figures that F7's controls give on the same prompts, by their names.
        unplanted: the error with which the model refused them; empty if it did not.
    """

    rollouts: tuple[Rollout, ...]
    error: float
    mean_error: float
    rounding: float
    training_logp: float
    evaluation_logp: float
    checkpointing: str
    use_cache: bool | None
    dropout: bool
    figures: Mapping[str, Value]
    planted: Mapping[str, Mapping[str, Value]]
    unplanted: str = ""

    @property
    def agrees(self) -> bool:
        """True if generation in train mode draws from the policy: every token with the policy's own probability.

        This is what a run needs. Completions may still differ where two tokens are equally likely, and rounding
        decides; and they may be the same by luck where the probabilities are wrong.
        """
        return verdicts.judge(failures.get("F7"), [self.figures]).verdict != verdicts.FOUND

    @property
    def agreeing(self) -> int:
        """How many completions are the same in both modes, of `len(report.rollouts)`."""
        return sum(rollout.agrees for rollout in self.rollouts)

    @property
    def worst(self) -> Rollout:
        """The clearest disagreement: the greatest error among the completions that differ, or among all."""
        return max(self.rollouts, key=lambda rollout: (not rollout.agrees, rollout.error))

    def __str__(self) -> str:
        total = len(self.rollouts)
        state = f"gradient checkpointing {self.checkpointing}, use_cache={self.use_cache}"
        if self.agrees:
            return (
                f"generation in train mode ({state}) draws from the policy: {self.agreeing} of {total} completions are "
                f"those of eval mode, log-probabilities differ by {self.error:.1e} nats at most."
            )
        worst = self.worst
        return (
            f"generation in train mode ({state}) does not draw from the policy: its log-probabilities are off by "
            f"{self.mean_error:.2f} nats a token, {self.error:.2f} at most. {total - self.agreeing} of {total} greedy "
            f"completions differ from eval mode, such as {worst.prompt!r} -> {worst.training!r} (there "
            f"{worst.evaluation!r}). A token of them has a mean log-probability of {self.training_logp:.2f} under the "
            f"policy, a token made in eval mode {self.evaluation_logp:.2f}. "
            "Next: rollouts.repair(trainer.model), or trainer.generation_config.use_cache = False, or no checkpointing."
        )


def check(model: nn.Module, tokenizer: Any, prompts: Sequence[_greedy.Prompt], **generate_kwargs: Any) -> RolloutReport:
    """Compare generation as a trainer will do it with generation in eval mode.

    As a trainer will do it: in train mode, with the model's present gradient checkpointing, the cache as
    `generate_kwargs` and the generation configs ask for it, and all prompts in one batch, padded on the left. Both
    sides decode greedily, so that they can be compared token by token. Modes, checkpointing, generation config and
    random state are as before afterwards.

    Args:
        model: a causal language model, plain or PEFT.
        tokenizer: encodes the prompts; its padding side does not matter.
        prompts: texts, or lists of messages for the chat template. Use different lengths: up to transformers 4.48 a
            batch without padding is right with sdpa, also where the next one is wrong.
        generate_kwargs: for `generate`, such as `use_cache=False`, `max_new_tokens=8` (by default 32) or a trainer's
            `generation_config=trainer.generation_config`. Settings of sampling are overridden.

    Raises:
        ValueError: no prompts, an empty one, or prompts that do not fit the model's context with the new tokens.
    """
    config = generate_kwargs.get("generation_config") or unwrap(model).generation_config
    new_tokens = generate_kwargs.get("max_new_tokens") or config.max_new_tokens or _greedy.NEW_TOKENS
    ids, mask = _greedy.encode(model, tokenizer, prompts, new_tokens)
    with keep_modes(model):
        model.train()
        return compare(model, tokenizer, ids, mask, **(generate_kwargs | {"max_new_tokens": new_tokens}))


def compare(
    model: nn.Module,
    tokenizer: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    /,
    *,
    generate: Callable[..., Any] | None = None,
    rounding: float | None = None,
    **generate_kwargs: Any,
) -> RolloutReport:
    """Compare greedy generation in the model's present state with the same inside `safe_generation`.

    Args:
        model: in the state that is in question.
        tokenizer: for the report's texts, and for the end token if the generation configs have none.
        input_ids: `(batch, length)`, padded on the left.
        attention_mask: `(batch, length)`, 0 for padding.
        generate: called instead of `model.generate`, with gradients enabled or not as they are here.
        rounding: see RolloutReport; by default it follows from the dtype of the weights.
        generate_kwargs: for `generate`; settings of sampling are overridden. Tensors, such as `pixel_values`, are
            inputs of the model: tokens are scored with those of their row.

    Raises:
        ValueError: it is not known which images belong to which row.
    """
    inputs = _greedy.tensors(generate_kwargs)
    own = [_greedy.inputs_of_row(model, inputs, input_ids, attention_mask, row) for row in range(len(input_ids))]
    foreign: Any = model
    generate = generate or foreign.generate
    if rounding is None:
        sizes = (parameter.element_size() for parameter in model.parameters() if parameter.is_floating_point())
        rounding = ROUNDING[min(sizes)]
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    kinds = sorted({kind for kind, _ in gradients.checkpointed(model)})
    no_dropout = _greedy.NoDropout()
    planted: dict[str, dict[str, float]] = {}
    unplanted = ""
    cuda = [input_ids.device] if input_ids.is_cuda else []
    rollouts, errors, training_logps, evaluation_logps = [], [], [], []
    with (
        unseen(),
        torch.random.fork_rng(devices=cuda),
        _greedy.greedy(model, generate_kwargs) as kwargs,
    ):

        def complete() -> list[tuple[list[int], torch.Tensor]]:
            output = generate(**batch, **kwargs)
            return _greedy.read_completions(output, input_ids.shape[1], kwargs["generation_config"], tokenizer)

        with no_dropout, _greedy.record_use_cache(model) as use_cache:
            training = complete()
        with safe_generation(model), torch.no_grad():
            evaluation = complete()
            for ids, mask, row, (tokens, chosen), (right, _) in zip(
                input_ids, attention_mask, own, training, evaluation
            ):
                prompt = ids[mask.bool()]
                policy = _log_probs(model, prompt, tokens, row)  # (tokens,), as chosen is
                errors.append((policy - chosen).abs())
                training_logps.append(policy)
                evaluation_logps.append(policy if tokens == right else _log_probs(model, prompt, right, row))
                texts = [tokenizer.decode(row, skip_special_tokens=True) for row in (tokens, right)]
                text = tokenizer.decode(prompt)
                rollouts.append(Rollout(text, texts[0], texts[1], tokens == right, errors[-1].max().item()))
            for prompt, mask, inputs, (tokens, _) in zip(input_ids, attention_mask, own, training):
                if inputs or (planted and all(each["draw_gap"] > rounding for each in planted.values())):
                    break  # seen, or images belong to the row
                try:
                    gaps = plant(model, prompt[mask.bool()], tokens)
                except Exception as error:  # a model of another kind: what was compared is told all the same
                    if raises_own(error):
                        raise
                    unplanted = f"{type(error).__name__}: {error}"
                    break
                for name, gap in gaps.items():
                    planted[name] = max(gap, planted.get(name, gap), key=lambda each: each["draw_gap"])
    figures: dict[str, float] = {
        "draw_gap": torch.cat(errors).nan_to_num(nan=math.inf).max().item(),  # what is no number is off by any measure
        "draw_rounding": rounding,
        "prompt_lengths": len(set(attention_mask.sum(-1).tolist())),
        "tokens_drawn": max(map(len, errors)),
    }
    return RolloutReport(
        rollouts=tuple(rollouts),
        error=figures["draw_gap"],
        mean_error=torch.cat(errors).mean().item(),
        rounding=rounding,
        training_logp=torch.cat(training_logps).mean().item(),
        evaluation_logp=torch.cat(evaluation_logps).mean().item(),
        checkpointing=kinds[0] if kinds else "off",
        use_cache=use_cache[-1] if use_cache else None,
        dropout=no_dropout.stopped,
        figures=figures,
        planted=planted,
        unplanted=unplanted,
    )


def plant(model: nn.Module, prompt: torch.Tensor, completion: list[int]) -> dict[str, dict[str, float]]:
    """Return what a completion's log-probabilities would be off by, with each mechanism of F7 planted.

    Without a causal mask earlier tokens read later ones, as transformers up to 4.48 lets them where prompts are padded;
    predicted from the last token alone is what a dropped cache leaves.
    """
    foreign: Any = model
    tokens = torch.tensor(completion, dtype=prompt.dtype, device=prompt.device)
    ids = torch.cat([prompt, tokens])[None]  # (1, prompt + completion)
    right = _log_probs(model, prompt, completion, {})  # (completion,)

    def gap(rows: torch.Tensor, places: range) -> dict[str, float]:
        """Compare the logits that places of the completion are drawn by, (places, vocabulary)."""
        drawn = tokens[list(places)]
        logps = rows.float().log_softmax(-1).gather(-1, drawn[:, None])[:, 0]
        return {"draw_gap": (logps - right[list(places)]).abs().max().item()}

    def without_context() -> dict[str, float]:
        before = ids[0, len(prompt) - 1 : -1, None]  # (completion, 1): the token before each
        rows = foreign(input_ids=before, attention_mask=torch.ones_like(before), use_cache=False).logits
        return gap(rows[:, 0], range(len(tokens)))

    def without_mask() -> dict[str, float]:
        places, rows = range(max(0, len(tokens) - _OPEN), len(tokens)), []
        for place in places:  # each token behind a sequence of its own, as it is drawn
            size, dtype = len(prompt) + place, next(model.parameters()).dtype
            mask = torch.zeros(1, 1, size, size, dtype=dtype, device=ids.device)
            rows.append(foreign(input_ids=ids[:, :size], attention_mask=mask, use_cache=False).logits[0, -1])
        return gap(torch.stack(rows), places)

    planted = {"predicted from the last token alone": without_context()}
    if getattr(unwrap(model).config, "_attn_implementation", None) in (None, "eager", "sdpa"):
        # Others take no mask of four dimensions, nor does GPT-2 in older releases: there this mechanism is not planted.
        with contextlib.suppress(RuntimeError, ValueError):
            planted["no causal mask"] = without_mask()
    return planted


def _log_probs(
    model: nn.Module, prompt: torch.Tensor, completion: list[int], inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return `(tokens,)`: the log-probability of each token of the completion, from one forward pass over all."""
    tokens = torch.tensor(completion, dtype=prompt.dtype, device=prompt.device)
    ids = torch.cat([prompt, tokens])[None]
    longer = {  # types of tokens: those of a completion are text's, 0
        name: nn.functional.pad(value, (0, len(tokens))) if value.shape == (1, len(prompt)) else value
        for name, value in inputs.items()
    }
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **longer)
    logits: torch.Tensor = output.logits[0]  # (prompt + completion, vocabulary)
    return logits[-len(tokens) - 1 : -1].float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
