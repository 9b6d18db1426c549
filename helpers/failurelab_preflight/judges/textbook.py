"""F3b, F15, F20 and F21: one optimizer step of the cut training beside the textbook.

The whole gradient is compared with the definition of GRPO, RLOO or Online DPO (see `failurelab.textbook`), and what
explains a difference is looked for: scores at other rows of logits are F3b, a temperature that they leave out F15, a
loss divided by the tokens of a whole generation F20, anything else F21. It needs completions of several lengths, cut
ones among them, or a mask and a loss that is divided by the wrong number would not show: a small random model draws no
end, so its completions are ended here.

A failure holds where the gradient is the textbook's, or that of another mistake that is named, and the same measurement
tells the failure's own mistake from it.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers.trainer_callback import TrainerCallback

from failurelab import failures, textbook
from failurelab._text import first_line
from failurelab.errors import raises_own
from failurelab.failures import verdicts
from failurelab.failures.predicates import Value
from failurelab.handles import is_unseen, keep_random_state, unseen, wrap_method
from failurelab.textbook.algorithms import count_uses
from failurelab.textbook.draws import pad_id
from failurelab.textbook.gradient import score_old
from failurelab.textbook.ranks import RanksApart, own_number
from failurelab.textbook.recorder import MIXED
from failurelab.textbook.suspects import NO_GRADIENT, NO_MASK
from failurelab_preflight.finding import RELEASE, SCRIPT, Finding, Location, Quantity
from failurelab_preflight.judges.ledger import find_maker, judge_ledger
from failurelab_preflight.judges.logits import LOGITS_REPAIRED
from failurelab_preflight.judges.replaced import Replaced, find_replaced
from failurelab_preflight.judges.rows import prompt_ids, sample, tokenizer_of
from failurelab_preflight.judges.settled import alone, forgiven, of_release, settle
from failurelab_preflight.repairs import Arguments, Repair
from failurelab_preflight.script_text import location
from failurelab_preflight.stage import cuts
from failurelab_preflight.training import Training

ENDS = (8, 5, 3, 1, 6, 4, 2)  # of 8 tokens those before the end of each completion, in turn; the first stays cut
# Of every second rank: it has half as many tokens as the others at most. One that divides by its own leaves a cosine of
# 0.997 where two ranks have 16 and 19, and of 0.954 at 2 : 1.
SHORT_ENDS = tuple(max(1, end // 3) for end in ENDS)
_LEAST = 0.02  # that a weight near 0 is moved by, as an adapter's; others by their own size
_NEAR, _FAR = 0.5, 5.0  # nats a token that the policy is moved: some ratios leave their bounds; a penalty is large
_FEW, _ROWS = 64, 2048  # rows of a stream, and of a dataset, whose prompts are measured
_MOST = 5e7  # parameters up to which the search for an explanation, some ten passes, is affordable on a CPU
# The failure that a suspect is, where it is not F21; and the mistake that is planted to hold that failure.
_FAILURES = {"rows of the prompt": "F3b", "scores shifted by one": "F3b", "temperature": "F15"}
_CONTROLS = ("opposite sign", "scores shifted by one")  # which have to be seen, where a gradient holds
_PLANTED = {"F3b": "rows of the prompt", "F15": "temperature"}
ENGINES = ("deepspeed", "fsdp")  # whose processes train a part of the model each
CUT_AWAY = (  # options that the cut training lacks, with which the gradient may be another one
    "fp16", "parallelism_config", "sync_ref_model", "torch_compile", "use_liger_kernel", "use_liger_loss",
    "use_transformers_continuous_batching", "use_transformers_paged", "use_vllm",
)  # fmt: skip
_OF_GENERATION, _ACCUMULATION = _SIZES = "divided by the tokens of the generation", "accumulation"
_CANCELS = "the direction is right, and AdamW cancels a constant size, but for clipping by max_grad_norm"
_REPAIRS = {
    "F3b": "failurelab.logits.repair(model) before the trainer is made; or trl 0.15 and later.",
    "F15": "Set temperature=1.0, or upgrade to trl 0.16 or later.",
    "F20": "Set steps_per_generation to gradient_accumulation_steps, or upgrade trl.",
    MIXED: "Let each prompt come num_generations times in a row, as trl's own sampler does; trl 0.15 repeats nothing "
    "of an IterableDataset: Dataset.from_list(list(rows)) is repeated.",
    _ACCUMULATION: "Set gradient_accumulation_steps=1, and per_device_train_batch_size to the batch of a step.",
    NO_MASK: "trl 0.15 or later; or prompts of one length in a batch (TRL #2708).",
}
_LIBRARIES = ("trl", "transformers", "builtins")
_MAKE_ADVANTAGES = ("_generate_and_score_completions", "_prepare_inputs")  # the second in trl 0.15
_LEFT_OVER = 1e-2  # of the largest weight: what has no sign
_OTHERWISE = (
    "The error is in what is overridden or patched: correct it there, and try it by --edit. "
    "failurelab.guards.StepGuard(trainer) checks it in the run."
)
_FLAT = (
    "A loss without a gradient often compares log-probs with themselves: of exp(logps - old_logps) the old ones need "
    ".detach(). "
)


class OwnMethod(NamedTuple):
    """A method of a class of the script's own that is in the place of the library's."""

    kind: type
    name: str

    def __str__(self) -> str:
        return f"{self.kind.__name__}.{self.name}"


def overridden(trainer: Any) -> list[OwnMethod]:
    """Return the methods that classes of the script's own override."""
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] not in _LIBRARIES]
    methods = [
        OwnMethod(kind, name) for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)
    ]
    return [method for method in methods if method.name != "__init__"]


class StepJudge(TrainerCallback):
    """Compares the first optimizer step that shows something, and a later one for what that cannot show; see `_wanted`.

    Args:
        training: of the script.
        missing: whether another judge has seen by now that tensors have no gradient (F1, F2): then nothing is searched.
    """

    def __init__(self, training: Training, missing: Callable[[], bool] = lambda: False):
        self.training, self.trainer, self.missing = training, training.trainer, missing
        self.reports: list[textbook.Comparison] = []
        self._error = ""
        self._maker = find_maker(training)
        self._ledger: textbook.Ledger | None = None  # of rollouts, or a loop, of the script's own
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights that were moved for a step, and as they were
        self._drawn_in = set[int]()  # steps in which completions were drawn
        self._listening = contextlib.ExitStack()
        self._recorder: textbook.Recorder  # from the beginning of training on

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, steps are compared. To be entered after other callbacks that listen to `generate`."""
        if textbook.no_textbook(self.trainer) is not None:
            yield
            return
        self.trainer.add_callback(self)
        try:
            yield
        finally:
            self._listening.close()
            self.trainer.remove_callback(self)

    def _wanted(self, step: int) -> bool:
        """Whether a step is compared: until one is wrong, or all that the registry's F21 is about was shown by some."""
        return not self._reports("FOUND") and not self._error and bool(self._open)

    def _reports(self, verdict: str) -> list[textbook.Comparison]:
        return [report for report in self.reports if report.verdict == verdict]

    @property
    def _open(self) -> dict[str, str]:
        """The mechanisms of F21 that no step could show yet, and what was missing in the last one."""
        held, missing = self._reports("HELD"), dict[str, str]()
        for mechanism in failures.get("F21").mechanisms:
            one = alone("F21", mechanism.name)
            judged = [verdicts.judge(one, [self._figures(report)], report.planted) for report in held]
            if all(each.verdict == verdicts.NOT_CHECKED for each in judged):
                missing[mechanism.name] = judged[-1].missing if judged else ""
        return missing

    def _figures(self, report: textbook.Comparison) -> dict[str, Value]:
        return report.figures | ({} if report.figures.get("prompts_padded") else {"prompts_padded": self._pads})

    @functools.cached_property
    def _pads(self) -> bool | None:
        """Whether prompts of several lengths may stand in a batch of this trainer; None where that is not known."""
        trainer, paired = self.trainer, self._recorder.is_paired
        if trainer.args.per_device_train_batch_size == 1 if paired else cuts.generates_for_one(trainer.args):
            return False
        with contextlib.suppress(Exception):  # prompts with images, or made by a loop of the script's own
            whole = trainer.train_dataset if self.training.dataset is None else self.training.dataset
            most = _ROWS if hasattr(whole, "__len__") else _FEW
            rows = sample(self.training, most)
            lengths = {len(ids) for ids in prompt_ids(trainer, [row["prompt"] for row in rows])}
            return True if len(lengths) > 1 else False if len(rows) < most else None  # all that there are
        return None

    def _uses_again(self) -> bool:
        return count_uses(self.trainer.args) > self.trainer.args.gradient_accumulation_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start to listen, around the guards that generate for themselves."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if callable(getattr(model, "generate", None)):
            self._listening.enter_context(wrap_method(model, "generate", self._end, "completions are ended"))
        self._recorder = textbook.recorder_of(self.trainer, self._wanted)
        self._listening.callback(self._recorder.detach)
        self._recorder.attach()
        changed = not self._recorder.is_paired and (self._own or self.replaced)
        if self._maker[0] or self._recorder.scores_itself or changed:
            self._ledger = textbook.Ledger(self.trainer)
            self._listening.callback(self._ledger.detach)
            self._ledger.attach()
        try:
            self._recorder.begin(self._compare)
        except RanksApart as error:
            self._error = str(error)

    def _end(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Put an end into the completions that were drawn, each at another place; on every second rank soon."""
        output = generate(*args, **kwargs)
        drawn = getattr(output, "sequences", output)  # with return_dict_in_generate
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        tokenizer = tokenizer_of(self.trainer)
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        if not isinstance(drawn, torch.Tensor) or not isinstance(ids, torch.Tensor) or end is None:
            return output
        width, order = ids.shape[1], SHORT_ENDS if own_number() % 2 else ENDS
        if not is_unseen():
            self._drawn_in.add(self.trainer.state.global_step)
        most = max(ENDS[0], drawn.shape[1] - width)  # longer completions, as in a whole run, are ended later
        for row, completion in enumerate(drawn[:, width:]):  # (tokens,)
            place, own = most * order[row % len(order)] // ENDS[0], (completion == end).nonzero()
            if len(own) and own[0] < place:  # short ones of one length end at several places too
                place = place * (int(own[0]) + 1) // (most + 1)
            if place < len(completion):
                completion[place], completion[place + 1 :] = end, end if pad is None else pad
        return output

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the policy for a step, where no other shows a penalty, or bounds of ratios.

        A rate of 1e-6 leaves it where it was. Not where the script's own function draws: it may have had its weights.
        """
        left = self._open.keys() & {"penalty", "bounds"}
        rows = [row for row in self._recorder.last_rows if row.completion]
        if not left or not rows or not self._reports("HELD") or self._maker[0]:
            return
        self.training.flat, self.training.moved = left == {"penalty"}, True
        model, random = self.trainer.model, torch.Generator().manual_seed(0)
        self._kept = [(weight, weight.detach().clone()) for weight in model.parameters() if weight.requires_grad]
        noises = [torch.randn(own.shape, generator=random, device="cpu").to(own) for _, own in self._kept]

        def score() -> torch.Tensor:
            scored = score_old(model, rows, 1.0, pad_id(self.trainer))
            return torch.cat([row.old_logps[: len(row.completion)] for row in scored if row.old_logps is not None])

        with torch.no_grad(), keep_random_state(), unseen():
            at_first = score()
            for factor in (2.0 ** (-power / 2) for power in range(-8, 17)):
                for (weight, own), noise in zip(self._kept, noises):
                    weight.copy_(own + factor * noise * own.square().mean().sqrt().clamp(min=_LEAST))
                if float((score() - at_first).abs().mean()) <= (_FAR if self.training.flat else _NEAR):
                    break

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare."""
        self._compare()

    def _compare(self) -> None:
        if not self._wanted(self.trainer.state.global_step + 1):
            return
        model = self.trainer.model
        affordable = next(model.parameters()).is_cuda or sum(p.numel() for p in model.parameters()) < _MOST
        try:
            with keep_random_state():
                evidence, searched = self._recorder.evidence(), affordable and not self.missing()
                compare = functools.partial(textbook.compare_step, self.trainer, evidence, with_controls=True)
                report = compare(with_suspects=searched)
        except Exception as error:  # of this check's own: the cut training goes on
            if raises_own(error):
                raise
            self._error = f"{type(error).__name__}: {first_line(error)}"
        else:
            self.reports.append(report)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the step, and put back what it had moved."""
        self._recorder.next_step()
        self.training.flat, kept, self._kept = False, self._kept, []
        self.training.moved = False
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(before)

    def answers(self) -> Iterator[Finding]:
        """Yield what the steps have shown."""
        if self._ledger is not None:
            yield from judge_ledger(self.training, self._ledger, *self._maker, self._where)
        reason = textbook.no_textbook(self.trainer)
        if reason is None and not self.reports:
            reason = self._error or "no optimizer step was reached whose gradient could be seen"
        if reason is not None:
            yield Finding.not_checked("F21", reason)
            return
        if texts := next((report.texts for report in self.reports if report.texts), ""):
            yield Finding(
                "F14",
                f"what your reward functions read is not what was drawn: {texts}",
                "Decode completions by the tokenizer's own decode; look into what is overridden or patched there.",
            )
        if wrong := self._reports("FOUND"):
            yield from self._found(wrong[0])
            return
        if self._where:
            self.training.notes.append(self._where.strip())
        held = self._reports("HELD")
        if not held:
            yield Finding.not_checked("F21", self.reports[0].reason)
            return
        yield self._held(held)
        if not _uses_liger(self.training):
            yield from self._held_too(held[0])

    @property
    def tells_rows(self) -> bool:
        """Whether what it says is of the rows of logits too (F3b)."""
        last = self.reports[-1] if self.reports else None
        return last is not None and (last.verdict == "HELD" or _FAILURES.get(last.named or "") == "F3b")

    def _found(self, report: textbook.Comparison) -> Iterator[Finding]:
        named, changed = report.named or "", bool(self._own or self.replaced)
        if changed and not named and not self._maker[0] and not self.missing():
            why = "the script changes the trainer, and no known mistake explains its gradient (see F21):"
            yield Finding.not_checked("F13", f"{why} the end of a completion may be left out of it")
            yield Finding.not_checked("F3b", f"{why} some tokens may be scored at other rows")
        why = _reshaped(report, self._own)
        if self.missing():
            why = f"tensors have no gradient: see F1 or F2, and ask again without that. {report.reason}"
        elif _uses_liger(self.training):
            why = f"Liger's loss is cut away; without it, {report.reason}"
        if why:
            yield Finding.not_checked("F21", why)
            return
        direction = report.apart and dataclasses.replace(report.apart, size=1.0)
        right = direction is not None and report.floor.holds(direction)
        # A size that Adam forgives is one where the direction is right, or wrong by the temperature alone.
        scaled = named in _SIZES and not changed and (right or "temperature" in report.line)
        failure, origin = _failure(named, changed, scaled)
        as_asked = report.temperature == getattr(self.trainer.args, "temperature", None)  # else something else draws
        origin = "" if failure == "F15" and not as_asked and not changed else origin
        forgives = self._cancels_size() and (scaled or (failure == "F15" and right))
        told = origin == RELEASE and (failure == "F15" or named == NO_MASK)  # what the registry says of a release
        why = _CANCELS if forgives else forgiven(failure) if told else ""
        said = f"{f'{named}: ' if named else ''}step {report.step}: {report.reason}{self._where}"
        said = f"{said.removesuffix('.')}; {why}" if why else said
        repair, undo = self._repair(failure, named)
        if self.replaced:  # what the script itself has put there is looked at first
            theirs = ", ".join(each.name for each in self.replaced)
            repair = f"Take out what the script puts in the place of {theirs}, or correct it."
        more: dict[str, Any] = {
            "origin": origin,
            "mild": bool(why),
            "figures": _figures(report),
            "place": self._place(),
        }
        if named == _ACCUMULATION and scaled and not why:
            why = "the release's own trainer adds batches up, and how much this optimizer minds is not known"
            yield Finding.suspected(failure, said, why, repair, undo=undo, **more)
        else:
            yield Finding(failure, said, repair, undo=undo, **more)

    @functools.cached_property
    def _own(self) -> list[OwnMethod]:
        return overridden(self.trainer)

    @functools.cached_property
    def replaced(self) -> list[Replaced]:
        """The library's functions that the script has put others in the place of."""
        return find_replaced(self.training.own, self.trainer, self.trainer.accelerator.unwrap_model(self.trainer.model))

    @property
    def _where(self) -> str:
        """What the script overrides and replaces, as sentences; "" where nothing."""
        names = ", ".join(map(str, self._own))
        theirs = ", ".join(map(str, self.replaced))
        put = f" In the place of the library's own the script puts {theirs}." if theirs else ""
        return (f" The script overrides {names}." if names else "") + put

    def _cancels_size(self) -> bool:
        """Return whether the optimizer divides a gradient by its own mean size, as Adam and its kin do."""
        optimizer = self.trainer.optimizer
        return "adam" in type(getattr(optimizer, "optimizer", optimizer)).__name__.lower()

    def _repair(self, failure: str, named: str) -> tuple[str, Repair | None]:
        """Return what to do, in words and as what undoes it."""
        if failure == "F15":
            options = getattr(self.trainer.args, "generation_kwargs", None) or {}
            drawn = float(options.get("temperature") or 1.0)
            moved = f"Give the config temperature={drawn:g} and take it out of generation_kwargs."
            return moved if "temperature" in options else _REPAIRS["F15"], Arguments({"temperature": drawn})
        if failure == "F20" and named == _OF_GENERATION:
            steps = self.training.arguments.get("gradient_accumulation_steps") or 1
            return _REPAIRS["F20"], Arguments({"steps_per_generation": steps})
        if failure == "F3b" and not self._own:  # else the versions may be innocent
            return _REPAIRS["F3b"], LOGITS_REPAIRED
        return _REPAIRS.get(named, _FLAT * (named == NO_GRADIENT) + _OTHERWISE), None

    def _place(self) -> Location | None:
        """Return the line of the first method of the script's own that is in the place of the library's."""
        source = self.training.source
        if not self._own or source is None:
            return None
        code = vars(self._own[0].kind)[self._own[0].name].__code__
        return location(code.co_filename, code.co_firstlineno, source.text if code.co_filename == source.path else "")

    def _held(self, reports: Sequence[textbook.Comparison]) -> Finding:
        first, last = reports[0], reports[-1]
        evidence = f"step {' and '.join(str(report.step) for report in reports)}: {last.reason}"
        of_each = [{line.partition(":")[0].partition(" (")[0] for line in report.not_shown} for report in reports]
        if hidden := sorted(set.intersection(*of_each)):
            evidence += f". This does not show: {', '.join(hidden)}"
        if self._pads is False and not any(report.figures["prompts_padded"] for report in reports):
            evidence += "; no prompt is padded in this run: all have one length, or come alone"
        steps = self.trainer.state.global_step
        if len(self._drawn_in) == 1 and steps > 2 and not self._uses_again():
            why = f"completions are drawn in step {min(self._drawn_in) + 1} alone, and all {steps} steps train on them"
            return Finding.not_checked("F21", f"{why}, as if the policy of each had drawn them; {evidence}")
        if cut := cut_away(self.training):
            return Finding.not_checked("F21", f"{'; '.join(cut)}; without it, {evidence}")
        if missing := self._open:
            told = "; ".join(f"{name}: {why}" for name, why in missing.items())
            return Finding.not_checked("F21", f"{evidence}. Not shown: {told}")
        blind = [name for name in _CONTROLS if not first.sees(name)]
        if blind:
            return Finding.not_checked("F21", f"{evidence}; with {' or '.join(blind)} planted it looks the same")
        planted = [f"{name}: {apart}" for name, apart in first.controls.items() if first.sees(name)]
        return Finding.held("F21", evidence, "; ".join(planted), figures=_figures(first))

    def _held_too(self, report: textbook.Comparison) -> Iterator[Finding]:
        """Yield the failures that are not there, each with its own mistake planted."""
        evidence = f"the gradient of step {report.step} is the textbook's: see F21"
        for failure, name in _PLANTED.items():
            if failure == "F15" and report.temperature is None:
                yield Finding.not_checked("F15", f"{evidence}; at which temperature tokens are drawn was not seen")
            elif report.sees(name):
                yield Finding.held(failure, evidence, f"{name}: {report.controls[name]}")
        args = self.trainer.args
        accumulated = args.gradient_accumulation_steps
        scaled = textbook.Apart(1.0, accumulated / (getattr(args, "steps_per_generation", None) or accumulated), 0.0)
        controls = {"the loss scaled by the way that the batch is cut": report.floor.figures(scaled)}
        figures = report.figures | {"step_size_cut": abs(scaled.size - 1)}
        if settled := settle("F20", [figures], controls, evidence):
            yield settled


def _failure(named: str, changed: bool, scaled: bool) -> tuple[str, str]:
    """Return the failure that a named mistake is, and what makes it, where that is known.

    F20 is the libraries' own in some releases, and F21 elsewhere.

    Args:
        named: the mistake.
        changed: whether the script changes the trainer, so that the mistake may be its own.
        scaled: whether a trainer that is not changed is right but for a constant factor, and the temperature.
    """
    adds = named == _ACCUMULATION and scaled
    known = of_release("F20") if adds or named == _OF_GENERATION else []
    known = [stack for stack in known if not adds or "transformers" in stack.versions]
    failure = "F20" if known else _FAILURES.get(named, "F21")
    if failure in ("F3b", "F15") or named == NO_MASK:  # what the registry says of other mistakes is said of scripts
        known = [stack for stack in of_release(failure) if stack.forgiven or not stack.only_own_code]
    return failure, SCRIPT if changed else RELEASE if adds or known else ""


def _figures(report: textbook.Comparison) -> tuple[Quantity, ...]:
    apart = report.apart
    return (Quantity("step_cosine", apart.cosine), Quantity("step_size", apart.size, "ratio")) if apart else ()


def cut_away(training: Training) -> list[str]:
    """Return why the cut training is not the script's own as to its gradient: a text for each option."""
    lines = [
        f"{name} is cut away, and each process trains the whole model: the gradient is not that of the engine"
        for name in ENGINES
        if (training.arguments.get(name) or (name == "deepspeed" and training.zero_stage))
        and not getattr(training.trainer.args, name, None)
    ]
    given, args = training.arguments, training.trainer.args
    cut = [name for name in CUT_AWAY if given.get(name) and not getattr(args, name, None)]
    return lines + [f"{name} is cut away, and with it the gradient may be another one" for name in cut]


def _uses_liger(training: Training) -> bool:
    return bool(training.arguments.get("use_liger_loss") or training.arguments.get("use_liger_kernel"))


def _reshaped(report: textbook.Comparison, own: Sequence[OwnMethod]) -> str:
    """Return what the script makes of the trainer's advantages, where that may be meant; "" where it is not so.

    Its own method makes them, as bounds and scaled penalties do, the gradient is the definition's with the new
    advantages, and their sign has stayed. A mistake in rows (another group's, another process's, a wrong sign) changes
    that.
    """
    makers = [str(method) for method in own if method.name in _MAKE_ADVANTAGES]
    least = _LEFT_OVER * max((abs(each.given) for each in report.weights), default=0.0)
    turned = (
        abs(each.given) > least > math.copysign(each.expected, each.expected * each.given) for each in report.weights
    )
    if not makers or report.named or not least or any(turned):
        return ""
    most = max(report.weights, key=lambda weight: abs(weight.given - weight.expected))
    return (
        f"{makers[0]} gives rows other advantages than the trainer's ({most.name}: {most.expected:+.2f} -> "
        f"{most.given:+.2f}) and keeps their sign; with them the gradient is the textbook's. Is that meant?"
    )
