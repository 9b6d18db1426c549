"""The known-answer probe: do the log-probabilities a trainer uses belong to the tokens it thinks they do?

What goes wrong: trl 0.14.0 asks the model for the last rows of logits by the name `num_logits_to_keep`. A transformers
that no longer knows the name (4.52 and later) swallows it and returns all rows. `zip` and `gather` never compare
lengths, so each completion token is scored at a prompt position. Policy and reference are wrong in the same way: KL and
loss start at 0, nothing is raised, and training lowers the reward. (TRL #2770, transformers #35757.)

A known answer finds it in a second: a full forward pass of the same model, in the plainest way there is.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from failurelab._unwrap import input_device, unwrap, vocabulary_size
from failurelab.failures.predicates import Value
from failurelab.handles import eval_mode

# How far a right answer may be from the truth in any case, in nats; the model's own rounding may allow more.
_FLOOR = {torch.float64: 1e-9, torch.float32: 1e-4}
_DRAWS, _MARGIN = 3, 4.0  # of the rounding that is measured: how often, and how many times it is accepted
_ROWS, _PROMPT, _COMPLETION = 4, 9, 8


class MisalignedLogProbs(ValueError):
    """Log-probabilities that are not those of the completion's tokens.

    Attributes:
        found: what the scores equal instead, in words; "" if it is none of the known mistakes.
        error: the largest difference from the truth, in nats; infinity if scores are not finite or of another shape.
    """

    def __init__(self, message: str, found: str, error: float):
        super().__init__(message)
        self.found, self.error = found, error


@dataclasses.dataclass(frozen=True)
class Alignment:
    """What `check_alignment` measured.

    Attributes:
        error: the largest difference from the truth, in nats, over all cases.
        tolerance: the largest difference that would have been accepted.
        contrast: how far the nearest known mistake is from the truth, in nats; always more than `tolerance`.
    """

    error: float
    tolerance: float
    contrast: float

    @property
    def figures(self) -> dict[str, Value]:
        """What the registry's F3b is about, where the model gives no logits."""
        return {"rows_made": 0, "log_prob_error": self.error, "log_prob_rounding": self.tolerance}


@contextlib.contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """For a block, no gradients and no dropout; each module's mode is put back after."""
    with eval_mode(model), torch.no_grad():
        yield


def check_alignment(
    log_prob_function: Callable[[nn.Module, torch.Tensor, torch.Tensor, int], torch.Tensor],
    model: nn.Module,
    *,
    temperature: float = 1.0,
    padded: bool = True,
) -> Alignment:
    """Compare a log-probability function with the truth on a few made-up tokens.

    Run it before training, on the model that is to be trained; it takes ten small forward passes of that model. What
    counts as rounding is measured: by how much the truth moves when each layer's output is moved by as much as its own
    dtype rounds. Under autocast the layers round to 16 bits, and the logits that come out may be of float32.

    Args:
        log_prob_function: takes `(model, input_ids, attention_mask, completion_length)` and returns the log-probability
            of each of the last `completion_length` tokens, shape `(batch, completion_length)`.
        model: a causal language model, wrapped or not. It is in eval mode meanwhile.
        temperature: at which the function scores, although it is not given.
        padded: also try prompts padded on the left, with completions padded on the right (padding is not compared).

    Returns:
        What was measured.

    Raises:
        MisalignedLogProbs: the scores are wrong; the message says what they equal instead, if it is a known mistake.
        ValueError: right and wrong scores are the same, because the model predicts all tokens alike everywhere.
    """
    errors, bounds, contrasts = [], [], []
    with probing(model):
        for name in ("no padding", "padding on both sides")[: 2 if padded else 1]:
            case = _Case(model, name, temperature)
            mistakes = dict(_mistakes(case))
            contrast = min(map(case.distance, mistakes.values()))
            if contrast <= case.bound:
                raise ValueError(
                    f"the probe cannot decide: right and wrong scores are {contrast:.1e} nats apart, rounding alone "
                    f"may be {case.bound:.1e}. The model predicts nearly the same everywhere. Next: probe a trained "
                    "model, or one in float32."
                )
            scores = log_prob_function(model, case.ids, case.mask, _COMPLETION)
            _check_shape(scores)
            scores = scores.double()
            errors.append(case.distance(scores))
            if errors[-1] > case.bound:
                mistakes |= {
                    "the negative log-probabilities (a loss)": -case.truth,
                    "probabilities (no logarithm)": case.truth.exp(),
                    "log-probabilities at temperature 1, and not at the one asked for": _pick(
                        (case.logits * temperature).log_softmax(-1), case.completion
                    ),
                }
                if not case.mask.all():
                    unmasked = (model(input_ids=case.ids).logits.double() / temperature).log_softmax(-1)
                    mistake = "scores with padding attended to (attention_mask is ignored)"
                    mistakes[mistake] = _pick(unmasked, case.completion)
                raise _explain(case, scores, mistakes)
            bounds.append(case.bound)
            contrasts.append(contrast)
    return Alignment(max(errors), max(bounds), min(contrasts))


class _Case:
    """One input of the probe, and what is true of it.

    `ids` and `mask` are (rows, tokens), `logits` and `log_probs` (rows, tokens, vocabulary) in float64 at the
    temperature, `truth` are the right scores and `counts` which of them are compared, both (rows, completion).
    """

    def __init__(self, model: nn.Module, name: str, temperature: float):
        self.name = name
        self.ids, self.mask = _tokens(model, padded=name != "no padding")
        logits = model(input_ids=self.ids, attention_mask=self.mask).logits
        self.logits = logits.double() / temperature
        self.log_probs = self.logits.log_softmax(-1)
        self.completion, self.counts = self.ids[:, -_COMPLETION:], self.mask[:, -_COMPLETION:].bool()
        self.truth = _pick(self.log_probs, self.completion)
        score = torch.finfo(logits.dtype).eps * self.truth.abs().max().item()  # a score in the dtype of the logits
        self.bound = max(_FLOOR.get(logits.dtype, score), _MARGIN * self._measure_rounding(model, temperature))

    def _measure_rounding(self, model: nn.Module, temperature: float) -> float:
        """Return how far the truth moves, in nats, when each layer's output is moved by its dtype's rounding."""
        moved = []
        for seed in range(_DRAWS):
            with _rounded_again(model, seed) as layers:
                logits = model(input_ids=self.ids, attention_mask=self.mask).logits
            if not layers:  # a compiled model calls no hooks: as much as 16 bits round
                return 2.0**-7 * float(self.logits.abs().max())
            moved.append(_pick((logits.double() / temperature).log_softmax(-1), self.completion))
        return max(self.distance(scores) for scores in moved)

    def distance(self, scores: torch.Tensor, other: torch.Tensor | None = None) -> float:
        """Return the largest difference where it counts, by default from the truth, in nats; infinity for NaN."""
        other = self.truth if other is None else other
        return (scores - other).abs()[self.counts].nan_to_num(nan=torch.inf).max().item()


def _tokens(model: nn.Module, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, each (rows, prompt + completion); no special tokens, because a function may mask those."""
    config = unwrap(model).config
    special: set[int | None] = set()
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        ids = getattr(config, name, None)
        special.update(ids if isinstance(ids, list | tuple) else [ids])
    count = vocabulary_size(model)
    allowed = torch.tensor([i for i in range(min(count, 10_000)) if i not in special] or list(range(count)))
    length = _PROMPT + _COMPLETION
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(allowed), (_ROWS, length), generator=generator)
    ids = allowed[picks]
    # Neighbours must differ, or a shift by one would not show.
    for column in range(1, length):
        same = ids[:, column] == ids[:, column - 1]
        ids[same, column] = allowed[(picks[same, column] + 1) % len(allowed)]
        picks[same, column] += 1
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : _PROMPT // 2] = 0
        mask[1, -2:] = 0
    return ids.to(input_device(model)), mask.to(input_device(model))


@contextlib.contextmanager
def _rounded_again(model: nn.Module, seed: int) -> Iterator[list[nn.Module]]:
    """Inside, each number that a layer returns is moved by chance, by as much as its dtype rounds; yield the layers."""
    draw, layers = torch.Generator("cpu").manual_seed(seed), []

    def move(module: nn.Module, args: tuple[object, ...], output: object) -> torch.Tensor | None:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        layers.append(module)
        rounding = torch.finfo(output.dtype).eps
        if output.is_cuda and output.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            rounding = 2.0**-10
        wide = torch.promote_types(output.dtype, torch.float32)
        by = 2 * torch.rand(output.shape, generator=draw, dtype=wide, device="cpu") - 1
        return (output.to(wide) * (1 + rounding * by.to(output.device))).to(output.dtype)

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if not any(True for _ in module.children()):
                stack.enter_context(module.register_forward_hook(move))
        yield layers


def _pick(scores: torch.Tensor, tokens: torch.Tensor, first: int = _PROMPT - 1) -> torch.Tensor:
    """Pick `tokens` (rows, picked) at the positions of `scores` (rows, tokens, vocabulary) from `first` on.

    By default those that predict the completion: position t predicts token t + 1.
    """
    return scores[:, first : first + tokens.shape[1]].gather(-1, tokens[..., None])[..., 0]


def _mistakes(case: _Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the known mistakes: their description, and the scores (rows, completion) that they lead to."""
    tokens = "the completion's tokens scored"
    places = {0: f"{tokens} at the first prompt positions (all rows of logits came, not the last)"}
    places |= {first: f"{tokens} too early by {_PROMPT - 1 - first}" for first in range(1, _PROMPT - 1)}
    places[_PROMPT] = f"{tokens} one position too late, each by the row that has read it"
    for first, mistake in places.items():
        yield mistake, _pick(case.log_probs, case.completion, first)
    yield "the first prompt tokens, not the completion's", _pick(case.log_probs, case.ids[:, 1 : 1 + _COMPLETION], 0)
    yield "logits that were never normalised (no log_softmax)", _pick(case.logits, case.completion)


def _check_shape(scores: object) -> None:
    if isinstance(scores, torch.Tensor) and scores.shape == (_ROWS, _COMPLETION):
        return
    result = f"shape {tuple(scores.shape)}" if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
    raise MisalignedLogProbs(
        f"the function returned {result} for a batch of {_ROWS} and {_COMPLETION} completion tokens: "
        f"({_ROWS}, {_COMPLETION}) is wanted, one number a token. Next: cut the logits to the rows that predict "
        "the completion, then gather.",
        "another shape",
        torch.inf,
    )


def _explain(case: _Case, scores: torch.Tensor, mistakes: Mapping[str, torch.Tensor]) -> MisalignedLogProbs:
    """Return the error to raise, which says what the scores (rows, completion) equal."""
    finite, error = scores[case.counts].isfinite(), case.distance(scores)
    if not finite.all():
        diagnosis = f"{int((~finite).sum())} of {int(case.counts.sum())} scores are NaN or infinite"
        return MisalignedLogProbs(
            f"log-probabilities are not finite ({case.name}): {diagnosis}. A loss made of them trains on nothing. "
            "Next: look for -inf logits, a row that is masked whole, or overflow in half precision.",
            diagnosis,
            error,
        )
    equal = (mistake for mistake, other in mistakes.items() if case.distance(scores, other) <= case.bound)
    diagnosis = next(equal, "")
    equals = f"they equal {diagnosis}" if diagnosis else "they match none of the mistakes this probe knows"
    rows = " (see how many rows of logits the model returned)" if "scored" in diagnosis else ""
    return MisalignedLogProbs(
        f"log-probabilities are not those of the completion's tokens ({case.name}): {equals}. Largest error "
        f"{error:.3g} nats, tolerance {case.bound:.1g}. Training on them moves other probabilities than the sampled "
        f"ones. Next: mend the function{rows}, or use failurelab.logits.completion_logps.",
        diagnosis,
        error,
    )
