"""The steps whose memory `predicted.py` predicts and measures: the same code, on fake tensors and on real ones."""

import dataclasses
import warnings

import torch
import transformers

from failurelab import gradients, logits

HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: forward and backward pass of `batch` rows of `prompt` + `completion` tokens.

    Attributes:
        shape: of the model, as a Qwen2Config takes it; tied.
        way: how completions are scored: `full`, `kept` or `chunked` logits.
        kind: of checkpointing: `off`, `reentrant` or `non-reentrant`.
        dtype: of the weights, `float32` or `bfloat16`.
        bits: 4 for layers of bitsandbytes, else 0.
        adapters: LoRA of rank 16 on every linear layer, all else frozen.
        rows: chunk size where `way` is chunked.
    """

    shape: dict
    batch: int
    prompt: int
    completion: int
    way: str = "kept"
    kind: str = "off"
    dtype: str = "float32"
    bits: int = 0
    adapters: bool = False
    rows: int = 32

    def __str__(self) -> str:
        size = f"width {self.shape['hidden_size']}, {self.shape['num_hidden_layers']} layers"
        weights = f"{self.bits} bit" if self.bits else self.dtype
        extra = ", LoRA" if self.adapters else ""
        tokens = f"{self.batch} x ({self.prompt}+{self.completion})"
        return f"{self.way} logits, checkpointing {self.kind}, {weights}{extra}, {tokens}, {size}"

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self.prompt + self.completion

    def config(self) -> transformers.Qwen2Config:
        """Return the shape as transformers takes it."""
        return transformers.Qwen2Config(**self.shape, tie_word_embeddings=True)


def trained(model, case: Case):
    """Return the model with its adapters and kind of checkpointing, in train mode."""
    if case.adapters:
        from peft import LoraConfig, get_peft_model

        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    if case.kind != "off":
        gradients.enable_checkpointing(model, {"use_reentrant": case.kind == "reentrant"})
        if case.adapters:
            model.enable_input_require_grads()
    return model.train()


def step(model, ids: torch.Tensor, case: Case) -> None:
    """Score the completions, and go back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reentrant checkpointing of a frozen embedding says so
        score(model, ids, case).mean().backward()


def score(model, ids: torch.Tensor, case: Case) -> torch.Tensor:
    """Return log-probabilities of the completion, `(batch, completion)`, in the case's way."""
    if case.way == "chunked":
        return logits.completion_logps(model, ids, None, case.completion, chunk_size=case.rows)
    keep = {"logits_to_keep": case.completion + 1} if case.way == "kept" else {}
    rows = model(input_ids=ids, use_cache=False, **keep).logits[:, -case.completion - 1 : -1]
    return rows.float().log_softmax(-1).gather(-1, ids[:, -case.completion :, None])[..., 0]
