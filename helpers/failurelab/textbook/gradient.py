"""The gradient that a definition gives for the completions of one optimizer step.

The loss is that of `definition`; here are the passes: rows in parts that fit into memory, in which numbers, with which
dropout, and what they saw. Advantages, divisors and the tokens of high entropy are those of all rows of the step,
whatever part a pass takes. Nothing of trl computes here.
"""

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from failurelab._unwrap import input_device, unwrap
from failurelab.logits import keep_argument
from failurelab.textbook.definition import GRPO, Definition, left_out
from failurelab.textbook.fields import Options
from failurelab.textbook.rows import Row, Scoring, lay_out
from failurelab.textbook.scores import Scores, plain, score

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
    """How far each bound is moved, outwards where positive: which side a token near it lies on is rounding's choice."""

    ratio: float = 0.0  # of the ratios' bounds, in nats
    entropy: float = 0.0  # of the entropy from which on tokens are trained on, in nats

    def move(self, options: Options) -> Options:
        """Return the options with the ratios' bounds moved."""
        if not self.ratio:
            return options
        moved: dict[str, Any] = {}
        if options.epsilon is not None and options.loss_type != "cispo":  # whose bound makes no jump
            low, high = options.bounds
            moved["epsilon"] = max(0.0, 1 - low * math.exp(-self.ratio))
            moved["epsilon_high"] = max(0.0, high * math.exp(self.ratio) - 1)
        if options.delta is not None:
            moved["delta"] = options.delta * math.exp(self.ratio)
        if options.engine_weight and options.engine_weight.endswith("mask"):
            low, high = options.engine_bounds
            moved["engine_bounds"] = (low * math.exp(-self.ratio), high * math.exp(self.ratio))
        if options.off_policy_mask_threshold is not None:
            moved["off_policy_mask_threshold"] = options.off_policy_mask_threshold + self.ratio
        return dataclasses.replace(options, **moved)


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which numbers, and with which dropout, the textbook computes."""

    float32: bool = True  # weights are copied to float32 where they are narrower (not those that are quantized)
    autocast: torch.dtype | None = None  # dtype of autocast, or None
    dropout: int | None = None  # modules keep their mode; the number seeds the draws. None: no dropout.
    padded: bool = False  # rows are padded as in generation, which changes nothing but the rounding
    scale: float = 1.0  # that the loss is multiplied with, and the gradient divided by, so that 16 bits hold it


EXACT = Precision()


@dataclasses.dataclass
class Slopes:
    """Scores of some rows, and the derivatives of the loss by them: by log-probabilities, and by entropies if used.

    `given` has the tensors that the loss of these rows is made of, by name. All are on the CPU.
    """

    part: range
    scores: tuple[torch.Tensor, ...]
    slopes: tuple[torch.Tensor, ...]
    given: dict[str, torch.Tensor]


@dataclasses.dataclass
class Tally:
    """What a pass saw, for what it can say of the options."""

    tokens: int = 0  # that were trained on
    clipped: int = 0  # of these, where the clipped product was the smaller one
    apart: float = 0.0  # largest distance of a token's log-probability from the reference's, in nats
    drift: float = 0.0  # largest distance of a ratio from 1
    slopes: list[Slopes] = dataclasses.field(default_factory=list)  # of the loss, of each part of the rows
    # of the tokens that are trained on, or of their completions; row after row
    log_ratios: list[torch.Tensor] = dataclasses.field(default_factory=list)
    # of the tokens among which those of the highest are chosen, of each micro-batch; row after row
    entropies: dict[int | None, torch.Tensor] = dataclasses.field(default_factory=dict)

    def rounding(self, other: "Tally") -> Shift:
        """Return how far two passes over the same rows lie apart in what bounds are compared with."""
        ratios = [(one - two).abs() for one, two in zip(self.log_ratios, other.log_ratios) if len(one)]
        entropies = [(own - other.entropies[micro]).abs() for micro, own in self.entropies.items() if len(own)]
        return Shift(*(float(torch.cat(each).max()) if each else 0.0 for each in (ratios, entropies)))

    def add(self, other: "Tally") -> None:
        """Add what was seen of other rows."""
        self.tokens, self.clipped = self.tokens + other.tokens, self.clipped + other.clipped
        self.apart, self.drift = max(self.apart, other.apart), max(self.drift, other.drift)
        self.slopes += other.slopes
        self.log_ratios += other.log_ratios
        self.entropies |= other.entropies

    def count(self, definition: Definition, options: Options, part: types.SimpleNamespace) -> None:
        """Count what the loss of a part was made of."""
        trained = (part.mask * (part.weights != 0)).bool()  # (rows, tokens)
        logps = part.logps.detach()
        log_ratio = definition.log_ratio(logps - part.old_logps, part.mask, options).expand_as(trained)
        ratio, difference = log_ratio.exp(), part.reference_logps - logps
        held = ratio.clamp(*options.bounds) * part.worth < ratio * part.worth  # by a bound
        self.log_ratios += [row[kept].cpu() for row, kept in zip(log_ratio, trained)]
        self.tokens += int(trained.sum())
        self.clipped += int((held & trained).sum())
        self.drift = max(self.drift, float((log_ratio.expm1().abs() * trained).max()))
        self.apart = max(self.apart, float((difference.abs() * trained).max()))


def expected_gradient(
    model: nn.Module,
    rows: Sequence[Row],
    options: Options,
    *,
    definition: Definition = GRPO,
    reference: Reference | None = None,
    shift: Shift = Shift(),
    precision: Precision = EXACT,
    pad: int = 0,
    tally: Tally | None = None,
) -> Gradient:
    """Return the gradient of the definition's loss for every trainable parameter of the model, by name, in float32.

    The model is afterwards what it was: its `.grad`, its modes and its random state. A forward pass takes as many
    rows as fit LOGITS_BYTES of logits, and half as many where memory ends.

    Args:
        model: the policy at the weights before the step, wrapped or not.
        rows: of each generation that the step takes rows from, all rows, of all processes; `micro` says which this step
            trains on, and `here` of which the gradient is returned.
        options: of the definition.
        definition: of the trainer's kind, or a suspect's.
        reference: gives the reference model for a block; needed where beta is not 0.
        shift: of the bounds.
        precision: of the computation.
        pad: token id of the padding, for a suspect that scores it.
        tally: is added to.

    Raises:
        OutOfMemory: one term of the loss alone, a row of most kinds, does not fit.
        ValueError: an option lacks what it needs, or no row is trained on.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model requires a gradient")
    if options.beta and reference is None:
        raise ValueError(f"beta={options.beta:g} asks for a reference model, and there is none")
    if not precision.float32:
        rows = [dataclasses.replace(row, kl=row.kl if row.kl_rounded is None else row.kl_rounded) for row in rows]
    step = Step(rows, options, definition, shift, pad)
    if precision.padded and not step.scoring.from_prompt:
        step.scoring = dataclasses.replace(step.scoring, padded=True)
    gradient = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in trained.items()}
    with plain(model, training=precision.dropout is not None), torch.enable_grad(), draws(model, precision.dropout):
        forward, leaves = forward_of(model, trained, precision)
        if options.top_entropy_quantile < 1:
            step.choose_tokens(lambda some: step.score_rows(forward, some, entropy=True), tally)

        def work(rows: range) -> tuple[types.SimpleNamespace, list[torch.Tensor], Sequence[torch.Tensor | None]]:
            part, scores = step.part(forward, rows, reference, precision)
            loss = definition.loss(part, step.options) * precision.scale
            grads = torch.autograd.grad(loss, [*leaves.values(), *scores], allow_unused=True)
            return part, scores, [None if grad is None else grad / precision.scale for grad in grads]

        for rows_done, (part, scores, grads) in in_parts(model, step, work):
            for name, grad in zip(leaves, grads):
                if grad is not None:
                    gradient[name] += grad.to(gradient[name].dtype)
            if tally is not None:
                tally.count(definition, step.options, part)
                pairs = zip(scores, grads[len(leaves) :])
                slopes = [torch.zeros_like(own) if grad is None else grad for own, grad in pairs]
                given = {name: own.detach().cpu() for name, own in vars(part).items()}
                own, slope = (tuple(each.detach().cpu() for each in some) for some in (scores, slopes))
                tally.slopes.append(Slopes(rows_done, own, slope, given))
    return gradient


def in_parts(model: nn.Module, step: "Step", work: Callable[[range], Any]) -> Iterator[tuple[range, Any]]:
    """Yield ranges of the step's rows and what work gives of each; a range is halved where memory ends.

    Raises:
        OutOfMemory: one row alone does not fit.
    """
    size, start = step.rows_that_fit(model), step.own.start
    while start < step.own.stop:
        part = range(start, min(start + size, step.own.stop))
        try:
            result = work(part)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if size == step.definition.together:
                raise OutOfMemory(f"{len(step.rows[start].completion)} tokens of one completion") from error
            size, result = step.fitting(size // 2), None
        if result is None:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        yield part, result
        start = part.stop


class Step:
    """The rows that the step trains on, with what depends on all: advantages, weights, tokens of high entropy."""

    def __init__(
        self, rows: Sequence[Row], options: Options, definition: Definition = GRPO, shift: Shift = Shift(), pad: int = 0
    ):
        self.options, self.definition, self.shift = shift.move(options), definition, shift
        chosen = [number for number, row in enumerate(rows) if row.micro is not None]
        if not chosen:
            raise ValueError("no completion is trained on in this step")
        if options.engine_weight and any(rows[number].engine_logps is None for number in chosen):
            raise ValueError("the engine gave no log-probabilities of what it drew, by which the loss is weighed")
        self.rows = [definition.read(rows[number], self.options) for number in chosen]
        here = [number for number, row in enumerate(self.rows) if row.here]  # those of a rank follow each other
        self.own = range(here[0], here[-1] + 1) if here else range(0)
        self.advantages = advantages(rows, self.options, definition)[torch.tensor(chosen)]  # (rows,)
        self.weights = row_weights(rows, self.options, definition)  # (rows,)
        self.scoring = definition.scoring(self.options, pad)
        self.chosen: dict[int, torch.Tensor] = {}  # of each row, whether each token (tokens,) is of high entropy
        self.kept = dict.fromkeys((row.micro for row in self.rows), 0)  # tokens that the entropy term is the mean of
        for row in self.rows:
            self.kept[row.micro] += 0 if left_out(row, self.options) else row.length()

    def score_rows(self, forward: Callable[..., torch.Tensor], part: range, *, entropy: bool = False) -> Scores:
        """Score some of the rows."""
        return score(forward, [self.rows[number] for number in part], self.scoring, entropy=entropy)

    def rows_that_fit(self, model: nn.Module) -> int:
        """Return how many rows have at most LOGITS_BYTES of logits."""
        words = int(unwrap(model).get_output_embeddings().weight.shape[0])
        longest = max(max(len(row.prompt) + len(row.completion), sum(row.padded)) for row in self.rows)
        room = LOGITS_BYTES.get(input_device(model).type, LOGITS_BYTES["cuda"])
        return self.fitting(min(len(self.rows), room // (4 * words * longest)))

    def fitting(self, count: int) -> int:
        """Return about so many rows, none of which is parted from those that its term of the loss has."""
        together = self.definition.together
        return together * max(1, count // together)

    def choose_tokens(self, score_part: Callable[[range], Scores], tally: Tally | None = None) -> None:
        """Choose of each micro-batch the tokens of the highest entropy, which are trained on: by their order.

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
                tally.entropies[micro] = values.cpu()

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
        above = values >= torch.quantile(values, 1 - self.definition.quantile(self.options))
        least, shift = float(values[above].min()), self.shift.entropy
        if shift < 0 and not above.all():  # inwards: without those that another rounding would put below
            return max(least, float(values[~above].max()) - shift)
        return least - shift

    def part(
        self, forward: Callable[..., torch.Tensor], part: range, reference: Reference | None, precision: Precision
    ) -> tuple[types.SimpleNamespace, list[torch.Tensor]]:
        """Return what the loss of some rows is made of, and the scores that it depends on."""
        options, own, places = self.options, [self.rows[number] for number in part], list(part)
        entropy = bool(options.entropy_coef) or options.top_entropy_quantile < 1
        now = self.score_rows(forward, part, entropy=entropy)
        logps, mask = now.logps, now.mask  # (rows, tokens)
        chosen = torch.ones_like(mask)
        if self.chosen:
            chosen = torch.stack([self.chosen_of(number, mask) for number in part])
        counts = [max(self.kept[row.micro], 1) * len(self.kept) for row in own]
        # A pass in the trainer's own numbers takes those in the same numbers: what rounding adds to both is no ratio.
        rounded = [None if precision.float32 else row.old_rounded for row in own]
        before = [row.old_logps if other is None else other for row, other in zip(own, rounded)]
        old_logps = self._put(part, logps.detach(), before)
        reference_logps = logps.detach()
        if options.beta:
            assert reference is not None  # expected_gradient has asked for it
            with reference() as model, plain(model), torch.no_grad():
                plainly, _ = forward_of(model, {}, dataclasses.replace(precision, dropout=None))
                reference_logps = self.score_rows(plainly, part).logps.to(logps)
        made = types.SimpleNamespace(
            logps=logps,
            entropies=now.entropies if entropy else torch.zeros_like(mask),
            mask=mask,
            chosen=chosen,
            old_logps=old_logps,
            engine_logps=self._put(part, old_logps, [row.engine_logps for row in own]),
            reference_logps=reference_logps,
            worth=self.advantages[places].to(logps)[:, None],
            weights=self.weights[places].to(logps)[:, None],
            counts=torch.tensor(counts).to(logps)[:, None],
        )
        return made, [logps, *([now.entropies] if entropy else [])]

    def chosen_of(self, number: int, mask: torch.Tensor) -> torch.Tensor:
        """Return 1 for the tokens (tokens,) of a row that are of high entropy; none are of one that is left out."""
        chosen = self.chosen.get(number, mask.new_zeros(0))
        return nn.functional.pad(chosen, (0, mask.shape[-1] - len(chosen))).to(mask)

    def _put(self, part: range, scores: torch.Tensor, of_rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return scores (rows, tokens) with those that are known of each row's completion, by what drew it."""
        scores = scores.clone()
        for place, (number, known) in enumerate(zip(part, of_rows)):
            if known is None:
                continue
            layout = lay_out(self.rows[number], self.scoring)
            tokens = [token - layout.start for token in layout.places]
            columns = [column for column, token in enumerate(tokens) if 0 <= token < len(known)]
            scores[place, columns] = known[[tokens[column] for column in columns]].to(scores)
        return scores


def reward_table(rows: Sequence[Row]) -> torch.Tensor:
    """Return the rewards (rows, functions), NaN where a function gave none."""
    values = [[math.nan if value is None else float(value) for value in row.rewards] for row in rows]
    return torch.tensor(values, dtype=torch.float64)


def advantages(rows: Sequence[Row], options: Options, definition: Definition = GRPO) -> torch.Tensor:
    """Return the advantages (rows,) of the rows of whole generations, in float64."""
    batches, groups = (
        [key(row) for row in rows] for key in (lambda row: row.batch, lambda row: (row.batch, row.group))
    )
    given = [reward_table(rows), _same(groups), _same(batches)]
    if definition.taken is not None:
        given.append(torch.tensor([definition.taken(row, options) for row in rows], dtype=torch.float64))
    return definition.advantages(*given, options)


def _same(keys: Sequence[Any]) -> torch.Tensor:
    """Return where two rows have the same key, (rows, rows)."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    own = torch.tensor([numbers[key] for key in keys])
    return own[:, None] == own


def row_weights(rows: Sequence[Row], options: Options, definition: Definition = GRPO) -> torch.Tensor:
    """Return the weight that each token of a row has in the loss, of the rows that are trained on, (rows,)."""
    trained = [row for row in rows if row.micro is not None]
    left = torch.tensor([left_out(row, options) for row in trained])
    counted = torch.ones_like(left) if options.truncated_count else ~left
    lengths = torch.tensor([row.length() for row in trained], dtype=torch.float64)
    same = _same([row.micro for row in trained]).double()  # (rows, rows)
    step = (lengths * counted).sum().clamp(min=1)
    generation = [0 if left_out(row, options) else row.length() for row in rows]
    own = sum(count for row, count in zip(rows, generation) if row.micro is not None)
    of_rank = _same([row.rank for row in trained]).double()  # (rows, rows)
    whole: dict[int, int] = {}  # tokens of each generation
    for row, count in zip(rows, generation):
        whole[row.batch] = whole.get(row.batch, 0) + count
    sizes = types.SimpleNamespace(
        tokens=lengths.clamp(min=1),
        completions=(same @ counted.double()).clamp(min=1),
        micro_tokens=(same @ (lengths * ~left)).clamp(min=1),
        micros=len({row.micro for row in trained}),
        step_tokens=step.expand_as(lengths),
        rank_tokens=len({row.rank for row in trained}) * (of_rank @ (lengths * counted)).clamp(min=1),
        share=(step * max(1.0, sum(generation) * len(trained) / len(rows)) / max(own, 1)).expand_as(lengths),
        generation_tokens=torch.tensor([float(max(1, whole[row.batch])) for row in trained]),
    )
    return (1 / definition.divisor(sizes, options)).masked_fill(left, 0.0)


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
    exact = score_rows(model, rows, temperature, pad, EXACT)
    other = score_rows(model, rows, temperature, pad, rounded) if rounded else [None] * len(rows)
    return [dataclasses.replace(row, old_logps=old, old_rounded=own) for row, old, own in zip(rows, exact, other)]


def with_kl(rows: Sequence[Row], references: Sequence[Row]) -> list[Row]:
    """Return rows with log(policy / reference) of each completion, from `score_old` of both."""

    def kl(own: torch.Tensor | None, other: torch.Tensor | None, row: Row) -> float | None:
        places = [place for place in range(len(row.completion)) if place not in row.given]
        return None if own is None or other is None else float((own - other)[places].double().sum())

    pairs = list(zip(rows, references, strict=True))
    return [
        dataclasses.replace(
            row,
            kl=kl(row.old_logps, other.old_logps, row) or 0.0,
            kl_rounded=kl(row.old_rounded, other.old_rounded, row),
        )
        for row, other in pairs
    ]


def score_rows(
    model: nn.Module, rows: Sequence[Row], temperature: float, pad: int, precision: Precision
) -> list[torch.Tensor]:
    """Return the log-probabilities (tokens,) of each row's completion, and its padding, in some numbers."""
    step = Step([dataclasses.replace(row, micro=0) for row in rows], Options())
    step.scoring = Scoring(temperature, tokens="padding", pad=pad, padded=precision.padded)
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
    return isinstance(error, torch.OutOfMemoryError | OutOfMemory) or "can't allocate memory" in str(error)
