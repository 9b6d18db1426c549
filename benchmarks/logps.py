#!/usr/bin/env python3
"""Time and memory of a completion's log-probabilities, forward and backward: five ways, several shapes, one run.

    python benchmarks/logps.py [--rounds N] [--shapes NAME ...]

Every way is first given the known-answer probe: only right functions are compared. Rounds go through all ways in turn,
so that other work on the machine meets all of them; a ratio is the median of each round's own. A way that runs out of
memory is NOT RUN, and the record says why.

Memory is what torch allocated at its peak over the start, on a CPU counted from every allocation. *Beyond gradients* is
that peak less the gradients that any way must leave behind: the head's, vocabulary x width x bytes, and as much again
for an embedding of its own where the two are not tied. It still holds the model's activations, which no way of scoring
saves.

Errors are against a float64 copy of the same weights, all logits, on two rows of 32 + 16 tokens: the largest of the
log-probabilities, in nats, and of the parameters' gradients, as a share of the largest entry.

Eras: today.
"""

import copy
import dataclasses
import statistics
from collections.abc import Callable

import recording
import torch
import transformers

from failurelab import logits
from failurelab_course.experiments import observe

MIB = 2**20
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


WAYS = {
    "full logits": full_logits,
    KEPT: kept_logits,
    OURS: logits.completion_logps,  # next to it, so that other work meets both alike
    "kept, selective_log_softmax": selective,
    "trl's fused head": fused_head,
}


def errors(shape: Shape, ways: dict[str, Callable], device: str) -> dict[str, dict[str, float]]:
    """Return for each way how far its results and gradients are from a float64 model's, on a small batch."""
    model = shape.model(device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (2, 48), generator=generator).to(device)
    mask = torch.ones_like(ids)
    exact = copy.deepcopy(model).double()

    def scored(net, way: Callable) -> tuple[torch.Tensor, list[torch.Tensor]]:
        net.zero_grad(set_to_none=True)
        scores = way(net, ids, mask, 16)
        scores.double().mean().backward()
        return scores.detach().double(), [parameter.grad.double() for parameter in net.parameters()]

    truth, slopes = scored(exact, full_logits)
    metrics = {}
    for name, way in ways.items():
        scores, grown = scored(model, way)
        error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(grown, slopes))
        metrics[name] = {"gradient_error": error, "score_error": (scores - truth).abs().max().item()}
    return metrics


def measure(shape: Shape, ways: dict[str, Callable], rounds: int, device: str) -> dict[str, dict | str]:
    """Return metrics by way, or why it was not run."""
    model = shape.model(device).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.prompt + shape.completion), generator=generator)
    ids = ids.to(device)
    mask = torch.ones_like(ids)

    def step(way: Callable) -> None:
        model.zero_grad(set_to_none=True)
        way(model, ids, mask, shape.completion).mean().backward()

    rows: dict[str, dict | str] = {}
    runnable: dict[str, Callable] = {}
    for name, way in ways.items():
        try:
            step(way)
        except (NotRun, torch.cuda.OutOfMemoryError) as reason:
            rows[name] = str(reason).splitlines()[0]
        else:
            runnable[name] = way
            logits.check_alignment(way, model)
        model.zero_grad(set_to_none=True)
    if KEPT not in runnable:
        return {name: rows.get(name, f"{KEPT}, which all are compared with, was not run") for name in ways}
    wrong = errors(shape, runnable, device)
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    def timed(some: dict[str, Callable]) -> dict[str, float]:
        took = {}
        for name, way in some.items():
            with observe.stopwatch(device) as seconds:
                step(way)
            took[name] = seconds()
        return took

    all_times = [timed(runnable)]
    # What takes four times as long as another is slow, however often it is timed.
    quick = {name: way for name, way in runnable.items() if all_times[0][name] < 4 * all_times[0][KEPT]}
    for _ in range(rounds - 1):
        all_times.append(timed(quick))
    for name, way in runnable.items():
        times = [each for each in all_times if name in each]
        model.zero_grad(set_to_none=True)
        peak = observe.peak_memory(lambda way=way: step(way), device)
        rows[name] = {
            "seconds": statistics.median(each[name] for each in times),
            "time_to_kept": statistics.median(each[name] / each[KEPT] for each in times),
            "gradients_mib": gradients / MIB,
            "beyond_gradients_mib": (peak - gradients) / MIB,
            **wrong[name],
        }
    for row in rows.values():
        if isinstance(row, dict):
            row["memory_to_kept"] = row["beyond_gradients_mib"] / rows[KEPT]["beyond_gradients_mib"]
    return rows


def show(shape: Shape, rows: dict[str, dict | str], device: str) -> None:
    """Print what was measured of one shape, and write its records."""
    for name, row in rows.items():
        figures = {"not_run": row} if isinstance(row, str) else row
        print(f"{name}, {shape}: {figures}", flush=True)
        observe.record("F3a", "measured", figures, case=f"log-probs: {name}, {shape}", device=device)


def main() -> None:
    """Run the benchmark."""
    shapes = {"nargs": "+", "choices": list(SHAPES), "metavar": "SHAPE", "default": list(SHAPES)}
    options = recording.begin(__doc__, rounds=7, shapes=shapes | {"help": ", ".join(SHAPES)})
    for name in options.shapes:
        shape = SHAPES[name]
        show(shape, measure(shape, WAYS, options.rounds, options.device), options.device)


if __name__ == "__main__":
    main()
