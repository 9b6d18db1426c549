"""Guards to take home: one line in any training script that stops a run which trains nothing, or trains on garbage.

    trainer = GRPOTrainer(..., callbacks=[GradientGuard(), RolloutGuard()])

Both failures raise nothing by themselves. `GradientGuard` listens to the first optimizer step's backward passes and
names the trainable parameters that no gradient reached (`gradients`). `RolloutGuard` watches the trainer's own call of
`model.generate` and, in the very state in which the trainer generates, compares greedy generation with eval mode
(`rollouts`); so a trainer that switches checkpointing off for generation, as trl does since 0.22, is judged by
what it does. Neither changes the run: the random state, and so every loss and reward, is as without it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from failurelab import _greedy as decoding
from failurelab import gradients, rollouts
from failurelab.guards.base import Guard, GuardTripped, GuardWarning
from failurelab.guards.logits import LogitsGuard, LogitsReport
from failurelab.guards.placement import PlacementGuard
from failurelab.guards.zero3 import EngineGuard, HandOver
from failurelab.handles import Handle, wrap_method

__all__ = [
    "EngineGuard",
    "GradientGuard",
    "GuardTripped",
    "GuardWarning",
    "HandOver",
    "LogitsGuard",
    "LogitsReport",
    "PlacementGuard",
    "RolloutGuard",
]


class GradientGuard(Guard):
    """Stop or warn when trainable parameters got no gradient by the end of the first step, before they are left as is.

    A gradient of all zeros is no alarm: LoRA's A starts so. `report`, a `gradients.GradientReport`, is there after the
    step.

    Args:
        action: `stop` raises GuardTripped before the optimizer's step, `warn` issues a GuardWarning.
        steps: optimizer steps to wait for, where a parameter may rightly get none in one batch: an expert that no token
            was routed to, a vision tower without an image.
        ignore: a regular expression; parameters whose names it finds are not held against the run.
    """

    def __init__(self, action: str = "stop", *, steps: int = 1, ignore: str = ""):
        super().__init__(action)
        if steps < 1:
            raise ValueError(f"steps={steps}: at least one step must run before its gradients can be judged")
        self.steps, self.ignore = steps, ignore
        self._watch: gradients.GradientWatch | None = None
        self._seen = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start to listen."""
        self._stop()
        self.report, self._seen = None, 0
        self._watch = gradients.watch(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge what the backward passes of the step have reached."""
        self._seen += 1
        if self._watch is None or self._seen < self.steps:
            return
        report = self._watch.report()
        self._stop()
        self.report = report
        missing = [name for name in report.without_gradient if not (self.ignore and re.search(self.ignore, name))]
        if missing:
            self._trip(f"after step {state.global_step + 1}, {report}", report)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop listening, where the run was too short to judge."""
        self._stop()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


class RolloutGuard(Guard):
    """Stop or warn when the trainer's generation disagrees with generation in eval mode.

    It judges the first batch that the trainer generates from in train mode and, where that one has no padding, the
    first that has: up to transformers 4.48 only those go wrong with sdpa. Then it is gone. `report`, a
    `rollouts.RolloutReport`, is the last one made; None where the trainer generated nothing through `model.generate`
    (no rollouts at all, or vLLM). Generation in eval mode is not judged: there is nothing to go wrong.

    Args:
        action: `stop` raises GuardTripped before anything is trained on the rollouts, `warn` issues a GuardWarning.
        prompts: judged instead of the trainer's own first batch, texts or lists of messages.
        max_prompts: of the trainer's batch, so many different prompts are judged, the shortest first.
        max_new_tokens: generated for each at most.
        tokenizer: for `prompts` and the report's texts; by default the trainer's.
    """

    def __init__(
        self,
        action: str = "stop",
        *,
        prompts: Sequence[decoding.Prompt] | None = None,
        max_prompts: int = 8,
        max_new_tokens: int = decoding.NEW_TOKENS,
        tokenizer: Any = None,
    ):
        super().__init__(action)
        self.prompts, self.max_prompts, self.max_new_tokens = prompts, max_prompts, max_new_tokens
        self.tokenizer = tokenizer
        self._handle: Handle | None = None
        self._rounding: float | None = None

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        **_: Any,
    ) -> None:
        """Wait for the trainer to call `generate`."""
        self._stop()
        self.report = None
        self._rounding = (
            rollouts.ROUNDING[2] if args.bf16 or args.fp16 else None
        )  # mixed precision rounds as 16 bits do
        tokenizer = self.tokenizer or processing_class or tokenizer
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor of images and text
        if tokenizer is None or not callable(getattr(model, "generate", None)):
            return  # a trainer without a tokenizer, or of a model that cannot generate, has no rollouts

        def around(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if generate.__self__ is model and model.training:
                self._judge(model, tokenizer, generate, *args, **kwargs)
            return generate(*args, **kwargs)

        self._handle = wrap_method(model, "generate", around, "generation is watched by RolloutGuard")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait no longer."""
        self._stop()

    def _judge(
        self,
        model: Any,
        tokenizer: Any,
        generate: Callable[..., Any],
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        **kwargs: Any,
    ) -> None:
        ids = kwargs.pop("input_ids", inputs)
        mask = kwargs.pop("attention_mask", None)
        if self.prompts is not None:
            ids, mask = decoding.encode(model, tokenizer, self.prompts, self.max_new_tokens)
        elif ids is None:
            return  # embeddings instead of tokens: nothing that could be scored
        mask = torch.ones_like(ids) if mask is None else mask
        padded = not bool(mask.all())
        if self.report is not None and not padded:
            return  # one batch without padding was judged; the next are as right
        if not any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            ids, mask = _shortest(ids, mask, self.max_prompts)  # else rows belong to images and the like: all of them
        config = {} if generation_config is None else {"generation_config": generation_config}
        said = kwargs.pop("max_new_tokens", None) or getattr(generation_config, "max_new_tokens", None)
        kwargs["max_new_tokens"] = min(said or self.max_new_tokens, self.max_new_tokens)
        if padded or self.prompts is not None:
            self._stop()
        self.report = rollouts.compare(
            model, tokenizer, ids, mask, generate=generate, rounding=self._rounding, **config, **kwargs
        )
        if not self.report.agrees:
            self._stop()
            self._trip(str(self.report), self.report)

    def _stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _shortest(ids: torch.Tensor, mask: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at most `limit` different rows, those with most padding first: padding may be what goes wrong."""
    different = {tuple(row): index for index, row in reversed(list(enumerate(ids.tolist())))}
    chosen = sorted(different.values(), key=lambda index: int(mask[index].sum()))[:limit]
    return ids[chosen], mask[chosen]
