"""Two policies: what importance weights leave of a batch, by length, with rounding alone; and the guard on 20 runs.

An engine in 16 bits draws completions, the same weights in float32 score them. One draw of the largest length holds all
shorter ones: a completion's first tokens are a completion of so many tokens. Models are the small trained one that
ships, and a random Qwen2 of 12 layers (width 512, vocabulary 32,000): as it is initialised, when it finds all tokens
nearly alike, and with every matrix doubled, so that it is as sure of its tokens as a trained one.

The guard is asked about 10 runs with a fault (weights that are old or were never sent, adapters left out, another
temperature, log-probabilities without it, moved by one token, another engine's ids) and 10 in which nothing is wrong.

Eras: today.
"""

import copy
import functools
import math
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import frames
import recording
import torch
import transformers

from failurelab import guards, mismatch
from failurelab_course.experiments import models, observe, trainers
from failurelab_course.experiments.second_engine import SecondEngine

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
    cache, theirs = None, []
    for _ in range(length):
        out = engine(input_ids=step, past_key_values=cache, use_cache=True)
        cache, rows = out.past_key_values, out.logits[:, -1].float().log_softmax(-1)
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
SMALL: tuple[Case, ...] = (
    ("small Qwen2, bfloat16", small_model, torch.bfloat16, 448, 64),
    ("small Qwen2, float16", small_model, torch.float16, 448, 64),
)
LARGE: tuple[Case, ...] = (
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


def merged(text: str) -> list[int]:
    """Encode as a tokenizer does that has a token for each pair of digits: an id that the model never draws."""
    ids, place = [], 0
    while place < len(text):
        pair = text[place : place + 2]
        ids.append(200 + int(pair) % 50 if len(pair) == 2 and pair.isdigit() else 3 + ord(pair[0]) % 200)
        place += 2 if len(pair) == 2 and pair.isdigit() else 1
    return ids


# What is wrong with the engine, and what the guard is to say that it looks like.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "never sent": ({"behind": math.inf}, "stale"),
    "never sent, bfloat16": ({"behind": math.inf, "dtype": torch.bfloat16}, "stale"),
    "4 steps behind": ({"behind": 4}, "stale"),
    "8 steps behind, bfloat16": ({"behind": 8, "dtype": torch.bfloat16}, "stale"),
    "adapter never sent": ({"behind": math.inf, "adapter": True}, "stale"),
    "drawn at 0.6": ({"temperature": 0.6}, "temperature"),
    "log-probabilities without the temperature": ({"scaled": False, "asked": 0.7}, "temperature"),
    "drawn at 1.3, bfloat16": ({"temperature": 1.3, "dtype": torch.bfloat16}, "temperature"),
    "moved by one token": ({"shift": 1}, "tokens"),
    "encoded again": ({"encode_again": merged}, "tokens"),
}
HEALTHY: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "temperature 0.7": {"asked": 0.7},
    "temperature 1.2, bfloat16": {"asked": 1.2, "dtype": torch.bfloat16},
    "adapter": {"adapter": True},
    "adapter, bfloat16": {"adapter": True, "dtype": torch.bfloat16},
    "one step behind, small steps": {"behind": 1, "rate": 1e-5},
    "long completions, bfloat16": {"dtype": torch.bfloat16, "length": 24},
    "its own model": {"own": True},
}


def judged(seed: int, device: str, **wrong: Any) -> tuple[Any, list[str]]:
    """Train for 12 steps under the guard; return its report, and what it said."""
    policy, tokenizer = models.load(device=device)
    asked, rate = wrong.pop("asked", 1.0), wrong.pop("rate", 1e-3)
    adapter, own, length = wrong.pop("adapter", False), wrong.pop("own", False), wrong.pop("length", 4)
    options: dict[str, Any] = {"temperature": asked, "max_completion_length": length}
    if adapter:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        rate *= 5
    engine = SecondEngine(policy, tokenizer, **wrong)
    trainer = trainers.grpo(policy, tokenizer, steps=12, seed=seed, prompts_per_step=8, learning_rate=rate, **options)
    if not own:
        trainer.rollout_func = engine
    guard = guards.EngineMismatchGuard(trainer)
    trainer.add_callback(guard)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return guard.report, [str(each.message) for each in caught if issubclass(each.category, guards.GuardWarning)]


def runs() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, the options and the expected cause of each run."""
    yield from ((name, options, cause) for name, (options, cause) in FAULTS.items())
    yield from ((name, options, "") for name, options in HEALTHY.items())


def guard_runs(device: str, seeds: int = 1, judge: Callable[..., Any] = judged) -> None:
    """Record what the guard says about each run."""
    for seed in range(seeds):
        for name, options, cause in runs():
            report, messages = judge(seed, device, **options)
            figures = {
                "expected": cause,
                "looks_like": report.looks_like,
                "told": len(messages),
                "gap_first": report.gaps[0][1].mean if report.gaps else None,
                "gap_last": report.gaps[-1][1].mean if report.gaps else None,
            }
            state = "broken" if cause else "healthy"
            observe.record("F16", state, figures, case=f"guard: {name}", seed=seed, device=device)
            print(name, figures, messages[:1], flush=True)


def table_weights(folder: pathlib.Path) -> str:
    """Rounding alone: what one weight for a sequence, and one for each token, leave of a batch, by length."""
    runs = frames.read_runs(folder, "two_policies", "weights: (?P<engine>.+), (?P<tokens>\\d+) tokens")
    runs = runs.assign(tokens=runs["tokens"].astype(int)).sort_values(["engine", "tokens"])
    runs = runs[runs["tokens"] != 64]  # between those of 16 and 256 tokens in every column
    return frames.table(
        ["engine", "tokens"],
        frames.list_runs(runs, "engine", "tokens"),
        ("mean gap, nats", "gap", ".3f"),
        (
            "weight: smallest, median, largest",
            lambda run: f"{run['smallest']:.3f}, {run['median']:.2f}, {run['largest']:.2f}",
        ),
        ("left out (above 3)", lambda run: f"{round(run['masked'] * run['sequences'])} of {run['sequences']}"),
        ("effective sample size", "effective"),
        ("with one for each token", "effective_token", ".3f"),
    )


def table_engine_guard(folder: pathlib.Path) -> str:
    """EngineMismatchGuard on runs with a fault, by kind, and on runs in which nothing is wrong."""
    runs = frames.read_runs(folder, "two_policies", "guard: (?P<name>.+)")
    runs["is"] = runs["expected"].where(runs["expected"] != "", "healthy")
    return frames.table(
        ["the run is"],
        runs.groupby("is"),
        ("runs", lambda runs: str(len(runs))),
        ("the guard trips", lambda runs: frames.count(runs["told"].astype(bool))),
        (
            "and names the kind",
            lambda runs: frames.count(runs["told"].astype(bool) & (runs["looks_like"] == runs["is"])),
        ),
        ("mean gap at the end, at most", lambda runs: f"{runs['gap_last'].max():.3f}"),
    )


def main() -> None:
    """Record both."""
    device = recording.begin(__doc__).device
    by_length(device, SMALL)
    guard_runs(device)
    by_length(device, LARGE)


if __name__ == "__main__":
    main()
