#!/usr/bin/env python3
"""Time and memory of a completion's log-probabilities, forward and backward: six ways, several shapes, one run.

    python benchmarks/logps.py [--rounds N] [--device cpu|cuda] [--shapes NAME,...] [--chunks]

Every way is first given the known-answer probe: only right functions are compared. Rounds go through all ways in turn,
so that other work on the machine meets all of them; a ratio is the median of each round's own, or that of the fastest,
which other work disturbs least (the machine's load is in the record). Memory is what torch
allocated at its peak over the start, on a CPU counted from every allocation. *Beyond gradients* is that peak less the
gradients that any way must leave behind: the head's, vocabulary x width x bytes, and as much again for an embedding of
its own where the two are not tied. It still holds the model's activations, which no way of scoring saves.

Errors are against a float64 copy of the same weights, all logits, on two rows of 32 + 16 tokens: the largest of the
log-probabilities, in nats, and of the parameters' gradients, as a share of the largest entry.

Eras: today.
"""

import argparse
import copy
import dataclasses
import os
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from failurelab import logits, observe

KEPT = "kept logits"
OURS = "completion_logps"
MIB = 2**20


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


def liger(model, ids, mask, length):
    """Liger's fused linear cross-entropy: kernels for a GPU. Gives one sum, so it is timed and not probed."""
    if not ids.is_cuda:
        raise NotRun("Liger's kernels need a GPU")
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise NotRun("liger_kernel is not installed") from error
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -length - 1 : -1]
    loss = liger_fused_linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight, ids[:, -length:].reshape(-1), reduction="sum"
    )
    return -loss if not isinstance(loss, tuple) else -loss[0]


def chunked(rows: int) -> Callable:
    """Return completion_logps with `rows` rows of logits held."""
    return lambda model, ids, mask, length: logits.completion_logps(model, ids, mask, length, chunk_size=rows)


WAYS = {
    "full logits": full_logits,
    KEPT: kept_logits,
    OURS: logits.completion_logps,  # next to it, so that other work meets both alike
    "kept, selective_log_softmax": selective,
    "trl's fused head": fused_head,
    "Liger": liger,
}


def errors(shape: Shape, ways: dict[str, Callable], device: str) -> dict[str, dict[str, float]]:
    """Return for each way how far its log-probabilities and gradients are from a float64 model's, on a small batch."""
    model = shape.model(device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (2, 48), generator=generator).to(device)
    mask = torch.ones_like(ids)
    exact = copy.deepcopy(model).double()

    def scored(net: transformers.PreTrainedModel, way: Callable) -> tuple[torch.Tensor, list[torch.Tensor]]:
        net.zero_grad(set_to_none=True)
        scores = way(net, ids, mask, 16)
        scores.double().mean().backward()
        return scores.detach().double(), [each.grad.double() for each in net.parameters()]

    truth, slopes = scored(exact, full_logits)
    found = {}
    for name, way in ways.items():
        got, grown = scored(model, way)
        found[name] = {
            "score_error": (got - truth).abs().max().item(),
            "gradient_error": max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(grown, slopes)),
        }
    return found


def measure(shape: Shape, ways: dict[str, Callable], rounds: int, device: str) -> dict[str, dict | str]:
    """Return figures by way, or why it was not run."""
    model = shape.model(device).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.prompt + shape.completion), generator=generator)
    ids = ids.to(device)
    mask = torch.ones_like(ids)

    def step(way: Callable) -> None:
        model.zero_grad(set_to_none=True)
        way(model, ids, mask, shape.completion).mean().backward()

    def seconds(way: Callable) -> float:
        start = time.perf_counter()
        step(way)
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    found: dict[str, dict | str] = {}
    runnable = {}
    for name, way in ways.items():
        try:
            step(way)
        except NotRun as reason:
            found[name] = str(reason)
            continue
        if way is not liger:
            logits.check_alignment(way, model)
        runnable[name] = way
    wrong = errors(shape, {name: way for name, way in runnable.items() if way is not liger}, device)
    gradients = sum(each.numel() * each.element_size() for each in model.parameters())
    all_times = [{name: seconds(way) for name, way in runnable.items()}]
    # What takes four times as long as another is slow, however often it is timed.
    quick = {name: way for name, way in runnable.items() if all_times[0][name] < 4 * all_times[0][KEPT]}
    all_times += [{name: seconds(way) for name, way in quick.items()} for _ in range(rounds - 1)]
    for name, way in runnable.items():
        times = [each for each in all_times if name in each]
        model.zero_grad(set_to_none=True)
        peak = observe.peak_memory(lambda way=way: step(way), device)
        found[name] = {
            "seconds": statistics.median(each[name] for each in times),
            "time_to_kept": statistics.median(each[name] / each[KEPT] for each in times),
            "fastest_seconds": min(each[name] for each in times),
            "fastest_to_kept": min(each[name] for each in times) / min(each[KEPT] for each in times),
            "peak_mib": peak / MIB,
            "gradients_mib": gradients / MIB,
            "beyond_gradients_mib": (peak - gradients) / MIB,
            "rounds": len(times),
            "load": os.getloadavg()[0],
            **wrong.get(name, {}),
        }
    for figures in found.values():
        if isinstance(figures, dict):
            figures["memory_to_kept"] = figures["beyond_gradients_mib"] / found[KEPT]["beyond_gradients_mib"]
    return found


def show(shape: Shape, found: dict[str, dict | str], device: str) -> None:
    """Print the table of one shape, and write its records."""
    print(f"\n{shape}; {observe.device_name(device)}\n")
    print("| way | median, s | to kept | fastest, s | to kept | peak, MiB | beyond gradients | to kept | error |")
    print("|" + "---|" * 9)
    for name, row in found.items():
        if isinstance(row, str):
            print(f"| {name} | NOT RUN: {row} | | | | | | | |")
            continue
        print(
            f"| {name} | {row['seconds']:.2f} | {row['time_to_kept']:.2f} | {row['fastest_seconds']:.2f} | "
            f"{row['fastest_to_kept']:.2f} | {row['peak_mib']:.0f} | "
            f"{row['beyond_gradients_mib']:.0f} | {row['memory_to_kept']:.2f} | "
            f"{row.get('score_error', float('nan')):.1e}, {row.get('gradient_error', float('nan')):.1e} |"
        )
        observe.record("F3a", "measured", row, case=f"log-probs: {name}, {shape}", device=device)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--chunks", action="store_true", help="also completion_logps at several chunk sizes")
    options = parser.parse_args()
    observe.quiet()
    for name in options.shapes.split(","):
        if name not in SHAPES:
            parser.error(f"unknown shape {name!r}: the shapes are {', '.join(SHAPES)}")
        show(SHAPES[name], measure(SHAPES[name], WAYS, options.rounds, options.device), options.device)
    if options.chunks:
        ways = {KEPT: kept_logits} | {f"{OURS}, chunk {rows}": chunked(rows) for rows in (1, 2, 4, 8, 16, 32, 64, 256)}
        show(SHAPES["tied"], measure(SHAPES["tied"], ways, options.rounds, options.device), options.device)


if __name__ == "__main__":
    main()
