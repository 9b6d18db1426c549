"""Two policies: what importance weights leave of a batch, by length, with rounding alone.

An engine in 16 bits draws completions, the same weights in float32 score them. One draw of the largest length holds all
shorter ones: a completion's first tokens are a completion of so many tokens. Models are the small trained one that
ships, and a random Qwen2 of 12 layers (width 512, vocabulary 32,000): as it is initialised, when it finds all tokens
nearly alike, and with every matrix doubled, so that it is as sure of its tokens as a trained one.

Eras: today.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import recording
import torch
import transformers

from failurelab import mismatch
from failurelab_course.experiments import models, observe

LENGTHS = (16, 64, 256, 448, 1024, 2048)
PROMPT = 8


def random_model(device: str, factor: float = 1.0) -> Any:
    """Return a random Qwen2 of 12 layers, with every matrix multiplied by a factor."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(factor)
    return model.to(device)


@torch.no_grad()
def both_logps(model: Any, dtype: torch.dtype, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the policy's and the engine's log-probabilities of what the engine draws, both (count, length)."""
    engine = copy.deepcopy(model).to(dtype)
    torch.manual_seed(0)
    ids = step = torch.randint(3, model.config.vocab_size, (count, PROMPT), device=model.device)
    names = inspect.signature(engine.forward).parameters
    cache, name, theirs = None, "cache" if "cache" in names else "past_key_values", []
    for _ in range(length):
        out = engine(input_ids=step, use_cache=True, **{name: cache})
        cache, rows = out[name], out.logits[:, -1].float().log_softmax(-1)
        step = torch.multinomial(rows.exp(), 1)
        theirs.append(rows.gather(1, step))
        ids = torch.cat([ids, step], 1)
    ours = []
    for row in ids.split(1):
        logps = model(input_ids=row).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        ours.append(logps.gather(2, row[:, PROMPT:, None])[..., 0])
    return torch.cat(ours), torch.cat(theirs, 1)


def small_model(device: str) -> Any:
    """Return the model that ships."""
    return models.load("tiny", device=device)[0].eval()


# Name, model, the engine's dtype, the largest length, and how many completions.
Case = tuple[str, Callable[[str], Any], torch.dtype, int, int]
CASES: tuple[Case, ...] = (
    ("small Qwen2, bfloat16", small_model, torch.bfloat16, 448, 64),
    ("small Qwen2, float16", small_model, torch.float16, 448, 64),
    ("random, 12 layers, bfloat16", random_model, torch.bfloat16, 448, 16),
    ("random, 12 layers doubled, bfloat16", functools.partial(random_model, factor=2.0), torch.bfloat16, 2048, 16),
)


def by_length(device: str, cases: Iterable[Case]) -> None:
    """Record masked share and effective sample size by length."""
    for name, build, dtype, longest, count in cases:
        ours, theirs = both_logps(build(device), dtype, longest, count)
        for length in (each for each in LENGTHS if each <= longest):
            policy, engine = ours[:, :length], theirs[:, :length]
            mask = torch.ones_like(policy)
            gap = mismatch.compare(policy, engine, mask)
            whole = mismatch.importance_weights(policy, engine, mask, cap=None)
            single = mismatch.importance_weights(policy, engine, mask, "token_truncate")
            kept = mismatch.importance_weights(policy, engine, mask)
            figures = {
                "length": length,
                "sequences": count,
                "gap": gap.mean,
                "largest_gap": gap.largest,
                "masked": gap.masked,
                "effective": gap.effective,
                "effective_kept": mismatch.effective_sample_size(kept),
                "effective_token": mismatch.effective_sample_size(single),
                "smallest": float(whole.min()),
                "median": float(whole.median()),
                "largest": float(whole.max()),
            }
            observe.record("F17", "measured", figures, case=f"weights: {name}, {length} tokens", device=device)
            print(name, {key: round(value, 4) for key, value in figures.items()}, flush=True)


def main() -> None:
    """Record them."""
    by_length(recording.begin(__doc__).device, CASES)


if __name__ == "__main__":
    main()
