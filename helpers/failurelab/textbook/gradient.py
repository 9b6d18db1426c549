"""The gradient that GRPO's definition gives for the completions of one optimizer step.

    loss = - sum over tokens of weight * [ min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) - beta * KL ]

r is the ratio of the policy's probability of the token to that of the policy that drew it, A the advantage of its
completion, KL the estimate k3 (DeepSeekMath, arXiv 2402.03300, equations 3 and 4). The weight is what `loss_type` says:
1 / (tokens of the completion x completions) for `grpo`, 1 / tokens of the micro-batch for `bnpo`, 1 / tokens of the
step for `dapo` (arXiv 2503.14476), 1 / (completions x max_completion_length) for `dr_grpo` (2503.20783). Others:
`cispo` (2506.13585), `sapo` (2511.20347), `luspo` (2602.05261), GSPO's ratio of a sequence (2507.18071), two-sided
clipping (2505.07291), tokens of high entropy (2506.01939), unbiased KL and off-policy masking (2512.02556).

Nothing of trl computes here.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from failurelab._unwrap import input_device, unwrap
from failurelab.logits import keep_argument
from failurelab.textbook.advantages import advantages
from failurelab.textbook.fields import Options
from failurelab.textbook.rows import Row
from failurelab.textbook.scores import Scores, Scoring, lay_out, plain, score

Gradient = dict[str, torch.Tensor]
Reference = Callable[[], "contextlib.AbstractContextManager[nn.Module]"]
TIE = 1e-5  # nats that rounding in float32 moves a log-probability or an entropy by, at most
# Of logits that are held at once, in float32, before their softmax. More at once saves a GPU time, and a CPU none: with
# 32 MiB a preflight with three repairs took 28 s of a core and 1.4 GiB, with 256 MiB 38 s and 2.5 GiB.
LOGITS_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}


class OutOfMemory(RuntimeError):
    """One row alone does not fit into memory."""


@dataclasses.dataclass(frozen=True)
class Shift:
    """How far each bound is moved, outwards where positive: which side a token near it lies on is rounding's choice.

    Attributes:
        ratio: of the ratios' bounds, in nats.
        entropy: of the entropy from which on tokens are trained on, in nats.
    """

    ratio: float = 0.0
    entropy: float = 0.0

    def move(self, options: Options) -> Options:
        """Return the options with the ratios' bounds moved."""
        if not self.ratio:
            return options
        moved: dict[str, Any] = {}
        if options.epsilon is not None and options.loss_type != "cispo":  # whose bound makes no jump
            high = options.epsilon if options.epsilon_high is None else options.epsilon_high
            moved["epsilon"] = max(0.0, 1 - (1 - options.epsilon) * math.exp(-self.ratio))
            moved["epsilon_high"] = max(0.0, (1 + high) * math.exp(self.ratio) - 1)
        if options.delta is not None:
            moved["delta"] = options.delta * math.exp(self.ratio)
        if options.off_policy_mask_threshold is not None:
            moved["off_policy_mask_threshold"] = options.off_policy_mask_threshold + self.ratio
        return dataclasses.replace(options, **moved)


@dataclasses.dataclass(frozen=True)
class Change:
    """What a suspect does otherwise than the definition.

    Attributes:
        scoring: how tokens are scored; None: by the definition, at the options' temperature.
        advantages: takes rows, options, and the advantages (rows,) of the definition; returns those that are used.
        weights: takes the rows of the step and their weights (rows,); returns those that are used.
        lengths: takes a row; returns how many tokens it counts where the loss is divided.
        ratio: `right`, `one` (old log-probabilities are not used), `inverted`, or `summed` (that of a sequence is not
            divided by its length).
        kl: `k3`, `k1`, `k2`, or `reversed` (policy and reference swapped).
        probabilities: tokens count by their probability in place of its logarithm.
        no_minimum: the clipped ratio is always taken, and not the smaller of both products.
        shift: of the bounds.
    """

    scoring: Scoring | None = None
    advantages: Callable[[Sequence[Row], Options, torch.Tensor], torch.Tensor] | None = None
    weights: Callable[[Sequence[Row], torch.Tensor], torch.Tensor] | None = None
    lengths: Callable[[Row], int] = Row.length
    ratio: str = "right"
    kl: str = "k3"
    probabilities: bool = False
    no_minimum: bool = False
    shift: Shift = Shift()


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which numbers, and with which dropout, the textbook computes.

    Attributes:
        float32: weights are copied to float32 where they are narrower (not those that are quantized).
        autocast: dtype of autocast, or None.
        dropout: modules keep their mode; the number seeds the draws. None: no dropout.
        padded: rows are padded as in generation, which changes nothing but the rounding.
    """

    float32: bool = True
    autocast: torch.dtype | None = None
    dropout: int | None = None
    padded: bool = False


DEFINITION, EXACT = Change(), Precision()


@dataclasses.dataclass
class Slopes:
    """Scores of some rows, and the derivatives of the loss by them: by log-probabilities, and by entropies if used."""

    part: range
    scores: tuple[torch.Tensor, ...]
    slopes: tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Tally:
    """What a pass saw, for what it can say of the options.

    Attributes:
        tokens: that were trained on.
        clipped: of these, where the clipped product was the smaller one.
        kl: largest KL estimate of a token.
        apart: largest distance of a token's log-probability from the reference's, in nats.
        drift: largest distance of a ratio from 1.
        slopes: of the loss, of each part of the rows.
        log_ratios: of the tokens that are trained on, or of their completions; row after row.
        entropies: of the tokens among which those of the highest are chosen, of each micro-batch; row after row.
    """

    tokens: int = 0
    clipped: int = 0
    kl: float = 0.0
    apart: float = 0.0
    drift: float = 0.0
    slopes: list[Slopes] = dataclasses.field(default_factory=list)
    log_ratios: list[torch.Tensor] = dataclasses.field(default_factory=list)
    entropies: dict[int | None, torch.Tensor] = dataclasses.field(default_factory=dict)

    def rounding(self, other: "Tally") -> Shift:
        """Return how far two passes over the same rows lie apart in what bounds are compared with."""
        ratios = [(one - two).abs() for one, two in zip(self.log_ratios, other.log_ratios) if len(one)]
        entropies = [(own - other.entropies[micro]).abs() for micro, own in self.entropies.items() if len(own)]
        return Shift(*(float(torch.cat(each).max()) if each else 0.0 for each in (ratios, entropies)))

    def add(self, other: "Tally") -> None:
        """Add what was seen of other rows."""
        self.tokens, self.clipped = self.tokens + other.tokens, self.clipped + other.clipped
        self.kl, self.apart = max(self.kl, other.kl), max(self.apart, other.apart)
        self.drift = max(self.drift, other.drift)
        self.slopes += other.slopes
        self.log_ratios += other.log_ratios


def expected_gradient(
    model: nn.Module,
    rows: Sequence[Row],
    options: Options,
    *,
    reference: Reference | None = None,
    change: Change = DEFINITION,
    precision: Precision = EXACT,
    tally: Tally | None = None,
) -> Gradient:
    """Return the gradient of GRPO's loss for every trainable parameter of the model, by name, in float32.

    The model is afterwards what it was: its `.grad`, its modes and its random state. A forward pass takes as many
    rows as fit LOGITS_BYTES of logits, and half as many where memory ends.

    Args:
        model: the policy at the weights before the step, wrapped or not.
        rows: of each generation that the step takes rows from, all rows; `micro` says which this step trains on.
        options: of the definition.
        reference: gives the reference model for a block; needed where beta is not 0.
        change: what a suspect does otherwise.
        precision: of the computation.
        tally: is added to.

    Raises:
        OutOfMemory: one row alone does not fit.
        ValueError: an option lacks what it needs, or no row is trained on.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model requires a gradient")
    if options.beta and reference is None:
        raise ValueError(f"beta={options.beta:g} asks for a reference model, and there is none")
    step = Step(rows, options, change)
    if precision.padded and not step.scoring.from_prompt:
        step.scoring = dataclasses.replace(step.scoring, padded=True)
    gradient = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in trained}
    with plain(model, training=precision.dropout is not None), torch.enable_grad(), draws(model, precision.dropout):
        forward, leaves = forward_of(model, dict(trained), precision)
        if options.top_entropy_quantile < 1:
            step.choose_tokens(lambda some: step.score_rows(forward, some, entropy=True), tally)
        size = step.rows_that_fit(model)
        start = 0
        while start < len(step.rows):
            part = range(start, min(start + size, len(step.rows)))
            try:
                seen = Tally()
                loss, scores = step.loss(forward, part, reference, precision, seen)
                grads = torch.autograd.grad(loss, [*leaves.values(), *scores], allow_unused=True)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    raise OutOfMemory(f"{len(step.rows[start].completion)} tokens of one completion") from error
                size, grads = max(1, size // 2), None
            if grads is None:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            for name, grad in zip(leaves, grads):
                if grad is not None:
                    gradient[name] += grad.to(gradient[name].dtype)
            if tally is not None:
                slopes = [
                    torch.zeros_like(each) if grad is None else grad for each, grad in zip(scores, grads[len(leaves) :])
                ]
                seen.slopes.append(Slopes(part, tuple(each.detach() for each in scores), tuple(slopes)))
                tally.add(seen)
            start = part.stop
    return gradient


class Step:
    """The rows that the step trains on, with advantages and weights."""

    def __init__(self, rows: Sequence[Row], options: Options, change: Change = DEFINITION):
        options = change.shift.move(options)
        self.options, self.change = options, change
        worth = advantages(rows, options)
        if change.advantages is not None:
            worth = change.advantages(rows, options, worth)
        chosen = [number for number, row in enumerate(rows) if row.micro is not None]
        if not chosen:
            raise ValueError("no completion is trained on in this step")
        self.rows = [rows[number] for number in chosen]
        self.advantages = worth[torch.tensor(chosen)]  # (rows,)
        self.weights = row_weights(self.rows, options, change.lengths)  # (rows,)
        if options.generation_tokens:
            self.weights = self.weights * _share_of_tokens(rows, options)
        if change.weights is not None:
            self.weights = change.weights(self.rows, self.weights)
        self.scoring = change.scoring or Scoring(options.temperature)
        self.chosen: dict[int, torch.Tensor] = {}  # of each row, whether each token (tokens,) is of high entropy
        self.kept = dict.fromkeys((row.micro for row in self.rows), 0)  # tokens that the entropy term is the mean of
        for row in self.rows:
            self.kept[row.micro] += 0 if left_out(row, options) else row.length()

    def score_rows(self, forward: Callable[..., torch.Tensor], part: range, *, entropy: bool = False) -> Scores:
        """Score some of the rows."""
        return score(forward, [self.rows[number] for number in part], self.scoring, entropy=entropy)

    def rows_that_fit(self, model: nn.Module) -> int:
        """Return how many rows have at most LOGITS_BYTES of logits."""
        words = int(unwrap(model).get_output_embeddings().weight.shape[0])
        longest = max(max(len(row.prompt) + len(row.completion), sum(row.padded)) for row in self.rows)
        room = LOGITS_BYTES.get(input_device(model).type, LOGITS_BYTES["cuda"])
        return max(1, min(len(self.rows), room // (4 * words * longest)))

    def choose_tokens(self, score_part: Callable[[range], Scores], tally: Tally | None = None) -> None:
        """Choose of each micro-batch the tokens of the highest entropy, which are trained on: by their rank.

        They are scored once: beside other rows the same entropy is rounded otherwise, and in a model that knows little
        all lie so close that the order would be another one. For the same reason tokens of a group behind the same text
        have one entropy.
        """
        entropies: dict[int | None, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        known: dict[int, float] = {}
        with torch.no_grad():
            for number, row in enumerate(self.rows):
                if not left_out(row, self.options):
                    scores = score_part(range(number, number + 1))
                    own = zip(self._texts_before(row), scores.entropies[0].tolist())
                    entropy = scores.entropies.new_tensor([known.setdefault(text, value) for text, value in own])
                    entropies.setdefault(row.micro, []).append((number, entropy, scores.mask[0].bool()))
        for micro, rows in entropies.items():
            values = torch.cat([entropy[mask] for _, entropy, mask in rows]).float()
            least = self._least_entropy(values)
            for number, entropy, mask in rows:
                self.chosen[number] = mask & (entropy >= least)
            self.kept[micro] = int((values >= least).sum())
            if tally is not None:
                tally.entropies[micro] = values

    def _texts_before(self, row: Row) -> list[int]:
        """Return a number for what each scored token is drawn after, the same for the same text of a group."""
        layout, numbers = lay_out(row, self.scoring), []
        number = hash((row.batch, row.group))
        for token in layout.ids:
            number = hash((number, token))
            numbers.append(number)
        return [numbers[source] for source in layout.sources]

    def _least_entropy(self, values: torch.Tensor) -> float:
        """Return the entropy from which on tokens are trained on."""
        if not len(values):
            return 0.0
        above = values >= torch.quantile(values, 1 - self.options.top_entropy_quantile)
        least, shift = float(values[above].min()), self.change.shift.entropy
        if shift < 0 and not above.all():  # inwards: without those that another rounding would put below
            return max(least, float(values[~above].max()) - shift)
        return least - shift

    def loss(
        self,
        forward: Callable[..., torch.Tensor],
        part: range,
        reference: Reference | None,
        precision: Precision,
        tally: Tally,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the loss of some rows, those of all rows add up to the step's; and the scores that it depends on."""
        options, change = self.options, self.change
        entropy = bool(options.entropy_coef) or options.top_entropy_quantile < 1
        now = self.score_rows(forward, part, entropy=entropy)
        logps, mask = now.logps, now.mask  # (rows, tokens)
        worth = self.advantages[list(part)].to(logps)[:, None]  # (rows, 1)
        old = self._old_logps(part, logps.detach(), precision)
        log_ratio = logps - old
        if change.ratio == "one":
            log_ratio = logps - logps.detach()
        if change.ratio == "inverted":
            log_ratio = -log_ratio
        if options.importance_sampling_level == "sequence":
            lengths = 1 if change.ratio == "summed" else mask.sum(1).clamp(min=1)
            log_ratio = ((log_ratio * mask).sum(1) / lengths)[:, None]
        ratio = log_ratio.exp()  # (rows, tokens) or (rows, 1)
        policy, clipped = self._policy_term(ratio, worth, logps)
        keep = mask
        if options.off_policy_mask_threshold is not None:
            drift = -((logps.detach() - old) * mask).sum(1) / mask.sum(1).clamp(min=1)
            fresh = (worth[:, 0] >= 0) | (drift <= options.off_policy_mask_threshold)
            policy = policy * fresh[:, None]
        if options.top_entropy_quantile < 1:
            keep = mask * torch.stack([self._chosen(number, mask) for number in part])
            policy = policy * keep
        token_loss = policy.expand_as(logps)
        kl = apart = None
        if options.beta:
            reference_logps = self._reference_logps(reference, part, precision).to(logps)
            kl, apart = self._kl(logps, reference_logps), (reference_logps - logps.detach()).abs()
            weighted = kl * ratio if options.use_bias_correction_kl else kl
            token_loss = token_loss + options.beta * weighted
        weights = self.weights[list(part)].to(logps)[:, None]
        loss = (token_loss * mask * weights).sum()
        if options.entropy_coef:
            counts = torch.tensor([max(self.kept[self.rows[number].micro], 1) for number in part]).to(keep)
            mean = (now.entropies * keep * (weights > 0) / counts[:, None]).sum() / len(self.kept)
            loss = loss - options.entropy_coef * mean
        self._count(tally, mask, weights, clipped, kl, apart, log_ratio.detach())
        return loss, (logps, *([now.entropies] if entropy else []))

    def _chosen(self, number: int, mask: torch.Tensor) -> torch.Tensor:
        """Return 1 for the tokens (tokens,) of a row that are of high entropy; none are of one that is left out."""
        chosen = self.chosen.get(number, mask.new_zeros(0))
        return nn.functional.pad(chosen, (0, mask.shape[1] - len(chosen))).to(mask)

    def _policy_term(
        self, ratio: torch.Tensor, worth: torch.Tensor, logps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each token, and where a bound holds its ratio."""
        options = self.options
        nowhere = torch.zeros_like(ratio, dtype=torch.bool)
        if self.change.probabilities:
            return -worth * logps.exp(), nowhere
        high = next(each for each in (options.epsilon_high, options.epsilon, math.inf) if each is not None)
        if options.loss_type == "cispo":
            return -ratio.clamp(max=high).detach() * worth * logps, ratio.detach() > high
        if options.loss_type == "sapo":
            gate = torch.where(worth > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
            return -torch.sigmoid(gate * (ratio - 1)) * 4 / gate * worth, nowhere
        if options.epsilon is None:
            return -ratio * worth, nowhere
        bounded = ratio.clamp(1 - options.epsilon, 1 + high)
        if options.delta is not None:
            ratio = ratio.clamp(max=options.delta)
        if self.change.no_minimum:
            return -bounded * worth, bounded != ratio
        return -torch.minimum(ratio * worth, bounded * worth), (bounded * worth < ratio * worth).detach()

    def _kl(self, logps: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        difference = reference - logps  # log of reference / policy
        if self.change.kl == "k1":
            return -difference
        if self.change.kl == "k2":
            return difference.square() / 2
        if self.change.kl == "reversed":
            difference = -difference
        return difference.exp() - difference - 1

    def _old_logps(self, part: range, now: torch.Tensor, precision: Precision) -> torch.Tensor:
        """Return log-probabilities (rows, tokens) under the policy that drew the tokens; where unknown, `now`.

        A pass in the trainer's own numbers takes those in the same numbers: what rounding adds to both is no ratio.
        """
        old = now.clone()
        for place, number in enumerate(part):
            row = self.rows[number]
            known = row.old_logps if precision.float32 or row.old_rounded is None else row.old_rounded
            if known is None:
                continue
            layout = lay_out(self.rows[number], self.scoring)
            tokens = [token - layout.start for token in layout.places]
            columns = [column for column, token in enumerate(tokens) if 0 <= token < len(known)]
            old[place, columns] = known[[tokens[column] for column in columns]].to(old)
        return old

    def _reference_logps(self, reference: Reference | None, part: range, precision: Precision) -> torch.Tensor:
        assert reference is not None  # where beta is not 0, expected_gradient has asked for it
        with reference() as model, plain(model), torch.no_grad():
            forward, _ = forward_of(model, {}, dataclasses.replace(precision, dropout=None))
            return self.score_rows(forward, part).logps

    def _count(
        self,
        tally: Tally,
        mask: torch.Tensor,
        weights: torch.Tensor,
        clipped: torch.Tensor,
        kl: torch.Tensor | None,
        apart: torch.Tensor | None,
        log_ratio: torch.Tensor,
    ) -> None:
        trained = (mask * (weights != 0)).bool()
        tally.log_ratios += [row[kept] for row, kept in zip(log_ratio.expand_as(trained), trained)]
        tally.tokens += int(trained.sum())
        tally.clipped += int((clipped.expand_as(trained) & trained).sum())
        tally.drift = max(tally.drift, float((log_ratio.expm1().abs() * trained).max()))
        if kl is not None and apart is not None:
            tally.kl = max(tally.kl, float((kl.detach().abs() * trained).max()))
            tally.apart = max(tally.apart, float((apart * trained).max()))


def left_out(row: Row, options: Options) -> bool:
    """Whether a completion is left out because it was cut."""
    ended = row.ended or (options.padding_ends and row.ends_in_padding)
    return options.mask_truncated_completions and not ended


def row_weights(rows: Sequence[Row], options: Options, length_of: Callable[[Row], int] = Row.length) -> torch.Tensor:
    """Return the weight that each token of a row has in the loss, (rows,)."""
    left = torch.tensor([left_out(row, options) for row in rows])
    counted = torch.ones_like(left) if options.truncated_count else ~left
    lengths = torch.tensor([length_of(row) for row in rows], dtype=torch.float64)
    micros = list(dict.fromkeys(row.micro for row in rows))
    micro = torch.tensor([micros.index(row.micro) for row in rows])
    same = (micro[:, None] == micro).double()  # (rows, rows)
    completions = (same @ counted.double()).clamp(min=1) * len(micros)
    divisor = {
        "grpo": completions * lengths.clamp(min=1),
        "sapo": completions * lengths.clamp(min=1),
        "bnpo": (same @ (lengths * ~left)).clamp(min=1) * len(micros),
        "dr_grpo": completions * (options.max_completion_length or 1),
        "luspo": completions,
        "dapo": (lengths * counted).sum().clamp(min=1).expand_as(lengths),
        "cispo": (lengths * counted).sum().clamp(min=1).expand_as(lengths),
    }[options.loss_type]
    return (1 / divisor).masked_fill(left, 0.0)


def _share_of_tokens(rows: Sequence[Row], options: Options) -> float:
    """Return the tokens of this step by those that its share of the completions would have on average."""
    counts = [0 if left_out(row, options) else row.length() for row in rows]
    trained = [count for row, count in zip(rows, counts) if row.micro is not None]
    return sum(trained) / max(1.0, sum(counts) * len(trained) / len(rows))


def score_old(
    model: nn.Module, rows: Sequence[Row], temperature: float, pad: int, rounded: Precision | None = None
) -> list[Row]:
    """Return the rows with the log-probabilities that this policy gives their tokens, and their padding, now.

    Args:
        model: the policy that drew them.
        rows: of a generation.
        temperature: of the policy.
        pad: token id of the padding.
        rounded: the trainer's own numbers, in which they are scored too; None: these are float32.
    """
    exact = _score_all(model, rows, temperature, pad, EXACT)
    other = _score_all(model, rows, temperature, pad, rounded) if rounded else [None] * len(rows)
    return [dataclasses.replace(row, old_logps=old, old_rounded=own) for row, old, own in zip(rows, exact, other)]


def _score_all(
    model: nn.Module, rows: Sequence[Row], temperature: float, pad: int, precision: Precision
) -> list[torch.Tensor]:
    change = Change(Scoring(temperature, tokens="padding", pad=pad, padded=precision.padded))
    step = Step([dataclasses.replace(row, micro=0) for row in rows], Options(temperature=temperature), change)
    size = step.rows_that_fit(model)
    scored = []
    with plain(model), torch.no_grad():
        forward, _ = forward_of(model, {}, precision)
        for start in range(0, len(rows), size):
            part = range(start, min(start + size, len(rows)))
            for number, logps in zip(part, step.score_rows(forward, part).logps):
                scored.append(logps[: max(rows[number].padded[1], len(rows[number].completion))].clone())
    return scored


def forward_of(
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    precision: Precision,
    moved: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]:
    """Return a function of ids, mask, last places and other inputs that gives logits; and the tensors it depends on.

    These are those of `trained`, to ask for a gradient, by name. `moved` has values that they are given, by name.
    """
    inner, device = unwrap(model), input_device(model)
    leaves: dict[str, torch.Tensor] = dict(trained)
    replaced: dict[str, torch.Tensor] = {}
    names = {id(parameter): name for name, parameter in trained.items()}
    for name, parameter in inner.named_parameters():
        narrow = precision.float32 and parameter.is_floating_point() and parameter.dtype.itemsize < 4
        if not narrow and id(parameter) not in names:
            continue
        # also where nothing is widened: a hook on the parameter is not the definition's
        leaf = parameter.detach().float() if narrow else parameter.detach()
        if moved and id(parameter) in names:
            leaf = moved[names[id(parameter)]]
        replaced[name] = leaf.requires_grad_(parameter.requires_grad)
        if id(parameter) in names:
            leaves[names[id(parameter)]] = replaced[name]

    fewer = keep_argument(inner)

    def forward(
        ids: Sequence[Sequence[int]],
        attended: Sequence[Sequence[bool]],
        last: int,
        inputs: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        given: dict[str, Any] = {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(attended, device=device, dtype=torch.long),
            "use_cache": False,
            **({fewer: last} if fewer else {}),
            **{
                name: value.float() if precision.float32 and value.is_floating_point() else value
                for name, value in inputs.items()
            },
        }
        enabled = precision.autocast is not None
        with torch.autocast(device.type, dtype=precision.autocast or torch.bfloat16, enabled=enabled):
            logits: torch.Tensor = torch.func.functional_call(inner, replaced, (), given).logits
        return logits

    return forward, leaves


@contextlib.contextmanager
def draws(model: nn.Module, seed: int | None) -> Iterator[None]:
    """Within the block dropout draws from a seed of its own; the run's random state is kept."""
    devices = [torch.device(input_device(model))] if input_device(model).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not there: on a GPU, or in the machine."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
