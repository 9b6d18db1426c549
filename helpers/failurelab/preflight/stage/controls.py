"""Positive controls: each failure that was looked for is planted once, on the model and the batch that was looked at.

A small random model can be blind. If its tokens hardly depend on the context, generation without a context looks right;
if all of a batch's tokens are the same, no shift by one shows. So before a judge says that a failure is not there, the
same measurement is made with the failure planted. What is not seen then is NOT CHECKED. Everything that is planted is
taken back: hooks, gradients, modes, the random state.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from failurelab import _greedy, gradients, rollouts
from failurelab.measure.scores import read_scored_rows

_PLACES = 8  # modules, spread over the model, of which one is cut off until a tensor without a gradient is seen


def count_cut_off(model: nn.Module) -> int:
    """Cut one module off from the loss, as checkpointing does, and count the trainable tensors without a gradient."""
    owners = [
        module
        for module in model.modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]
    ids = torch.arange(1, 9, device=next(model.parameters()).device)[None]
    spread = owners[:: max(1, len(owners) // _PLACES)]
    with _gradients_kept(model), torch.random.fork_rng():
        for module in spread:
            hook = module.register_forward_hook(_detach)
            try:
                with gradients.watch(model) as watched, torch.enable_grad():
                    rows = _logits(model, ids)  # (1, 8, vocabulary)
                    if rows.requires_grad:
                        rows.float().logsumexp(-1).sum().backward()
                missing = len(watched.report().without_gradient)
            finally:
                hook.remove()
            if missing:
                return missing
    return 0


def _complete(model: nn.Module, tokenizer: Any, prompts: Sequence[Any], new_tokens: int) -> Iterator[tuple[int, Any]]:
    """Yield each prompt's length, and it with its greedy completion, (1, tokens): alone, so without padding.

    In the loop over it no gradients are kept, and random numbers are those of a fork.
    """
    ids, mask = _greedy.encode(model, tokenizer, prompts, new_tokens)  # (prompts, longest), both
    foreign: Any = model
    with torch.no_grad(), torch.random.fork_rng(), rollouts.safe_generation(model):
        for row, kept in zip(ids, mask):
            prompt = row[kept.bool()][None]  # (1, prompt)
            whole = foreign.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
            yield prompt.shape[1], getattr(whole, "sequences", whole)


def error_without_context(model: nn.Module, tokenizer: Any, prompts: Sequence[Any], new_tokens: int) -> float:
    """Predict each token of greedy completions from the last token alone, and return the largest error in nats."""
    worst = 0.0
    for length, whole in _complete(model, tokenizer, prompts, new_tokens):  # (1, prompt + new)
        drawn = whole[0, length:]  # (new,)
        right = _logits(model, whole)[0, length - 1 : -1]  # (new, vocabulary)
        before = whole[0, length - 1 : -1, None]  # (new, 1): the token before each
        alone = _logits(model, before)[:, 0]  # (new, vocabulary)
        gap = right.float().log_softmax(-1) - alone.float().log_softmax(-1)
        worst = max(worst, gap.gather(1, drawn[:, None]).abs().max().item())
    return worst


def error_without_causality(model: nn.Module, tokenizer: Any, prompts: Sequence[Any], new_tokens: int) -> float:
    """Predict the last token of greedy completions with no causal mask, and return the largest error in nats.

    So transformers up to 4.48 draws where prompts are padded: earlier tokens read later ones.
    """
    worst = 0.0
    foreign: Any = model
    for _, whole in _complete(model, tokenizer, prompts, new_tokens):
        before = whole[:, :-1]  # (1, prompt + new - 1)
        size = before.shape[1]
        open_mask = torch.zeros(1, 1, size, size, dtype=next(model.parameters()).dtype, device=before.device)
        open_rows = foreign(input_ids=before, attention_mask=open_mask, use_cache=False).logits[0, -1]
        right = _logits(model, before)[0, -1]  # (vocabulary,)
        worst = max(worst, (right.float().log_softmax(-1) - open_rows.float().log_softmax(-1)).abs().max().item())
    return worst


def sees_shifted_scores(model: nn.Module, ids: torch.Tensor) -> bool:
    """Score each row of logits against the token after the next one; return whether the reading says that it is off.

    `ids` are (batch, tokens), of a training pass; one sequence is asked after the other, until one tells.
    """
    for sequence in ids.split(1):  # (1, tokens)
        with torch.random.fork_rng(), torch.enable_grad():
            rows = _logits(model, sequence).detach().requires_grad_()  # (1, tokens, words)
            scores = rows[:, :-2].float().log_softmax(-1).gather(2, sequence[:, 2:, None])
            (gradient,) = torch.autograd.grad(scores.sum(), rows)
        report = read_scored_rows(gradient, sequence)
        if report is not None and report.scored > 0 and report.shift != 0:
            return True
    return False


def count_all_rows(model: nn.Module, ids: torch.Tensor) -> int:
    """Return how many rows of logits the model makes for `ids`, (batch, tokens), when it is not asked for fewer."""
    with torch.no_grad(), torch.random.fork_rng():
        return _logits(model, ids[:1]).shape[1]


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits for `ids` without padding, asked for as a trainer does: hooks of the script's read the mask."""
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def _detach(module: nn.Module, args: tuple, output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, tuple):
        return tuple(part.detach() if isinstance(part, torch.Tensor) else part for part in output)
    return output


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """After the block, every parameter has the gradient that it had before, or none."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
