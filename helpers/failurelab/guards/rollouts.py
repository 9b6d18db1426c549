"""A guard that compares the trainer's own generation with generation in eval mode.

    trainer = GRPOTrainer(..., callbacks=[RolloutGuard()])

Garbage rollouts raise nothing (see `failurelab.rollouts`). The guard watches the trainer's calls of `model.generate`
and judges in the very state in which the trainer generates; so a trainer that switches checkpointing off for
generation, as trl does since 0.22, is judged by what it does. The run is not changed: the random state, and so every
loss and reward, is as without the guard.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from failurelab import _greedy, rollouts
from failurelab.failures import verdicts
from failurelab.guards.base import Action, Guard
from failurelab.handles import wrap_method

_PROMPTS = 8  # of the trainer's batch that are judged


class RolloutGuard(Guard):
    """Stop or warn when the trainer's generation disagrees with generation in eval mode.

    It judges the first batch that the trainer generates from in train mode and, if that one has no padding, the first
    batch with padding: up to transformers 4.48 only those go wrong with sdpa. Then it stops watching. `report` is the
    last `rollouts.RolloutReport`; None if the trainer generated nothing through `model.generate` (no rollouts at all,
    or vLLM, of which a GuardWarning tells). Generation in eval mode is not judged, because nothing can go wrong there.

    Args:
        action: `stop` raises GuardTripped before anything is trained on the rollouts, `warn` issues a GuardWarning.
        prompts: judged instead of the trainer's own first batch, texts or lists of messages.
        max_new_tokens: generated for each at most.
        tokenizer: for `prompts` and the report's texts; by default the trainer's.
    """

    failures = ("F7",)

    def __init__(
        self,
        action: Action = "stop",
        *,
        prompts: Sequence[_greedy.Prompt] | None = None,
        max_new_tokens: int = _greedy.NEW_TOKENS,
        tokenizer: Any = None,
    ):
        super().__init__(action)
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.tokenizer = tokenizer
        self._rounding: float | None = None
        self._places: list[verdicts.Figures] = []  # of the batches that were judged
        self._controls: dict[str, verdicts.Figures] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Wait for the trainer to call `generate`."""
        self._stop()
        self.report, self._places, self._controls = None, [], {}
        for option in ("use_vllm", "use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(args, option, False):
                self._could_not_check(f"with {option} the trainer generates without model.generate: nothing is judged")
                return
        # 16 bits round more; `accelerate launch`, or in transformers 4 an earlier config, asks for them by a variable
        mixed = args.bf16 or args.fp16 or os.environ.get("ACCELERATE_MIXED_PRECISION") in ("bf16", "fp16")
        self._rounding = rollouts.ROUNDING[2] if mixed else None
        tokenizer = self.tokenizer or kwargs.get("processing_class") or kwargs.get("tokenizer")
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor of images and text
        if tokenizer is None or not callable(getattr(model, "generate", None)):
            return  # a trainer without a tokenizer, or of a model that cannot generate, has no rollouts

        def around(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._check(self._judge, model, tokenizer, generate, *args, **kwargs)
            return generate(*args, **kwargs)

        self._listening.enter_context(wrap_method(model, "generate", around, "generation is watched by RolloutGuard"))

    def _judge(
        self,
        model: nn.Module,
        tokenizer: Any,
        generate: Any,
        /,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        **kwargs: Any,
    ) -> None:
        if getattr(generate, "__self__", model) is not model or not model.training:
            return  # a copy, such as a reference model; or eval mode
        ids = kwargs.pop("input_ids", inputs)
        mask = kwargs.pop("attention_mask", None)
        if self.prompts is not None:
            ids, mask = _greedy.encode(model, tokenizer, self.prompts, self.max_new_tokens)
            for name in _greedy.tensors(kwargs):  # images of the trainer's batch, which these prompts do not show
                del kwargs[name]
        elif ids is None:
            return  # embeddings instead of tokens: nothing that could be scored
        mask = torch.ones_like(ids) if mask is None else mask
        padded = not bool(mask.all())
        if self.report is not None and not padded:
            return  # one batch without padding was judged, and this is another one
        if not _greedy.tensors(kwargs):
            ids, mask = _shortest(ids, mask)  # else rows belong to images and the like: all of them
        config = {} if generation_config is None else {"generation_config": generation_config}
        asked = kwargs.pop("max_new_tokens", None) or getattr(generation_config, "max_new_tokens", None)
        kwargs["max_new_tokens"] = min(asked or self.max_new_tokens, self.max_new_tokens)
        if padded or self.prompts is not None:
            self._stop()
        self.report = rollouts.compare(
            model, tokenizer, ids, mask, generate=generate, rounding=self._rounding, **config, **kwargs
        )
        self._places.append(self.report.figures)
        self._controls |= self.report.planted
        if self._finds("F7", self.report.figures):
            self._stop()
            self._trip(str(self.report), self.report)
            return
        if self.report.unplanted:
            self._could_not_check(f"the controls of F7 cannot be planted in this model: {self.report.unplanted}")
        else:
            self._conclude(f"checked {len(self.report.rollouts)} prompts: {self.report}", self._places, self._controls)


def _shortest(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at most _PROMPTS different rows, those with most padding first: padding may be what goes wrong."""
    different = {tuple(row): index for index, row in reversed(list(enumerate(ids.tolist())))}
    chosen = sorted(different.values(), key=lambda index: int(mask[index].sum()))[:_PROMPTS]
    return ids[chosen], mask[chosen]
