"""A second engine: a copy of the policy, with weights and a dtype of its own, that generates for a trainer.

It is a stand-in for vLLM, of transformers' `generate`, and made to be wrong in the ways in which engines are: weights
that are some steps old or were never sent, another dtype, another temperature, log-probabilities of other tokens, and
answers that are no answers.

    trainer = GRPOTrainer(..., rollout_func=SecondEngine(model, tokenizer, behind=2))
"""

import collections
import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from failurelab_course.experiments.vllm_stand_in import draw_ids


class SecondEngine:
    """Generates as trl's `rollout_func` does: ids of prompts and completions, and the tokens' log-probabilities.

    Args:
        model: the policy before training, which is copied; `tokenizer` is of its prompts.
        dtype: of the engine's weights; None for the policy's.
        behind: so many optimizer steps its weights are old; `math.inf` if none are ever sent.
        temperature: of the sampling; None for the trainer's.
        shift: positions by which its log-probabilities are moved.
        answer: `whole`, or `none`: without log-probabilities.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        dtype: torch.dtype | None = None,
        behind: float = 0,
        temperature: float | None = None,
        shift: int = 0,
        answer: str = "whole",
    ):
        self.model = copy.deepcopy(model).eval().to(dtype or next(model.parameters()).dtype)
        vars(self.model).pop("forward", None)  # of a model that GRPOTrainer was given: the copy would run the original
        self.tokenizer, self.behind, self.temperature = tokenizer, behind, temperature
        self.shift, self.answer = shift, answer
        self._sent: collections.deque[dict[str, torch.Tensor]] = collections.deque()

    def send(self, model: Any) -> None:
        """Take the policy's weights, adapters merged; those of `behind` calls ago are used."""
        if math.isinf(self.behind):
            return
        with torch.no_grad(), _merged(model):
            weights = {name.removeprefix("base_model.model."): each for name, each in model.state_dict().items()}
            weights = {name.replace(".base_layer", ""): each.clone() for name, each in weights.items()}
        self._sent.append({name: each for name, each in weights.items() if "lora_" not in name})
        while len(self._sent) > self.behind + 1:
            self._sent.popleft()
        self.model.load_state_dict(self._sent[0])

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Return a completion for each prompt."""
        self.send(trainer.model)
        temperature = self.temperature or trainer.args.temperature
        asked, ids, scores, _ = draw(
            self.model, self.tokenizer, prompts, trainer.args.max_completion_length, temperature
        )
        if self.shift:
            scores = [row[-self.shift :] + row[: -self.shift] for row in scores]
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": scores if self.answer == "whole" else None}


def draw(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int, temperature: float
) -> tuple[list[list[int]], list[list[int]], list[list[float]], list[list[float]]]:
    """Draw a completion for each prompt, up to its end; return the prompts' ids, and what `draw_ids` returns."""
    asked = tokenizer(list(prompts))["input_ids"]
    return (asked, *draw_ids(model, asked, max_tokens, temperature, tokenizer.eos_token_id))


@contextlib.contextmanager
def _merged(model: Any) -> Iterator[None]:
    if not hasattr(model, "merge_adapter"):
        yield
        return
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
