"""Rollouts that are garbage: generation in train mode under gradient checkpointing, measured and repaired.

What goes wrong: `generate()` in train mode with gradient checkpointing and the KV cache in use returns other tokens
than in eval mode, without an error. The model switches the cache off for itself, and `generate` goes on as if there
were one.

- transformers up to 4.48: no cache comes back, so the whole sequence is fed again, but `cache_position` is the last
  position alone. The 4-D causal mask made from it is a full square: every token sees those after it. It is made for
  batches with padding, and with eager attention always; prompts of equal length with sdpa are right.
- transformers 4.49 to 4.52: `generate` keeps the cache it made, which the layers do fill: right.
- transformers 4.53 and later: each checkpointed layer drops the cache (`GradientCheckpointingLayer`), and `generate`
  feeds one token a step: each new token is predicted from the last one alone.

A policy trained on such rollouts gets worse, with healthy gradients and no message. trl switches checkpointing off
while it generates since 0.22; a bare `generate` is as wrong as ever.

Sources: `_update_model_kwargs_for_generation` (transformers, generation/utils.py), `Qwen2Model.forward` (4.48),
`GradientCheckpointingLayer` (modeling_layers.py); https://github.com/huggingface/trl/issues/3683,
https://github.com/huggingface/trl/pull/3882.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from failurelab import _greedy as decoding
from failurelab import gradients
from failurelab._greedy import Prompt
from failurelab.handles import Handle, wrap_method

# By how many nats a log-probability may differ between two ways to compute it, by the bytes of the weights' numbers.
ROUNDING = {2: 0.5, 4: 0.01, 8: 0.01}


# The repair


@contextlib.contextmanager
def safe_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, `generate` on this model agrees with eval mode: checkpointing is off, and so is dropout.

    Every module's mode and checkpointing flag is restored after, also when generation raises. The checkpointing
    function with its arguments is never touched, so what comes back is what was there. May be nested. For plain models,
    PEFT's and other wrappers; parameters that are partitioned (ZeRO-3) still have to be gathered by the caller.
    """
    modes = [(module, module.training) for module in model.modules()]
    checkpointed = [module for _, module in gradients.checkpointed(model)]
    try:
        for module in checkpointed:
            module.gradient_checkpointing = False
        model.eval()
        for module, training in modes:
            if type(module).__module__.startswith("bitsandbytes"):
                # no dropout there; and in eval mode 4-bit weights may be packed for inference, for good, and then no
                # gradient passes them (bitsandbytes 0.50, Linear4bit.forward, on some processors)
                module.training = training
        yield model
    finally:
        for module in checkpointed:
            module.gradient_checkpointing = True
        for module, training in modes:
            module.training = training


def repair(model: nn.Module) -> Handle:
    """Run every `model.generate` from now on inside `safe_generation`; `remove()` on the handle takes that back.

    For trainers that generate by themselves: `rollouts.repair(trainer.model)` before `trainer.train()`. A model may be
    repaired before PEFT or a trainer wraps it.

    Raises:
        AttributeError: the model has no `generate`, such as a DistributedDataParallel wrapper: repair what it wraps.
    """

    def around(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with safe_generation(generate.__self__):
            return generate(*args, **kwargs)

    return wrap_method(model, "generate", around, "generation is safe under gradient checkpointing")


# The measurement


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One prompt, completed greedily in both states.

    `error` is the greatest difference, in nats, between the log-probability with which a token of the completion made
    in train mode was chosen and the one that the policy in eval mode gives it.
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
            policy gives it, in nats. 0 but for rounding, if generation draws from the policy.
        mean_error: their mean over the tokens.
        rounding: up to here `error` is taken for rounding.
        training_logp: mean log-probability, in nats a token, that the policy in eval mode gives the completions made in
            train mode.
        evaluation_logp: the same of the completions made in eval mode.
        checkpointing: whether gradient checkpointing was on: `off`, `reentrant`, `non-reentrant` or `unknown`.
        use_cache: what `generate` told the model, as seen in its forward pass; None where it said nothing.
        dropout: whether dropout would be at work in train mode; the comparison leaves it out.
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

    @property
    def agrees(self) -> bool:
        """True if generation in train mode draws from the policy: every token with the policy's own probability.

        This is what a run needs. Completions may still differ where two tokens are as likely as each other, and
        rounding decides; and they may be the same by luck where the probabilities are wrong.
        """
        return self.error <= self.rounding

    @property
    def agreeing(self) -> int:
        """How many completions are the same in both modes, of `len(report.rollouts)`."""
        return sum(rollout.agrees for rollout in self.rollouts)

    @property
    def worst(self) -> Rollout:
        """The clearest disagreement: the greatest error among the completions that differ, or among all."""
        return max(self.rollouts, key=lambda rollout: (not rollout.agrees, rollout.error))

    def table(self, limit: int = 8) -> str:
        """Return prompts and completions side by side, the clearest disagreements first, at most `limit` rows."""
        chosen = sorted(self.rollouts, key=lambda each: (each.agrees, 0.0 if each.agrees else -each.error))[:limit]
        rows = [("prompt", "in train mode", "in eval mode", "")]
        rows += [
            (repr(each.prompt), repr(each.training), repr(each.evaluation), "" if each.agrees else "differs")
            for each in chosen
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0])).rstrip() for row in rows
        )

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


def check(model: nn.Module, tokenizer: Any, prompts: Sequence[Prompt], **generate_kwargs: Any) -> RolloutReport:
    """Say whether generation as a trainer will do it agrees with generation in eval mode.

    As a trainer will do it: in train mode, with gradient checkpointing as it is set on the model now, the cache as
    `generate_kwargs` and the generation configs say, and all prompts in one batch, padded on the left. Both sides
    decode greedily, so that they can be compared token by token. Modes, checkpointing, generation config and random
    state are as before afterwards.

    Args:
        model: a causal language model, plain or PEFT.
        tokenizer: encodes the prompts; its padding side does not matter.
        prompts: texts, or lists of messages for the chat template. Let them differ in length: up to transformers 4.48
            a batch without padding is right with sdpa, whatever the next one is.
        generate_kwargs: for `generate`, such as `use_cache=False`, `max_new_tokens=8` (32 where nothing says it) or a
            trainer's `generation_config=trainer.generation_config`. What samples is overridden.

    Raises:
        ValueError: no prompts, an empty one, or prompts that do not fit the model's context with the new tokens.
    """
    config = generate_kwargs.get("generation_config") or decoding.base_model(model).generation_config
    new_tokens = generate_kwargs.get("max_new_tokens") or config.max_new_tokens or decoding.NEW_TOKENS
    ids, mask = decoding.encode(model, tokenizer, prompts, new_tokens)
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        return compare(model, tokenizer, ids, mask, **(generate_kwargs | {"max_new_tokens": new_tokens}))
    finally:
        for module, training in modes:
            module.training = training


def compare(
    model: nn.Module,
    tokenizer: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    generate: Callable[..., Any] | None = None,
    rounding: float | None = None,
    **generate_kwargs: Any,
) -> RolloutReport:
    """Compare greedy generation by the model as it stands with the same inside `safe_generation`.

    Args:
        model: as it stands at the moment that is in question.
        tokenizer: for the report's texts, and for the end token where the generation configs have none.
        input_ids: `(batch, length)`, padded on the left.
        attention_mask: `(batch, length)`, 0 for padding.
        generate: called instead of `model.generate`.
        rounding: see RolloutReport; by default by the size of the weights' numbers.
        generate_kwargs: for `generate`; what samples is overridden.
    """
    generate = generate or model.generate
    if rounding is None:
        rounding = ROUNDING[min(each.element_size() for each in model.parameters() if each.is_floating_point())]
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    kinds = sorted({kind for kind, _ in gradients.checkpointed(model)})
    no_dropout = decoding.NoDropout()
    cuda = [input_ids.device] if input_ids.is_cuda else []
    rollouts, errors, logps = [], [], ([], [])
    with torch.no_grad(), torch.random.fork_rng(devices=cuda), decoding.greedy(model, generate_kwargs) as kwargs:
        with no_dropout, decoding.use_cache_told(model) as told:
            training = decoding.completions(generate(**batch, **kwargs), input_ids.shape[1], kwargs, tokenizer)
        with safe_generation(model):
            evaluation = decoding.completions(generate(**batch, **kwargs), input_ids.shape[1], kwargs, tokenizer)
            for ids, mask, (made, chosen_with), (right, _) in zip(input_ids, attention_mask, training, evaluation):
                prompt = ids[mask.bool()]
                own = _log_probs(model, prompt, made)
                errors.append((own - chosen_with).abs())
                logps[0].append(own)
                logps[1].append(own if made == right else _log_probs(model, prompt, right))
                texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (made, right)]
                rollouts.append(Rollout(tokenizer.decode(prompt), *texts, made == right, errors[-1].max().item()))
    return RolloutReport(
        rollouts=tuple(rollouts),
        error=torch.cat(errors).max().item(),
        mean_error=torch.cat(errors).mean().item(),
        rounding=rounding,
        training_logp=torch.cat(logps[0]).mean().item(),
        evaluation_logp=torch.cat(logps[1]).mean().item(),
        checkpointing=kinds[0] if kinds else "off",
        use_cache=told[-1] if told else None,
        dropout=no_dropout.stopped,
    )


def _log_probs(model: nn.Module, prompt: torch.Tensor, completion: list[int]) -> torch.Tensor:
    """Return `(tokens,)`: the log-probability of each token of the completion, from one forward pass over all."""
    tokens = torch.tensor(completion, dtype=prompt.dtype, device=prompt.device)
    ids = torch.cat([prompt, tokens])[None]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits[-len(tokens) - 1 : -1].float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
