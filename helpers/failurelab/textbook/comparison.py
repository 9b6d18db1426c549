"""A trainer's gradient beside the textbook's: direction, size, and how far apart two textbook passes lie themselves."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from failurelab.failures.predicates import Value
from failurelab.textbook import fields, together
from failurelab.textbook.algorithms import algorithm_of, count_uses, no_textbook
from failurelab.textbook.apart import COSINE, SAME, Apart, Floor, measure_apart, norm
from failurelab.textbook.backward import WRONG, Backward, measure_backward
from failurelab.textbook.definition import SMALL, Definition
from failurelab.textbook.definition_online_dpo import say_ties
from failurelab.textbook.draws import pad_id
from failurelab.textbook.fields import Options
from failurelab.textbook.gradient import (
    TIE,
    Gradient,
    OutOfMemory,
    Precision,
    Shift,
    Step,
    Tally,
    advantages,
    expected_gradient,
    reward_table,
)
from failurelab.textbook.ranks import RanksApart, several, whole, whole_bytes
from failurelab.textbook.recorder import Evidence, loss_scale, own_precision, precisions, reference_of
from failurelab.textbook.rows import Row
from failurelab.textbook.scores import depends_on_grad
from failurelab.textbook.suspects import (
    BY_STEP,
    LEFT_OUT,
    MECHANISMS,
    NO_MASK,
    OTHER_ROWS,
    OWN_TOKENS,
    Search,
)
from failurelab.textbook.weights import Explanation, Weight, table

BACKWARD = "backward pass of the model"
PADDING = "padding of the prompts: those of a batch have the same length"
DRAWS = 12
BLIND = 0.5  # a floor from which on a direction cannot be told from another
CANCELS = (
    "completions that were rewarded differently are the same, or nearly, so that their gradients cancel, and rounding "
    "is all that is left to compare"
)
BLINDED = (
    "right gradients lie so far apart that a wrong one could not be told from them: of other draws of dropout, or of "
    "noise on the embeddings, in numbers of 16 bits, with completions that are nearly the same and cancel, or with "
    "tokens on either side of a bound (clipping, or top_entropy_quantile) as rounding decides; a step in float32, of "
    "more completions and with attention_dropout and lora_dropout 0, can be checked"
)
EQUAL = "all completions of each prompt get the same reward: every advantage is 0, and so is the gradient (F10)"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What one optimizer step showed.

    Attributes:
        verdict: `HELD`, `FOUND`, `NOT CHECKED`, or `NO GRADIENT`, where rewards leave none to expect.
        reason: one line that says why.
        step: number of the optimizer step, from 1.
        apart: trainer's gradient and the textbook's.
        floor: of the measurement.
        named: what explains a wrong gradient, where one suspect does; or None.
        line: which one of that kind it is, such as `without temperature`; "" where there is one.
        not_shown: what this step cannot show, a line each.
        asked: figures of what this step's arguments and rows ask for.
        temperature: that the tokens were drawn at; None where that was not seen.
        texts: completions whose text differs from what reward functions were given, and one of them; "" if none.
        controls: mistakes that were planted in the textbook, by name: beside the textbook, if asked for; where another
            one is named, beside the trainer's gradient.
        weights: of the rows, where they say what is wrong with the direction.
        backward: the textbook's gradient beside finite differences, where the trainer's is the textbook's.
    """

    verdict: str
    reason: str
    step: int = 0
    apart: Apart | None = None
    floor: Floor = dataclasses.field(default_factory=Floor)
    named: str | None = None
    line: str = ""
    not_shown: tuple[str, ...] = ()
    asked: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    temperature: float | None = None
    texts: str = ""
    controls: Mapping[str, Apart] = dataclasses.field(default_factory=dict)
    weights: tuple[Weight, ...] = ()
    backward: Backward | None = None

    def sees(self, mistake: str) -> bool:
        """Whether this measurement tells a planted mistake from the definition."""
        return mistake in self.controls and not self.floor.holds(self.controls[mistake])

    @property
    def blind(self) -> tuple[str, ...]:
        """What was planted, and would not have shown: of it a right gradient says nothing."""
        return tuple(name for name in MECHANISMS if name in self.controls and not self.sees(name))

    @property
    def figures(self) -> dict[str, Value]:
        """What the registry's F21 is about."""
        measured: dict[str, Value] = {} if self.apart is None else self.floor.figures(self.apart)
        whatever = self.verdict == "FOUND" and (self.apart is None or self.floor.holds(self.apart))
        return measured | dict(self.asked) | {"step_fault": self.reason if whatever else ""}

    @property
    def planted(self) -> dict[str, dict[str, Value]]:
        """The figures of F21's controls; of mistakes that were planted in the textbook the one that shows least."""
        of_rows = [self.controls[name] for name in (*self.blind, *MECHANISMS) if name in self.controls]
        of_asked = [name for name in (NO_MASK, *LEFT_OUT, "opposite sign") if name in self.controls]
        planted = {name: self.floor.figures(self.controls[name]) for name in of_asked}
        planted |= {"half the loss": self.floor.figures(Apart(1.0, 0.5, 1.0))} if of_rows else {}
        return planted | ({"advantages of other rows": self.floor.figures(of_rows[0])} if of_rows else {})

    @property
    def table(self) -> str:
        """Weights of rows beside those that they should be; "" where they do not explain the gradient."""
        return table(self.weights)

    def __str__(self) -> str:
        parts = [f"{self.verdict}: step {self.step}, {self.reason}"]
        parts += [self.texts] * bool(self.texts)
        parts += [f"NOT CHECKED: {line}" for line in self.not_shown]
        parts += [self.table] * bool(self.table)
        return "\n".join(parts)


def why_not_here(trainer: Any) -> list[str]:
    """Return why the gradient of this trainer is not implemented, a line for each reason."""
    if elsewhere := no_textbook(trainer):
        return [elsewhere]
    algorithm = algorithm_of(trainer)
    lines = fields.why_not(trainer, algorithm.losses, algorithm.not_here)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if "fp16" in precisions(trainer) and getattr(trainer, "is_deepspeed_enabled", False):
        lines.append("fp16 of DeepSpeed, which scales the loss by itself, and needs a GPU")
    if several() and getattr(trainer.args, "top_entropy_quantile", 1.0) < 1:
        lines.append("top_entropy_quantile: the tokens are chosen among those of all processes")
    if getattr(trainer.args, "n_gpu", 1) > 1:
        lines.append("several devices of one process: each has a part of the batch")
    if type(model).__name__ == "FullyShardedDataParallel" or any(
        type(parameter).__name__ == "FlatParameter" for parameter in model.parameters()
    ):
        lines.append("FSDP of version 1: the gradients of several tensors are one flat one")
    needed, free = whole_bytes(model)
    if needed > free:
        lines.append(f"the whole weights and gradients take {needed >> 20} MiB, and {free >> 20} MiB are free")
    for config in (getattr(model, "peft_config", None) or {}).values():
        if getattr(config, "is_prompt_learning", False):
            lines.append("the adapter is a learned prompt, and no layer of the model")
    return lines


def compare_step(
    trainer: Any, evidence: Evidence, *, with_suspects: bool = True, with_controls: bool = False
) -> Comparison:
    """Compare the gradient of a step with the textbook's, before the optimizer steps.

    Args:
        trainer: the trainer, at the weights that the gradient was computed at.
        evidence: of the step, from this process: all have to call this, and get the same answer.
        with_suspects: look for what explains a gradient that is wrong, by the weights of its tokens and some passes.
        with_controls: plant known mistakes in the textbook where the gradient is right, a pass for each. It holds only
            where one of each of MECHANISMS shows.
    """
    wrong: list[tuple[str, str]] = []
    try:
        step = trainer.state.global_step + 1
        lost = [f"rank {evidence.ranks.number}: {evidence.ranks.lost}"] * bool(evidence.ranks.lost)
        given = evidence.ranks.call(
            f"the comparison of step {step}", (why_not_here(trainer) + lost, with_suspects, with_controls)
        )
        problems = [line for lines, *_ in given for line in lines]
        if several() and evidence.ranks.count == 1:
            problems.append("several processes, which have not met at the beginning of training")
        if not problems and evidence.ranks.count > 1:
            evidence = together.gather(trainer, evidence)
        wrong = [] if problems else evidence.wrong
        problems = list(dict.fromkeys(problems or evidence.problems))
        searched, planted = (all(each[place] for each in given) for place in (1, 2))
        if problems:
            report = Comparison("NOT CHECKED", "; ".join(problems))
        elif any(name == together.DRIFTED for name, _ in wrong):
            report = Comparison("NOT CHECKED", "there is no one policy to compute the gradient of")
        else:
            with evidence.within(), whole(evidence.ranks, trainer.model, getattr(trainer, "ref_model", None)):
                comparer = _Comparer(trainer, evidence)
                wrong = wrong + comparer.wrong
                added = _added(trainer, evidence)
                report = comparer.compare(searched and not added, planted)
                if report.verdict == "HELD" and evidence.unknown:
                    said = f"{evidence.unknown}; with what was told: {report.reason}"
                    report = dataclasses.replace(report, verdict="NOT CHECKED", reason=said)
                if report.verdict == "FOUND" and added:
                    report = Comparison("NOT CHECKED", added)
    except OutOfMemory as error:
        report = Comparison("NOT CHECKED", f"out of memory: not even one row fits ({error})")
    except (ValueError, RanksApart) as error:  # what the definition needs is not there
        report = Comparison("NOT CHECKED", str(error))
    except Exception as error:  # of this rank alone, perhaps
        evidence.ranks.leave(f"{type(error).__name__}: {error}")
        raise
    if wrong:
        names, lines = zip(*wrong)
        reason = f"{'; '.join(lines)}. Beside that: {report.verdict}, {report.reason}"
        report = dataclasses.replace(report, verdict="FOUND", named=names[0], reason=reason)
    step, temperature = trainer.state.global_step + 1, evidence.temperature
    return dataclasses.replace(report, step=step, temperature=temperature, texts=evidence.texts)


def _added(trainer: Any, evidence: Evidence) -> str:
    """Return what the script adds to a library's loss that is the textbook's; empty where it is not so."""
    if not evidence.part:
        return ""
    alone = _Comparer(trainer, dataclasses.replace(evidence, gradient=evidence.part))
    if alone.compare(False, False).verdict != "HELD":
        return ""
    term = {name: gradient - evidence.part[name] for name, gradient in evidence.gradient.items()}
    return (
        f"the script's own loss adds a term to the library's, whose gradient is {norm(term) / norm(evidence.part):.2g} "
        "times as long as the library's, which alone is the textbook's. Is that term meant? Its sign is not judged"
    )


class _Comparer:
    def __init__(self, trainer: Any, evidence: Evidence):
        algorithm = algorithm_of(trainer)
        self.trainer, self.definition = trainer, algorithm.definition
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        self.ranks, self.wrong = evidence.ranks, list[tuple[str, str]]()
        self.theirs, same = self.ranks.same(_by_name(evidence.gradient, trainer.model, self.model))
        if not same:
            self.wrong.append((together.OWN_GRADIENTS, "each rank would step with a gradient of its own; their mean"))
        self.options = algorithm.options(trainer, evidence.temperature)
        self.rows, self.passes, self.losses = evidence.rows, evidence.passes, evidence.losses
        self.believed = evidence.believed
        self.trained = [row for row in self.rows if row.micro is not None]
        self.own = own_precision(trainer)

    def gradient(
        self, options: Options, *, definition: Definition | None = None, tally: Tally | None = None, **given: Any
    ) -> Gradient:
        """Return the expected gradient, of the rows of all processes."""
        own, given["definition"] = None if tally is None else Tally(), definition or self.definition
        given |= {"reference": reference_of(self.trainer), "pad": pad_id(self.trainer), "tally": own}
        gradient = self.ranks.add(lambda: expected_gradient(self.model, self.rows, options, **given))
        if tally is not None:
            for other in self.ranks.share(own):
                tally.add(other or Tally())
        return gradient

    def readings(self) -> dict[str, Options]:
        """Return the readings of the options, without those that are the same for these rows."""
        longest = max(len(row.prompt) + row.padded[1] for row in self.rows)
        differs = {
            "generation_tokens": len(self.trained) < len(self.rows),
            "padding_ends": any(row.ends_in_padding for row in self.rows),
            "length_padded": longest > (self.options.max_length or math.inf),
        }
        same = [name for name, does in differs.items() if not does]
        readings = self.options.readings().items()
        return {said: options for said, options in readings if not any(getattr(options, name) for name in same)}

    def compare(self, with_suspects: bool, with_controls: bool) -> Comparison:
        if depends_on_grad(self.model):
            why = "the model gives other logits while a graph is made: a hook, say, that acts in training alone"
            return Comparison("NOT CHECKED", why)
        worth = advantages(self.rows, self.options, self.definition)
        chosen = torch.tensor([row.micro is not None for row in self.rows])
        equal = float(worth[chosen].abs().max()) < 1e-6
        if equal and not self.options.beta and not self.options.entropy_coef:
            return self._no_gradient()
        readings = self.readings()
        tallies = {name: Tally() for name in readings}
        passes = {name: self.gradient(options, tally=tallies[name]) for name, options in readings.items()}
        apart = {name: measure_apart(self.theirs, gradient) for name, gradient in passes.items()}
        reading = min(apart, key=lambda name: apart[name].distance)
        ours, options, tally = passes[reading], readings[reading], tallies[reading]
        nearest = apart[reading]
        floor, blind, rounded = self.floor(options, ours, nearest, tally)
        if rounded is not None:  # in its own numbers, however far these lie from the exact ones
            beside = measure_apart(self.theirs, rounded)
            if Floor().holds(beside):
                nearest, floor, blind = beside, Floor(), ""
        verdict = "HELD" if floor.holds(nearest) else "FOUND"
        found, backward = Explanation(), None
        if equal and not options.entropy_coef and tally.apart <= SAME:
            return self._no_gradient()
        if norm(ours) == 0:
            return Comparison("NOT CHECKED", "the textbook gives no gradient for these completions")
        size = norm(ours) if verdict == "HELD" else max(norm(ours), norm(self.theirs))
        if blind or size <= COSINE * self._unit(options):
            return Comparison("NOT CHECKED", blind or CANCELS, floor=floor)
        if verdict == "HELD" and floor.wide:
            return Comparison("NOT CHECKED", BLINDED, floor=floor)
        search = Search(
            self.rows,
            options,
            self.definition,
            self.theirs,
            floor,
            self.gradient,
            pad=pad_id(self.trainer),
            accumulated=int(self.trainer.args.gradient_accumulation_steps),
            ranks=self.ranks,
            passes=self.passes,
            scale=loss_scale(self.trainer),
        )
        if verdict == "FOUND" and with_suspects:
            if rounded is None or self.own is None:
                found = search.explain(ours, nearest, tally)
            else:  # in these a suspect's gradient is the trainer's; beside the exact one rounding hides which it is
                gradient = functools.partial(self.gradient, precision=self.own)
                own = dataclasses.replace(search, floor=Floor(), gradient=gradient)
                found = own.explain(rounded, measure_apart(self.theirs, rounded), tally)
        planted = search.plant(ours) if with_controls and verdict == "HELD" else {}
        if verdict == "HELD":
            step = Step(self.rows, options, self.definition)
            backward = measure_backward(self.model, step, ours, tally, self.ranks)
            if backward.wrong:
                verdict, found = "FOUND", Explanation(BACKWARD, f"Named: {BACKWARD}. {_say_backward(backward)}")
        report = Comparison(
            verdict,
            self._reason(verdict, nearest, floor, tally, found, reading),
            apart=nearest,
            floor=floor,
            named=found.named,
            line=found.line,
            not_shown=tuple(self._not_shown(ours, tally, options, backward)),
            asked=self._asked(),
            controls=planted or found.tried,
            weights=found.weights,
            backward=backward,
        )
        blinded = [name for name in report.blind if name != OTHER_ROWS or not equal]  # of a penalty alone
        if verdict == "HELD" and blinded:
            why = f"{report.reason}; with {' or '.join(blinded)} planted it looks the same"
            return dataclasses.replace(report, verdict="NOT CHECKED", reason=why)
        return report

    def _asked(self) -> dict[str, Value]:
        args, options, alone = self.trainer.args, self.options, self.definition.together == 1
        batches = {row.batch for row in self.trained}
        lengths = max(len({len(row.prompt) for row in self.trained if row.batch == batch}) for batch in batches)
        bounded = options.epsilon is not None and options.loss_type not in ("sapo", "vespo")
        return {
            "prompt_lengths": lengths,
            "prompts_padded": lengths > 1,
            "penalty_asked": alone and bool(options.beta or options.kl_in_reward),
            "bounds_asked": alone and bounded and count_uses(args) > args.gradient_accumulation_steps,
            "cut_asked": alone and options.mask_truncated_completions,
            "loss_overridden": self.losses is not None,
            "losses_negative": sum(loss < 0 for loss in self.losses) if self.losses else None,
        }

    def floor(self, options: Options, ours: Gradient, apart: Apart, tally: Tally) -> tuple[Floor, str, Gradient | None]:
        """Measure how far right passes lie from the exact one.

        Return that, why it is too far to judge, or "", and the gradient of a pass in the trainer's own numbers, where
        these are narrower than float32 and no dropout hides them.

        These are passes in the trainer's own numbers, and with its dropout. A draw of dropout that hits what matters is
        rare and lies far away, so two draws would accuse healthy trainers: draws are taken until the trainer's
        gradient, `apart`, lies within what they allow, at most DRAWS. Where it still does not, tokens that lie so near
        to a bound that these passes' rounding decides are all put on one side of it, then all on the other.
        """
        dropout, floor, rounding, rounded = drops_out(self.model), Floor(), Shift(TIE, TIE), None
        if dropout or self.own is not None:
            own = self.own or Precision(False)
            for seed in range(1, DRAWS + 1) if dropout else (None,):
                other = Tally()
                gradient = self.gradient(options, precision=dataclasses.replace(own, dropout=seed), tally=other)
                floor = floor.widened(measure_apart(gradient, ours))
                rounded = None if dropout else gradient
                apart_by = other.rounding(tally)
                rounding = Shift(max(rounding.ratio, 2 * apart_by.ratio), max(rounding.entropy, 2 * apart_by.entropy))
                if floor.holds(apart):
                    break
            if floor.band[0] >= BLIND:
                return floor, BLINDED, rounded
        if not floor.holds(apart) and self._has_bounds(options):
            for sign in (1, -1):
                shift = Shift(sign * rounding.ratio, sign * rounding.entropy)
                gradient = self.gradient(options, shift=shift)
                floor = floor.widened(measure_apart(gradient, ours))
        return floor, BLINDED if floor.band[0] >= BLIND else "", rounded

    def _has_bounds(self, options: Options) -> bool:
        """Whether a token's part in the gradient jumps somewhere."""
        masks = "mask" in (options.engine_weight or "")
        return masks or options.top_entropy_quantile < 1 or any(row.old_logps is not None for row in self.trained)

    def _unit(self, options: Options) -> float:
        """Return the norm of the gradient with all advantages 1: the scale of what rounding leaves."""
        ones = dataclasses.replace(self.definition, advantages=lambda rewards, *_: torch.ones_like(rewards[:, 0]))
        return norm(self.gradient(options, definition=ones))

    def _no_gradient(self) -> Comparison:
        """Say that no gradient is expected; the size of one that is there is judged by that of unit advantages."""
        unit, theirs = self._unit(self.options), norm(self.theirs)
        if theirs <= max(COSINE, advantages_of_rounding(self.rows, self.options)) * unit:
            return Comparison("NO GRADIENT", EQUAL)
        return Comparison("FOUND", f"{EQUAL}, but the trainer has one, of norm {theirs:.3g}")

    def _reason(self, verdict: str, apart: Apart, floor: Floor, tally: Tally, found: Explanation, reading: str) -> str:
        cosine, size = floor.band
        said = (
            f"{apart} beside the textbook's gradient ({len(self.trained)} completions, {tally.tokens} tokens, "
            f"{len(self.theirs)} tensors; healthy: cosine at least {1 - cosine:.4f}; size, its length "
            f"divided by the textbook's, 1 ± {size:.2f})"
        )
        if self.ranks.count > 1:
            said += f"; {self.ranks.count} processes"
        if self.definition.together == 2:
            cut = torch.tensor([not row.ended for row in self.trained])
            said += "".join(f"; {line}" for line in [say_ties(reward_table(self.trained), cut, self.options)] if line)
        if verdict == "HELD":
            return f"{said}; {reading}" if reading else said
        return f"the trainer's gradient is not its algorithm's: {said}. {found.text}".strip()

    def _not_shown(self, ours: Gradient, tally: Tally, options: Options, backward: Backward | None) -> Iterator[str]:
        """Yield what this step could not have shown."""
        yield from self.believed
        empty = [name for name, grad in ours.items() if not grad.any()]
        if empty:
            kind = "LoRA's A has none while B is 0" if all("lora_A" in name for name in empty) else empty[0]
            yield f"{len(empty)} of {len(ours)} tensors, for which no gradient is expected in this step ({kind})"
        if options.beta and tally.apart <= SAME and self.definition.together == 2:
            yield "beta and loss_type, beyond a factor: the policy is still its reference, so every margin is 0"
        elif options.beta and tally.apart <= SAME:
            yield "beta: the policy is still its reference, so the KL divergence and its gradient are 0"
        if options.kl_in_reward and all(abs(row.kl) <= SAME * len(row.completion) for row in self.trained):
            yield "beta: the policy that drew was still its reference, so the KL divergence in the rewards is 0"
        if options.epsilon is not None and tally.drift < 1e-4:
            yield "clipping (epsilon, epsilon_high, delta): every ratio is 1, for the policy itself drew these tokens"
        elif options.epsilon is not None and not tally.clipped:
            yield "clipping (epsilon, epsilon_high, delta): no ratio lies outside"
        if options.mask_truncated_completions and all(row.ended for row in self.trained):
            yield "mask_truncated_completions: no completion was cut"
        if all(len(row.prompt) == row.padded[0] for row in self.trained):
            yield PADDING
        tokens = torch.tensor(together.tokens_of(self.rows, options), dtype=torch.float64)  # (ranks,)
        if self.ranks.count > 1 and options.loss_type in BY_STEP and _is_even(1 / tokens):
            told = ", ".join(f"{count:g}" for count in tokens)
            yield f"{OWN_TOKENS}: the ranks have about as many, {told}"
        if all(len(row.completion) == row.padded[1] for row in self.trained):
            yield "a shift of the completion mask: the completions of a batch have the same length"
        if backward is not None and backward.error > WRONG and not backward.wrong:
            yield "backward pass of the model: too coarse numbers, or too little memory, for finite differences"


def _is_even(factors: torch.Tensor) -> bool:
    """Return whether parts of a gradient, (ranks,), that are multiplied by these would leave a healthy cosine.

    Of parts of one length that have nothing in common, and so of any that have more.
    """
    return bool(factors.isfinite().all()) and float(factors.mean() / factors.square().mean().sqrt()) >= 1 - COSINE


def advantages_of_rounding(rows: Sequence[Row], options: Options) -> float:
    """Return how large an advantage may be in float32 where all rewards of a group are equal: their mean is rounded."""
    weights = options.reward_weights or (1.0,) * len(rows[0].rewards)
    largest = float((reward_table(rows).nan_to_num().abs() @ torch.tensor(weights, dtype=torch.float64).abs()).max())
    return 2 * torch.finfo(torch.float32).eps * largest / (1.0 if options.scale_rewards == "none" else SMALL)


def _say_backward(backward: Backward) -> str:
    return (
        "The trainer's gradient is the textbook's, and neither is the derivative of what the model computes: along "
        f"random directions the scores change otherwise, by {backward.away:.2g} of the gradient's norm. Look for "
        "no_grad, detach and hooks in the model's layers"
    )


def drops_out(model: nn.Module) -> bool:
    """Whether a module draws dropout, or noise, in the mode that it is in."""
    for module in model.modules():
        noise = getattr(module, "neftune_noise_alpha", None) or 0  # on the embeddings
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", noise)
        if module.training and isinstance(rate, float | int) and rate > 0:
            return True
    return False


def _by_name(gradient: Gradient, wrapped: nn.Module, model: nn.Module) -> Gradient:
    """Return the gradient under the names that the unwrapped model gives its parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: gradient[name] for name, parameter in wrapped.named_parameters() if name in gradient}
