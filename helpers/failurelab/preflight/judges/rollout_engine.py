"""F16: a rollout function whose engine does not get the weights that are trained.

The trained weights are replaced by others, under which hardly any token is likely; the script's callbacks are told of
the step; its own `rollout_func` is asked, and its tokens are scored under both. An engine that got the new weights
draws tokens that these make likely, one that did not draws tokens which the old ones make likely. Then the weights are
put back.

Upstream: TRL #4159, #2698, #5224.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from failurelab._text import first_line
from failurelab.handles import keep_modes
from failurelab.preflight.answers import Answer, Finding, Held, NotApplicable, NotChecked
from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges.rows import prompted

ROWS = 8
_SPREAD = 4.0  # of the logits under the other weights: of 150,000 tokens, some hundred are likely then
_LEAST = 2.0  # nats a token by which an engine with the old weights must stand out, or nothing is said


def judge_rollout_engine(seen: Seen) -> Iterator[Answer]:
    """Ask the script's rollout function after the weights were changed: are its tokens drawn with these weights?"""
    trainer = seen.trainer
    function = getattr(trainer, "rollout_func", None)
    if not callable(function):
        if hasattr(trainer, "reward_funcs") and not seen.asked.get("use_vllm"):
            yield NotApplicable("F16", "the trainer generates with the model that it trains")
        return
    prompts = [row["prompt"] for row in prompted(seen, ROWS)]
    temperature = float(seen.asked.get("temperature") or 1.0)
    if not prompts:
        return
    try:
        answer = _ask(function, prompts, trainer, temperature)
        if isinstance(answer, Finding) and trainer.state.global_step:
            step = trainer.state.global_step
            with mock.patch.object(trainer.state, "global_step", 0):
                first = _ask(function, prompts, trainer, temperature)
            if isinstance(first, Held):
                why = f"rollout_func sends the weights at step 0 and not at {step}: how old they get, a run tells"
                answer = NotChecked("F16", why)
    except Exception as error:  # the engine may be a service that is not there
        answer = NotChecked("F16", f"rollout_func could not be asked: {type(error).__name__}: {first_line(error)}")
    yield answer


def _ask(function: Callable[..., Any], prompts: list[Any], trainer: Any, temperature: float) -> Answer:
    """Change the weights, ask for completions, and score them under the new weights and under the old ones."""
    with torch.random.fork_rng(), _other_weights(trainer.model):
        _end_step(trainer)
        given = _call(function, prompts, trainer)
        rows = [(row, done) for row, done in zip(given["prompt_ids"], given["completion_ids"]) if len(done)]
        after = [_logps(trainer.model, row, done, temperature) for row, done in rows]
    before = [_logps(trainer.model, row, done, temperature) for row, done in rows]
    return _judge(after, before, [done for _, done in rows])


def _judge(after: list[torch.Tensor], before: list[torch.Tensor], drawn: list[list[int]]) -> Answer:
    """Compare the tokens with what either weights would draw; each tensor is `[tokens, vocabulary]`."""
    if not drawn:
        return NotChecked("F16", "rollout_func answered without a completion")
    new, old = torch.cat(after), torch.cat(before)  # [all tokens, vocabulary]
    ids = torch.tensor([int(token) for done in drawn for token in done], device="cpu")
    ratio = new - old  # in nats: how much likelier a token is with the new weights
    own = float((new.exp() * ratio).sum(-1).mean())  # of tokens that are drawn with the new weights, in the mean
    stale = float((old.exp() * ratio).sum(-1).mean())  # and of those drawn with the old ones: below 0
    seen = float(ratio.gather(1, ids[:, None]).mean())
    if own - stale < _LEAST:
        return NotChecked("F16", f"other weights change too little of what is drawn ({own:.1f}, {stale:.1f} nats)")
    evidence = (
        f"after the weights were changed, rollout_func's {len(ids)} tokens are {seen:+.1f} nats likelier under the new "
        f"weights than under the old ones; drawn with the new ones they are {own:+.1f}, with the old ones {stale:+.1f}"
    )
    if seen > (own + stale) / 2:
        return Held("F16", evidence, f"with the old weights it would be {stale:+.1f} nats")
    return Finding(
        "F16",
        f"{evidence}: the engine draws with other weights than those that are trained",
        "Send the trained weights to the engine before every generation, under the names that it knows "
        "(load_state_dict with strict=True says if they are others), adapters merged into them.",
    )


def _end_step(trainer: Any) -> None:
    """Tell the script's own callbacks that a step has ended and the next begins: many send the weights there."""
    handler: Any = getattr(trainer, "callback_handler", None)
    for callback in list(getattr(handler, "callbacks", ())):
        if type(callback).__module__.partition(".")[0] in ("transformers", "trl", "failurelab"):
            continue
        for event in ("on_step_end", "on_step_begin"):
            getattr(callback, event)(
                trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=handler.optimizer,
                lr_scheduler=handler.lr_scheduler, processing_class=getattr(trainer, "processing_class", None),
            )  # fmt: skip


def _call(function: Callable[..., Any], prompts: list[Any], trainer: Any) -> Any:
    """Call a rollout function as this release of trl does: with the trainer, or with its arguments and tokenizer."""
    old = len(inspect.signature(function).parameters) > 2
    return function(prompts, trainer.args, trainer.processing_class) if old else function(prompts, trainer)


@contextlib.contextmanager
def _other_weights(model: Any) -> Iterator[None]:
    """Inside, the trained weights are others."""
    kept = {weight: weight.detach().clone() for weight in model.parameters() if weight.requires_grad}
    head = getattr(model.get_output_embeddings(), "weight", None)
    draws = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight not in kept:
                    continue
                noise = torch.randn(weight.shape, generator=draws, device="cpu").to(weight.device)
                if weight.ndim < 2:
                    continue
                if weight is head or "lora_" in name:
                    weight.copy_(noise * _SPREAD / weight.shape[-1] ** 0.5)
                else:
                    weight.add_(noise * weight.float().std())
        yield
    finally:
        with torch.no_grad():
            for weight, before in kept.items():
                weight.copy_(before)


def _logps(model: Any, prompt: list[int], done: list[int], temperature: float) -> torch.Tensor:
    """Return the log-probabilities of every token at each place of a completion, `[tokens, vocabulary]`."""
    ids = torch.tensor([[*map(int, prompt), *map(int, done)]], device=next(model.parameters()).device)
    with torch.no_grad(), keep_modes(model):
        model.eval()
        rows = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()
    return (rows / temperature).log_softmax(-1)
