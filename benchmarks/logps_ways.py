"""What `logps.py` compares: ways to score a completion, and the shapes that they are given.

Two layers below the head in every shape: only the head differs between the ways. `SHAPES` are for a CPU; `CARD_SHAPES`
have the heads of Qwen2-0.5B and 7B, in bfloat16, 1,024 to 8,192 tokens a row.
"""

import dataclasses
from collections.abc import Callable

import torch
import transformers

from failurelab import logits

KEPT = "kept logits"
OURS = "completion_logps"


class NotRun(Exception):
    """This way cannot run here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is scored: `batch` rows of `prompt` + `completion` tokens under a head of `vocabulary` x `width`."""

    batch: int
    prompt: int
    completion: int
    width: int
    tied: bool
    vocabulary: int = 151_936
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        head = "tied" if self.tied else "untied"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x ({self.prompt}+{self.completion}), width {self.width}, {head}, {kind}"

    def model(self, device: str) -> transformers.PreTrainedModel:
        """Two layers and Qwen2's vocabulary, random weights."""
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=2,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 128 or 1,
            tie_word_embeddings=self.tied,
        )
        return transformers.Qwen2ForCausalLM(config).to(device, self.dtype)


SHAPES = {
    "tied": Shape(4, 256, 64, 256, True),
    "untied": Shape(4, 256, 64, 256, False),
    "long": Shape(2, 64, 256, 256, True),
    "wide": Shape(2, 128, 64, 896, True),
    "bfloat16": Shape(4, 256, 64, 256, True, dtype=torch.bfloat16),
}
CARD_SHAPES = {
    f"{name}-{length // 1024}k": Shape(2, 256, length - 256, width, name == "0.5b", vocabulary, torch.bfloat16)
    for name, width, vocabulary in (("0.5b", 896, 151_936), ("7b", 3584, 152_064))
    for length in (1024, 2048, 4096, 8192)
}


def picked(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-softmax, then gather."""
    return rows.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def full_logits(model, ids, mask, length):
    """All rows, then cut: trl 0.15 with transformers 4.48."""
    return picked(model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1], ids[:, -length:])


def kept_logits(model, ids, mask, length):
    """Only the rows needed, by the name that this model knows, one sequence at a time: trl 0.14."""
    keep = {logits.keep_argument(model): length + 1}
    rows = model(input_ids=ids, attention_mask=mask, **keep).logits[:, :-1]
    return torch.stack([picked(*pair) for pair in zip(rows, ids[:, -length:])])


def selective(model, ids, mask, length):
    """The rows needed, and trl's `selective_log_softmax`: trl 0.15 to 1.14."""
    try:
        from trl.trainer.utils import selective_log_softmax
    except ImportError as error:
        raise NotRun("this trl has no selective_log_softmax (it came with 0.15)") from error
    keep = {logits.keep_argument(model): length + 1}
    rows = model(input_ids=ids, attention_mask=mask, **keep).logits[:, :-1]
    return selective_log_softmax(rows, ids[:, -length:])


def fused_head(model, ids, mask, length):
    """The fused head that trl patches into the model since 1.15; labels mask everything but the completion."""
    if not hasattr(model, "_fused_for_benchmark"):
        try:
            from trl.trainer.utils import add_fused_lm_head
        except ImportError as error:
            raise NotRun("this trl has no fused head (it came with 1.15)") from error
        add_fused_lm_head(model)
        model._fused_for_benchmark = True
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-length] = -100
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return output.log_probs[:, -length:]


def grpo_loss(scores: torch.Tensor) -> torch.Tensor:
    """Return GRPO's loss at the first step of a batch, from log-probabilities: ratios are 1, advantages take turns."""
    return -((scores - scores.detach()).exp() * advantages(scores)[:, None]).mean()


def advantages(rows: torch.Tensor) -> torch.Tensor:
    """Return 1, -1, 1, ... for each row, `(batch,)`."""
    return torch.ones(rows.shape[0], device=rows.device).index_fill(
        0, torch.arange(1, rows.shape[0], 2, device=rows.device), -1
    )


def ours_with_loss(model, ids, mask, length):
    """completion_logps, and GRPO's loss of it: what Liger's gives."""
    return grpo_loss(logits.completion_logps(model, ids, mask, length))


def liger_loss(model, ids, mask, length):
    """Liger's head and GRPO loss in one, in chunks of sequences; it gives the loss only, and no log-probability.

    Source: Liger-Kernel 0.8.2, `chunked_loss/grpo_loss.py`. trl 1.16 does not call it: its `use_liger_kernel` swaps
    layers only.
    """
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError as error:
        raise NotRun(f"Liger is not to be had ({error}); it is in no lock of the course") from error
    hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, -length - 1 : -1]
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=ids.is_cuda)
    tokens = ids[:, -length:]
    return loss(hidden, model.lm_head.weight, tokens, torch.ones_like(tokens), advantages(ids))[0]


def chunked(rows: int) -> Callable:
    """Return completion_logps with `rows` rows of logits held."""
    return lambda model, ids, mask, length: logits.completion_logps(model, ids, mask, length, chunk_size=rows)


WAYS = {
    "full logits": full_logits,
    KEPT: kept_logits,
    OURS: logits.completion_logps,  # next to it, so that other work meets both alike
    "kept, selective_log_softmax": selective,
    "trl's fused head": fused_head,
    "completion_logps, GRPO loss": ours_with_loss,
    "Liger's GRPO loss": liger_loss,
}
LOSSES = {ours_with_loss, liger_loss}  # give a loss, and no log-probabilities
