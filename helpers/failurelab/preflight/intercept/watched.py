"""A cut training run, watched by the guards: gradients (F1, F2), rollouts (F7), logits (F3a, F3b), adapters (F8).

The rewards of a small random model are all alike, and equal rewards leave no gradient to look at. So the script's own
reward functions are called, and what the trainer gets are rewards that differ.
"""

import contextlib
import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch

from failurelab import _greedy, failures, gradients, guards, logits
from failurelab._text import list_names
from failurelab._unwrap import has_adapter
from failurelab.failures import loader
from failurelab.handles import is_unseen, wrap_method
from failurelab.preflight import temperature
from failurelab.preflight.answers import Answer, Finding, Held, NotApplicable, NotChecked
from failurelab.preflight.inputs import Seen
from failurelab.preflight.intercept import controls, cuts, small
from failurelab.preflight.intercept.cuts import NEW_TOKENS
from failurelab.preflight.repairs import Keyword, Statement

_WORKS = 1e-3  # of a logit: a new adapter changes it by less, and where its norms are computed (DoRA), not by 0
_LOGITS_REPAIRED = Statement(
    "for each in filter(None, ({trainer}.model, getattr({trainer}, 'ref_model', None))): logits.repair(each)",
    imports="from failurelab import logits",
)


class Watch:
    """What the guards see of a training run, and the answers that follow from it."""

    def __init__(self, seen: Seen, adapters: list[small.Trained]):
        self.seen, self.adapters = seen, adapters
        self.trainer = seen.trainer
        self._gradients = guards.GradientGuard(self._notice)
        self._rollouts = guards.RolloutGuard(
            self._notice,
            prompts=_prompts_of_a_batch(seen),
            max_new_tokens=NEW_TOKENS,
            tokenizer=_tokenizer(seen),
        )
        self._logits = guards.LogitsGuard(self._notice)
        self._reports: dict[str, Any] = {}
        self._failed: dict[str, str] = {}
        self._kinds: set[str] = set()  # of checkpointing, in the passes that were judged
        self._asked: tuple[str, int, int] | None = None  # rows of logits: the argument's name, its number, those made
        self._ids: torch.Tensor | None = None  # (batch, tokens) of a training pass
        self._generated: set[bool] = set()  # in train mode, in eval mode
        self.finished = False
        self._model = "the cut model" if seen.small else "the model"
        self._replaced = self._find_replaced()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the guards listen to the trainer, and its reward functions give rewards that differ."""
        trainer = self.trainer
        for guard in (self._gradients, self._rollouts, self._logits):
            trainer.add_callback(guard)
        with contextlib.ExitStack() as stack:
            # before hooks of the script, which may divide the logits as a trainer would
            stack.enter_context(trainer.model.register_forward_hook(self._read_forward, with_kwargs=True, prepend=True))
            if callable(getattr(trainer.model, "generate", None)):
                stack.enter_context(wrap_method(trainer.model, "generate", self._around_generate, "watched"))
            functions = getattr(trainer, "reward_funcs", None)
            if isinstance(functions, list):
                own = list(functions)
                stack.callback(functions.__setitem__, slice(None), own)
                functions[:] = [self._stand_in(each, number) for number, each in enumerate(own)]
                for number, each in enumerate(own):
                    if isinstance(each, torch.nn.Module):
                        stack.enter_context(each.register_forward_hook(functools.partial(self._vary, number)))
            yield

    def _notice(self, notice: guards.Notice) -> None:
        if notice.kind == "found" and not getattr(notice.report, "not_optimized", ()):  # F23: _judge_optimizer's
            self._reports[notice.guard] = notice.report
        elif notice.kind == "not checked":
            self._failed.setdefault(notice.guard, notice.message)

    def explains_gradient(self) -> bool:
        """Whether a guard has found by now why the gradient is wrong."""
        return not self._reports.keys().isdisjoint(("GradientGuard", "LogitsGuard"))

    def _around_generate(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        model = generate.__self__
        self._generated.add(model.training)
        config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
        if self.seen.drawn_at is None and kwargs.get("do_sample", getattr(config, "do_sample", False)):
            self.seen.drawn_at = kwargs.get("temperature", getattr(config, "temperature", None))
        return generate(*args, **kwargs)

    def _read_forward(self, model: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if is_unseen() or not torch.is_grad_enabled():
            return
        self._kinds |= {kind for kind, _ in gradients.checkpointed(model)}
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._ids = ids if isinstance(ids, torch.Tensor) and ids.dim() == 2 else self._ids
        rows = getattr(output, "logits", None)
        if not isinstance(rows, torch.Tensor) or rows.dim() != 3:
            return
        for name in logits.NAMES:
            wanted = kwargs.get(name)
            if isinstance(wanted, int) and wanted:
                self._asked = name, wanted, rows.shape[1]
        if rows.requires_grad and self.seen.scored_at is None:
            kept = rows.detach().clone()  # which the trainer may divide in place
            rows.register_hook(lambda gradient: self._read_gradient(kept, gradient))

    def _read_gradient(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Read the temperature of the scores; both are (batch, rows, vocabulary)."""
        if self.seen.scored_at is None and gradient.shape == rows.shape:
            self.seen.scored_at = temperature.read_temperature(rows, gradient)
            if self.seen.scored_at is not None:
                self.seen.scored_planted = temperature.plant_temperature(rows)

    def _stand_in(self, function: Any, number: int) -> Any:
        """Return a reward function that notes what it is handed, and gives rewards that differ.

        The script's own is asked afterwards, in a process of its own (`failurelab.rewards.asking`).
        """
        if isinstance(function, torch.nn.Module) or not callable(function):
            return function

        def stand_in(**kwargs: Any) -> list[float]:
            self.seen.called.add(number)
            if self.seen.handed is None:
                self.seen.handed = dict(kwargs)
            return substitute_rewards(len(kwargs["completions"]), self._generations, number)

        stand_in.__name__ = getattr(function, "__name__", type(function).__name__)
        return stand_in

    def _vary(self, number: int, module: torch.nn.Module, args: tuple, output: Any) -> Any:
        """Let a reward model, which is small and random, give rewards that differ: logits (completions, 1)."""
        if isinstance(getattr(output, "logits", None), torch.Tensor):
            values = substitute_rewards(len(output.logits), self._generations, number)
            output.logits = output.logits.new_tensor(values)[:, None].expand_as(output.logits)
        return output

    @property
    def _generations(self) -> int:
        return int(getattr(self.trainer, "num_generations", 0) or 2)

    def answers(self) -> Iterator[Answer]:
        """Yield what the guards saw, after training, or after the error that ended it."""
        yield self._judge_optimizer()
        yield from self._judge_gradients()
        yield self._judge_rollouts()
        yield from self._judge_logits()
        yield self._replaced

    def _judge_optimizer(self) -> Answer:
        """F23: tensors that are trained, against those that the optimizer holds."""
        model, optimizer = self.trainer.model, getattr(self.trainer, "optimizer", None)
        if optimizer is None:
            return NotChecked("F23", "training ended before there was an optimizer")
        groups = [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]
        kept = set().union(*groups)
        named = list(model.named_parameters()) if has_adapter(model) else []
        adapters = [id(parameter) for name, parameter in named if _is_adapter(name, model)]  # none of a learned prompt
        wanted = adapters or [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
        count, what = len(kept.intersection(wanted)), "tensors of the adapters" if adapters else "trainable tensors"
        evidence = f"the optimizer holds {count} of {len(wanted)} {what}"
        if not count:
            evidence += ": no step changes the model"
            repair = "Make the optimizer of the parameters that the trainer's model has when training begins."
            undo = Keyword("trainer", "optimizers") if "optimizers" in self.seen.given else None
            if self.adapters and not self.adapters[-1].trainable:
                evidence += f"; {self.adapters[-1].name} was loaded without is_trainable=True"
                repair = "PeftModel.from_pretrained(model, adapter, is_trainable=True)"
                undo = Keyword("adapter", "is_trainable", "True")
            return Finding("F23", evidence, repair, undo=undo)
        largest = max(groups, key=len)
        fewer = len(kept.difference(largest).intersection(wanted))
        return Held("F23", evidence, f"without its largest group it would hold {fewer}")

    def _judge_gradients(self) -> Iterator[Answer]:
        report = self._reports.get("GradientGuard", self._gradients.report)
        adapted = has_adapter(self.trainer.model)
        own, other = ("F2", "F1") if adapted else ("F1", "F2")
        yield NotApplicable(other, "the model has adapters: see F2" if adapted else "no adapters")
        if report is None:
            why = self._failed.get("GradientGuard", "no optimizer step was reached whose gradients could be seen")
            yield NotChecked(own, why)
            return
        missing, total = len(report.without_gradient), len(report.trainable)
        if not total:
            yield NotChecked(own, "nothing requires a gradient when training begins: see F23")
        elif not missing:
            evidence = f"all {total} trainable tensors of {self._model} get a gradient"
            if cut_off := controls.count_cut_off(self.trainer.model):
                yield Held(own, evidence, f"with a module cut off from the loss, {cut_off} get none")
            else:
                yield NotChecked(own, f"{evidence}; with a module cut off from the loss it looks the same")
        elif "reentrant" in self._kinds:
            ends = '; the first backward pass ends in "element 0 of tensors does not require grad"'
            yield Finding(
                own,
                f"{missing} of {total} trainable tensors of {self._model} get no gradient in the first step "
                f"({list_names(report.without_gradient)}): reentrant gradient checkpointing cuts layers off whose "
                f"input needs none{ends * (missing == total)}",
                "trainer.model.enable_input_require_grads() before training",
                undo=Statement("{trainer}.model.enable_input_require_grads()"),
            )
        else:
            yield NotChecked(
                own,
                f"{missing} of {total} trainable tensors get no gradient ({list_names(report.without_gradient)}), and "
                "checkpointing is not the cause: this batch may not use them",
            )

    def _judge_rollouts(self) -> Answer:
        for option in ("use_vllm", "use_transformers_continuous_batching", "use_transformers_paged"):
            if self.seen.asked.get(option):
                why = f"with {option} the trainer does not call model.generate, whose cache goes wrong"
                return NotApplicable("F7", why)
        report = self._reports.get("RolloutGuard", self._rollouts.report)
        if report is None:
            if "RolloutGuard" in self._failed:
                return NotChecked("F7", self._failed["RolloutGuard"])
            if True in self._generated:
                why = "tokens are generated in train mode, and there is no tokenizer to judge them by"
                return NotChecked("F7", why)
            if self._generated:
                return NotApplicable("F7", "the trainer generates in eval mode, where nothing goes wrong")
            if not self.finished or getattr(self.trainer, "reward_funcs", None):
                return NotChecked("F7", "training ended before the trainer generated anything")
            return NotApplicable("F7", "this trainer generates nothing")
        if report.agrees:
            evidence = f"tokens are drawn from the policy: {report.error:.1e} nats of difference at most"
            planted = controls.error_without_context(
                self.trainer.model, _tokenizer(self.seen), [rollout.prompt for rollout in report.rollouts], NEW_TOKENS
            )
            if planted <= report.rounding:
                why = f"{evidence}; predicted from the last token alone they differ by {planted:.1e} only"
                return NotChecked("F7", why)
            return Held("F7", evidence, f"predicted from the last token alone they would differ by {planted:.2f}")
        return Finding(
            "F7",
            f"the completions that the trainer generates are not the policy's: log-probabilities are off by "
            f"{report.mean_error:.2f} nats a token, {report.error:.2f} at most, where rounding gives "
            f"{report.rounding:g} (gradient checkpointing {report.checkpointing}, "
            f"use_cache={report.use_cache}; figures of {self._model})",
            "trainer.generation_config.use_cache = False before training",
            undo=Statement("{trainer}.generation_config.use_cache = False")
            if "generation_config" in vars(self.trainer)
            else None,
        )

    def _judge_logits(self) -> Iterator[Answer]:
        report = self._reports.get("LogitsGuard", self._logits.report)
        name, asked, made = self._asked or ("", 0, 0)
        if report is not None and (report.probe or (report.scored and report.shift != 0)):
            shift = report.shift
            token = "tokens that do not come next" if shift is None else f"the token {shift + 1} further on"
            scored = f"{report.scored} rows of logits are scored against {token}, not against the next one"
            scored += f"; the trainer asks for rows by {name}, which this model swallows" if made > asked else ""
            yield Finding(
                "F3b",
                f"{report.probe or scored}. Nothing is raised",
                "failurelab.logits.repair(model) before the trainer is made; or trl 0.15 and later",
                undo=_LOGITS_REPAIRED,
            )
            return
        if made > asked:
            prompt, kept = (self.seen.asked.get(each) or 0 for each in ("max_prompt_length", "max_completion_length"))
            full = f"; at full size {(prompt + kept) / kept:.1f} times the memory of logits" if prompt and kept else ""
            yield Finding(
                "F3a",
                f"the trainer asks for {asked} rows of logits by {name}, and the model, which swallows that name, "
                f"makes {made}{full}",
                _versions_that_fit("F3a")
                or f"versions that fit: this model takes {logits.keep_argument(self.trainer.model) or 'no argument'}",
                undo=_LOGITS_REPAIRED,
            )
        elif asked:
            evidence = f"{asked} rows of logits are asked for by {name}, and {made} are made"
            every = controls.count_all_rows(self.trainer.model, self._ids) if self._ids is not None else 0
            if every > asked:
                yield Held("F3a", evidence, f"unasked, the model makes {every}")
            else:
                yield NotChecked("F3a", f"{evidence}; unasked, the model makes no more for this batch")
        elif report is not None:
            yield NotApplicable("F3a", "no rows are asked for by a name that this model swallows")
        else:
            yield NotChecked("F3a", "no training pass was seen")
        if report is None:
            yield NotChecked("F3b", self._failed.get("LogitsGuard", "no gradient of the logits could be read"))
        elif report.scored:
            evidence = f"{report.scored} rows of logits are scored against the token that comes next"
            if self._ids is not None and controls.sees_shifted_scores(self.trainer.model, self._ids):
                yield Held("F3b", evidence, "scored against the one after that, they are seen to be off")
            else:
                yield NotChecked("F3b", f"{evidence}; scored against the one after that, this batch looks the same")
        elif report.made:
            yield NotChecked("F3b", "the loss is no score of single tokens, so no row says for which token it is")
        else:
            yield Held(
                "F3b",
                "the known-answer probe gets the log-probabilities of the completion's tokens",
                f"the nearest known mistake is {report.contrast:.2f} nats away",
            )

    def _find_replaced(self) -> Answer:
        """Compare what the trainer's model says with what it said with its trained adapter."""
        if not self.adapters:
            return NotApplicable("F8", "no trained adapter is loaded")
        trained = self.adapters[-1]
        try:
            now = small.probe(self.trainer.model)
        except Exception as error:
            return NotChecked("F8", f"the model could not be asked: {type(error).__name__}: {error}")
        effect = (trained.logits - trained.base).abs().max().item()
        kept = (now - trained.logits).abs().max().item()
        lost = (now - trained.base).abs().max().item()
        if effect < _WORKS:
            return NotChecked("F8", f"the adapter {trained.name} changes a logit by {effect:.1g} at most, as a new one")
        if min(kept, lost) > 0.1 * effect:
            why = f"the model that is trained is another one than that with the adapter {trained.name}"
            return NotChecked("F8", why)
        if kept <= lost:
            evidence = f"the adapter {trained.name} is at work when training begins"
            return Held("F8", evidence, f"without it a logit would be {effect:.2g} away")
        return Finding(
            "F8",
            f"the trained adapter {trained.name} is replaced by a new one that begins at zero: when training begins, "
            f"logits are the base model's within {lost:.1e}, and {kept:.2f} away from the adapter's",
            "no peft_config for a model that has its adapter",
            undo=Keyword("trainer", "peft_config"),
        )


def substitute_rewards(count: int, generations: int, function: int) -> list[float]:
    """Return rewards that differ by row, by group and by reward function, for up to eight functions.

    In no group do they read backwards as they do with the other sign: two mistakes would look alike then.
    """
    places = [divmod(index, generations) for index in range(count)]  # group, row of the group
    return [((3 + 7 * function) * row**2 + 7 * function + 5 * group) % 11 / 8 + group / 16 for group, row in places]


def _prompts_of_a_batch(seen: Seen) -> list[Any] | None:
    """Return the shortest prompt and the longest that fits the model: in one batch, one of them is padded.

    Of a trainer that generates for one prompt at a time, the longest alone.
    """
    trainer = seen.trainer
    dataset = trainer.train_dataset
    if "prompt" not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "__len__"):
        return None
    prompts = sorted((row["prompt"] for row in dataset), key=lambda prompt: len(str(prompt)))
    plain = all(isinstance(prompt, str) or _is_text(prompt) for prompt in prompts)
    if not plain or not prompts or not prompts[0]:
        return None
    tokenizer = _tokenizer(seen)
    while tokenizer is not None and len(prompts) > 1 and not _fits(trainer.model, tokenizer, prompts[-1]):
        prompts.pop()
    return [prompts[-1]] if cuts.generates_for_one(trainer.args) else [prompts[0], prompts[-1]]


def _fits(model: Any, tokenizer: Any, prompt: Any) -> bool:
    """Whether a prompt leaves room for new tokens in the model's context."""
    with contextlib.suppress(ValueError):
        _greedy.encode(model, tokenizer, [prompt], NEW_TOKENS)
        return True
    return False


def _versions_that_fit(failure: str) -> str:
    """Return the upgrades that end a failure with the versions here; empty where the registry knows none."""
    installed = {}
    for package in loader.PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    upgrades = failures.upgrades(failures.get(failure), installed)
    return f"versions that fit: {'; or '.join(upgrades)}" if upgrades else ""


def _tokenizer(seen: Seen) -> Any:
    """Return the trainer's tokenizer, or, for a trainer that was given none, that of the model it loaded last."""
    tokenizer = getattr(seen.trainer, "processing_class", None)
    if tokenizer is None and seen.loads:
        from transformers import AutoTokenizer

        with contextlib.suppress(Exception):  # then nothing is judged by it, and the answer says so
            return AutoTokenizer.from_pretrained(seen.loads[-1].name)
    return tokenizer


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(turn.get("content"), str) for turn in prompt)


def _is_adapter(name: str, model: Any) -> bool:
    """Whether a tensor is of the adapter in use: a low-rank matrix, or a module that is trained as a whole."""
    active = getattr(model, "active_adapter", None)
    return ("lora_" in name or "modules_to_save" in name) and (
        not isinstance(active, str) or f".{active}" in name or "lora_" not in name
    )
