"""A guard for rollouts of another policy: an engine that is stale, rounds otherwise, or scores other tokens.

    trainer.add_callback(guards.EngineMismatchGuard(trainer))

It reads the engine's log-probabilities from the trainer's own batch, scores the same tokens with the policy, and
compares (see `failurelab.mismatch`). Where they differ too much it undoes one suspect after another (older weights,
another temperature, rounded weights, tokens moved by one) and names the one whose undoing takes the gap away.

Under `use_vllm` trl logs the mean gap itself. Where nothing can be scored beside the trainer (ZeRO-3), that is read.

A trainer that generates with its own model has no second engine. There the guard reads from the gradient of the logits
at which temperature the tokens were scored, and compares it with the temperature of the sampling. Online DPO's loss is
no policy gradient, and its scores are right at temperature 1.

Upstream: TRL #3029, #4159, #2698, #5312, #5814, #5224.
"""

import collections
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from failurelab import mismatch, plants, zero3
from failurelab.failures import verdicts
from failurelab.guards.base import Action, Guard
from failurelab.handles import eval_mode, wrap_method
from failurelab.logits import completion_logps
from failurelab.measure.scores import scoring_temperature

NEXT = {
    "stale": "send the weights to the engine after every optimizer step, adapters merged into them, and empty its "
    "prefix cache; under use_vllm trl sends them: look whether something reloads them afterwards (trl 0.28 to 1.9 with "
    "sleep mode)",
    "temperature": "score at the temperature of the sampling (trl 0.16 and later do), and let the engine give its "
    "log-probabilities after the temperature (vLLM: logprobs_mode='processed_logprobs')",
    "dtype": "run the engine in the dtype that is trained, or give each token a weight of its own "
    "(vllm_importance_sampling_mode='token_truncate')",
    "tokens": "train on the ids that the engine drew, without decoding and encoding them again, and look whether its "
    "log-probabilities begin at the completion's first token",
    "unknown": "compare one prompt by hand: the same ids through the engine and through the trainer's model",
}
_FAILURES = {"stale": ("F16",), "temperature": ("F15",), "dtype": ("F16", "F17"), "tokens": ("F18",)}
_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
_ROWS = 32  # completions of a batch that are compared
_SEQUENCES = 4  # whose logits are kept until the gradient is there
_PASSES = 8  # whose gradients are read, until one shows the temperature
_LEFT = 1 / 3  # of the gap, at most, where undoing a suspect explains it
_ROUNDED = 3.0  # times what rounding the policy's own weights does: the gap is of that size


@dataclasses.dataclass(frozen=True)
class EngineMismatchReport:
    """What the comparisons gave, until the guard tripped or training ended.

    Attributes:
        gaps: step and `mismatch.Gap` of each batch that was compared.
        looks_like: `stale`, `temperature`, `dtype`, `tokens` or `unknown` where the two are not one policy, else empty.
        undone: suspect to mean gap that is left, in nats a token, when it is undone.
        logged: what the run's log says of the gap, where nothing could be compared; else None.
    """

    gaps: tuple[tuple[int, mismatch.Gap], ...] = ()
    looks_like: str = ""
    undone: dict[str, float] = dataclasses.field(default_factory=dict)
    logged: mismatch.LoggedGap | None = None


class EngineMismatchGuard(Guard):
    """Warn or stop when the engine that generates is not the policy that is trained; each kind once in a run.

    A mean gap above `mismatch.LARGEST_MEAN` is told. So is a smaller one that has grown to three times the first
    batch's, if older weights take it away (and `history` is not 0).

    `report`, an `EngineMismatchReport`, is there from the start of training. With ZeRO-3 nothing is compared: what
    trl logs is read.

    Args:
        trainer: the trainer that it is added to; callbacks are not given it.
        action: `warn` issues a GuardWarning, `stop` raises GuardTripped before anything is trained on the batch.
        history: copies of the trainable weights that are kept in main memory, besides those of the start, to find out
            how old a stale engine is; 0 keeps none.
    """

    failures = ("F15", "F16", "F17", "F18")

    def __init__(
        self,
        trainer: Any,
        action: Action = "warn",
        *,
        history: int = 2,
    ):
        super().__init__(action)
        self.history = history
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self._forget(None)

    def _forget(self, model: nn.Module | None) -> None:
        self._batches = 0
        self._said: set[str] = set()
        self._pairs = False  # whether the loss compares pairs
        self._read: float | None = None
        self._hidden = False
        self._places: list[verdicts.Figures] = []
        self._controls: dict[str, verdicts.Figures] = {}
        self._unread = 0  # passes whose gradient is not that of scores
        self._start = _weights(model) if model is not None and self.history else {}
        self._older: collections.deque[tuple[int, dict[str, torch.Tensor]]] = collections.deque(maxlen=self.history)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start to listen to the trainer's rollouts."""
        self._stop()
        self.report = EngineMismatchReport()
        trainer = self._trainer()
        self._temperature = float(getattr(args, "temperature", None) or 1.0)
        if zero3.partitioned(model):
            self._forget(None)
            if not getattr(args, "use_vllm", False):
                self._could_not_check("with ZeRO-3 the policy cannot be scored beside the trainer")
            return
        self._forget(model)
        if callable(getattr(trainer, "_generate_and_score_completions", None)):

            def around(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                batch = generate(*args, **kwargs)
                self._check(self._judge, batch)
                return batch

            what = "rollouts are compared by EngineMismatchGuard"
            self._listening.enter_context(wrap_method(trainer, "_generate_and_score_completions", around, what))
        self._pairs = mismatch.compares_pairs(vars(args))
        if not self._pairs:
            hook = model.register_forward_hook(lambda _, *called: self._check(self._listen_to_scores, *called))
            self._listening.callback(hook.remove)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the gap that trl logs, where none was compared here."""
        gap = None if self.report.gaps else mismatch.read_log(state.log_history)
        if gap is None or "gap" in self._said:
            return
        self.report = dataclasses.replace(self.report, logged=gap)
        if self._finds("F16", {"policy_gap": gap.last}):
            cause = gap.looks_like or "unknown"
            self.report = dataclasses.replace(self.report, looks_like=cause)
            self._say(
                "gap",
                f"the engine that generates is not the policy that is trained: {gap}. It looks like {cause}. "
                f"Next: {NEXT[cause]}",
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening."""
        if not self.report.looks_like and "answer" not in self._said:
            if self.report.logged:
                self._conclude(str(self.report.logged), [{"policy_gap": self.report.logged.last}], {}, ("F16",))
            elif self.report.gaps:
                message = f"compared {len(self.report.gaps)} batches: {self.report.gaps[-1][1]}"
                self._conclude(message, self._places, self._controls, ("F16",))
            elif self._pairs:
                self._nothing_to_check("no second engine, and a loss of pairs, whose scores are right at temperature 1")
            elif self._read is None and self._unread and self._sampled() != 1:
                self._could_not_check(
                    f"tokens are drawn at temperature {self._sampled():g}. At which they are scored cannot be read: "
                    "the gradient of the logits is not that of scores alone, as under an entropy bonus"
                )
            elif self._read is not None:
                message = f"no second engine, and tokens are scored at the sampling's temperature, {self._read:.2f}"
                figures = mismatch.temperature_figures(self._read, self._sampled())
                self._conclude(message, [figures], self._controls, ("F15",))
            elif not getattr(args, "use_vllm", False):
                self._nothing_to_check("the trainer generates by itself: there is no second engine to compare with")
        super().on_train_end(args, state, control)

    def _judge(self, batch: dict[str, Any]) -> None:
        """Compare one batch of rollouts."""
        engine = batch.get("sampling_per_token_logps")
        trainer = self._trainer()
        if engine is None:
            if getattr(trainer.args, "use_vllm", False) or getattr(trainer, "rollout_func", None):
                self._cannot_compare("the engine gives no log-probabilities, or this version of trl asks for none")
            return
        number, self._batches = self._batches, self._batches + 1
        batch = {
            name: value[:_ROWS] for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()
        }
        engine, mask = batch["sampling_per_token_logps"], batch["completion_mask"]
        if "tool_mask" in batch:
            mask = mask * batch["tool_mask"]
        step = int(trainer.state.global_step)
        policy = self._score(batch, self._temperature)
        try:
            gap = mismatch.compare(policy, engine, mask)
        except mismatch.EngineAnswerError as error:
            self._cannot_compare(str(error))
            return
        self.report = dataclasses.replace(self.report, gaps=(*self.report.gaps, (step, gap)))
        off = bool(self._finds("F16", gap.figures) or self._finds("F17", gap.figures))
        if not off and _LEFT * gap.mean > self.report.gaps[0][1].mean and self._start:
            # adapters and small rates move the policy slowly: below the bound only old weights can explain the growth
            off = min(self._with_older(batch, engine, mask)) <= _LEFT * gap.mean
        if off and "gap" not in self._said:
            undone, cause = self._undo(batch, policy, engine, mask, gap)
            self.report = dataclasses.replace(self.report, undone=undone, looks_like=cause)
            self._say("gap", self._describe(gap))
        if not number & (number - 1):  # the first batch, and then ever fewer
            self._plant(batch, policy, mask, gap)
        if self.history and "gap" not in self._said:
            self._older.append((step, _weights(trainer.model)))

    def _plant(self, batch: Any, policy: torch.Tensor, mask: torch.Tensor, gap: mismatch.Gap) -> None:
        """Score the batch with the weights of the start, as an engine that got no others would."""
        counts = mask.bool()

        def score() -> torch.Tensor:
            return self._score(batch, self._temperature)[counts]

        if self._start:
            planted = plants.first_weights(self._trainer().model, self._start, score, policy[counts])
            self._places.append(gap.figures | {"policy_moved": planted["policy_gap"]})
            self._controls["the first weights"] = planted

    def _describe(self, gap: mismatch.Gap) -> str:
        (first, then), (step, _) = self.report.gaps[0], self.report.gaps[-1]
        drift = f" (step {first}: {then.mean:.3g}, step {step}: {gap.mean:.3g})" if step > first else ""
        left = ", ".join(f"{suspect} {value:.2g}" for suspect, value in self.report.undone.items())
        cause = self.report.looks_like
        return (
            f"the engine that generates is not the policy that is trained: {gap}{drift}. It looks like {cause}; mean "
            f"gap left when undone: {left}. Next: {NEXT[cause]}"
        )

    def _undo(self, batch: Any, policy: Any, engine: Any, mask: Any, gap: mismatch.Gap) -> tuple[dict[str, float], str]:
        """Undo each suspect by itself; return the mean gaps that are left, and the suspect that explains the gap."""
        model, counts = self._trainer().model, mask.bool()

        def left(scores: torch.Tensor) -> float:
            return float((scores - engine).abs()[counts].mean())

        temperatures = {other: left(self._score(batch, other)) for other in _TEMPERATURES if other != self._temperature}
        undone = {"temperature": min(temperatures.values())}
        if self._start:
            undone["stale"] = min(self._with_older(batch, engine, mask))
        with mismatch.other_weights(
            model, {name: w.bfloat16().to(w.dtype) for name, w in _weights(model, False).items()}
        ):
            rounded = self._score(batch, self._temperature)
        undone["dtype"] = left(rounded)
        noise = float((rounded - policy).abs()[counts].mean())
        both = counts[:, 1:] & counts[:, :-1]
        if both.any():
            pairs = (policy[:, 1:] - engine[:, :-1], policy[:, :-1] - engine[:, 1:])
            undone["tokens"] = min(float(pair.abs()[both].mean()) for pair in pairs)
        cause = min(undone, key=undone.__getitem__)
        if undone[cause] <= _LEFT * gap.mean:
            return undone, cause
        if gap.mean <= _ROUNDED * noise:
            return undone, "dtype"
        # a completion agrees up to its first other token, and no further: its text was encoded again
        agrees = ((policy - engine).abs() <= max(1e-3, 10 * noise)) | ~counts
        before = agrees.long().cumprod(-1).bool() & counts
        if before.sum() >= counts.sum() / 4:
            undone["tokens"] = float((policy - engine).abs()[before].mean())
            return undone, "tokens"
        grew = self.report.gaps[0][1].mean < gap.mean / 2
        return undone, "stale" if grew else "unknown"

    def _with_older(self, batch: Any, engine: Any, mask: Any) -> list[float]:
        """Return the mean gap that each set of older weights leaves."""
        gaps = []
        for weights in (self._start, *(weights for _, weights in self._older)):
            with mismatch.other_weights(self._trainer().model, weights):
                scores = self._score(batch, self._temperature)
            gaps.append(float((scores - engine).abs()[mask.bool()].mean()))
        return gaps

    @torch.no_grad()
    def _score(self, batch: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
        """Return the policy's log-probabilities of the batch's completions, (rows, tokens)."""
        trainer = self._trainer()
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        length, size = batch["completion_ids"].shape[1], max(1, trainer.args.per_device_train_batch_size)
        with torch.random.fork_rng(), eval_mode(trainer.model):
            parts = [
                completion_logps(trainer.model, some, those, length, temperature)
                for some, those in zip(ids.split(size), mask.split(size))
            ]
        return torch.cat(parts).float()

    def _listen_to_scores(self, args: tuple[Any, ...], output: Any) -> None:
        """Where the model gives logits, read from their gradient at which temperature tokens are scored."""
        logits = getattr(output, "logits", None)
        if torch.is_grad_enabled() and isinstance(getattr(output, "log_probs", None), torch.Tensor):
            self._hidden = True  # the trainer scores by a head that gives no logits; those of other passes are others'
        if self._read is not None or self._unread >= _PASSES:
            return
        if not torch.is_grad_enabled() or not isinstance(logits, torch.Tensor):
            return
        if logits.dim() == 3 and logits.requires_grad and logits.shape[2] > 1:
            kept = logits[:_SEQUENCES].detach().clone()  # trl 1.0 to 1.9 divide them by the temperature in place
            logits.register_hook(lambda gradient: self._check(self._read_temperature, kept, gradient[:_SEQUENCES]))

    def _read_temperature(self, logits: torch.Tensor, gradient: torch.Tensor) -> None:
        scored = None if self._read is not None else scoring_temperature(logits, gradient)
        if scored is None:
            self._unread += bool(gradient.any())
            return
        self._read = scored
        self._controls["scores at temperature 1"] = plants.scored_at(logits, gradient, self._sampled())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare the temperature that was read, where the trainer's own scores were."""
        sampled = self._sampled()
        if self._hidden:
            self._read = None
        elif self._finds("F15", mismatch.temperature_figures(self._read, sampled)):
            self.report = dataclasses.replace(self.report, looks_like="temperature")
            self._say(
                "temperature",
                f"tokens are drawn at temperature {sampled:g} and scored at {self._read:.2f}: the gradient is that of "
                f"another policy than the one that generates. Next: {NEXT['temperature']}; or temperature=1.0",
            )

    def _sampled(self) -> float:
        """Return the temperature at which the trainer draws."""
        config = getattr(self._trainer(), "generation_config", None)
        return float(getattr(config, "temperature", None) or self._temperature)

    def _cannot_compare(self, reason: str) -> None:
        """Say once that an engine's answer cannot be compared."""
        if "answer" not in self._said:
            self._said.add("answer")
            self._could_not_check(reason)

    def _say(self, kind: str, message: str) -> None:
        """Trip once for each kind of thing found."""
        if kind not in self._said:
            self._said.add(kind)
            self._trip(message, self.report, _FAILURES.get(self.report.looks_like, ()))


def _weights(model: nn.Module, trainable: bool = True) -> dict[str, torch.Tensor]:
    """Return copies, in main memory, of the floating-point weights: those that are trained, or all."""
    return {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and (parameter.requires_grad or not trainable)
    }
