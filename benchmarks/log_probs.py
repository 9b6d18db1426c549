"""Scoring completions by all rows of logits, by the completion's alone, and by a few at a time: peak memory, seconds.

Forward and backward of a Qwen2 with one layer and Qwen2's vocabulary: there the logits are nearly all that is held. On
a CPU the peak is exact; on a card it is the allocator's, whose blocks are larger by some bytes.

Eras: today.
"""

import statistics
from collections.abc import Callable

import recording
import torch
import transformers

from failurelab import logits
from failurelab_course.experiments import observe
from failurelab_course.experiments.memory import peak_memory, stopwatch

ROWS, COMPLETION, PROMPTS, ROUNDS = 2, 16, (240, 480), 5
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def all_rows(model: torch.nn.Module, ids: torch.Tensor, kept: int = 0) -> torch.Tensor:
    """Return the completion's log-probabilities (rows, completion) from the logits of the last `kept`, or of all."""
    rows = model(ids, logits_to_keep=kept).logits[:, -COMPLETION - 1 : -1]  # (rows, completion, vocabulary)
    return rows.log_softmax(-1).gather(-1, ids[:, -COMPLETION:, None])[..., 0]


WAYS: dict[str, Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]] = {
    "all rows": all_rows,
    "the completion's rows": lambda model, ids: all_rows(model, ids, COMPLETION + 1),
    "8 rows at a time": lambda model, ids: logits.completion_logps(model, ids, None, COMPLETION, chunk_size=8),
}


def main() -> None:
    """Measure each way with each length, and record it."""
    device = recording.begin(__doc__).device
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)).to(device)
    for prompt in PROMPTS:
        ids = torch.randint(0, SHAPE["vocab_size"], (ROWS, prompt + COMPLETION), device=device)
        whole = 0.0
        for name, way in WAYS.items():

            def step(way: Callable = way, ids: torch.Tensor = ids) -> None:
                model.zero_grad(set_to_none=True)
                way(model, ids).sum().backward()

            step()  # not counted: a card's libraries take their workspace at their first call
            model.zero_grad(set_to_none=True)  # nor the gradients that are there already
            peak = peak_memory(step, device)
            times = []
            for _ in range(ROUNDS):
                with stopwatch(device) as seconds:
                    step()
                times.append(seconds())
            took = statistics.median(times)
            whole = whole or took
            metrics = {"peak_mib": peak / 2**20, "seconds": took, "share_of_seconds": took / whole}
            observe.record("F3a", "measured", metrics, case=f"{name}, prompt of {prompt}", device=device)
            print(f"{name}, prompt of {prompt}", metrics, flush=True)


if __name__ == "__main__":
    main()
