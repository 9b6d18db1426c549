"""One step of RLOO and of Online DPO beside its definition: ways of training, options and planted mistakes, by release.

    python benchmarks/textbook_algorithms.py

Each run trains the small Qwen2 by three steps that move its weights (`first step`: by none), and compares the next one.
Preferences of Online DPO come from a judge where a release has judges, and from a reward function elsewhere. Where a
release lacks an option it is not run; RLOO before 0.22 has a training loop of its own, in which nothing is compared.

Eras: trl-0.14, trl-0.15, trl-0.22, today.
"""

import os
import pathlib
import sys
import tempfile
from typing import Any

import recording
import torch
import trl

from failurelab_course.experiments import models

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "unit"))
import steps
from small import lora_config
from textbook import compare, record

MOVED: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 4}
LORA: dict[str, Any] = MOVED | {"learning_rate": 1e-2, "config": lora_config(r=4)}
CASES: dict[str, dict[str, Any]] = {
    "Online DPO: first step": {},
    "Online DPO: all weights": MOVED,
    "Online DPO: LoRA": LORA,
    "Online DPO: checkpointing": MOVED | {"gradient_checkpointing": True},
    "Online DPO: bf16, the default": MOVED | {"bf16": True},
    "Online DPO: loss_type ipo": MOVED | {"loss_type": "ipo", "beta": 0.5},
    "Online DPO: temperature 0.7": MOVED | {"temperature": 0.7},
    "Online DPO: max_length that cuts": MOVED | {"max_length": 9},
    "Online DPO: missing_eos_penalty": MOVED | {"missing_eos_penalty": 5.0, "max_new_tokens": 3},
    "Online DPO: two micro-batches": MOVED | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    "RLOO: first step": {},
    "RLOO: all weights, beta": MOVED | {"beta": 0.2},
    "RLOO: LoRA, beta": LORA | {"beta": 0.2},
    "RLOO: checkpointing": MOVED | {"gradient_checkpointing": True},
    "RLOO: bf16, the default": MOVED | {"bf16": True},
    "RLOO: temperature 0.7": MOVED | {"temperature": 0.7, "beta": 0.2},
    "RLOO: two iterations, clipped": MOVED | {"num_iterations": 2, "epsilon": 0.02, "beta": 0.2},
    "RLOO: two steps from a generation": MOVED | {"steps_per_generation": 4, "beta": 0.2},
    "RLOO: normalize_advantages": MOVED | {"normalize_advantages": True, "beta": 0.2},
    "RLOO: reward_clip_range": MOVED | {"reward_clip_range": (-0.5, 0.5)},
    "RLOO: reward_weights": MOVED | {"reward_weights": [3.0, 0.5]},
    "RLOO: mask_truncated_completions": MOVED | {"mask_truncated_completions": True, "max_completion_length": 2},
}


def build(case: str, device: str) -> Any:
    """Return the trainer of a case; None where this release does not have it."""
    algorithm, options = case.partition(":")[0], CASES[case]
    if algorithm == "RLOO" and steps.before("0.22"):
        return None
    if "missing_eos_penalty" in options and steps.judges():  # which a judge may not be combined with
        return None
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 leaves the last trainer's there
    make = {"RLOO": steps.rloo, "Online DPO": steps.online_dpo}[algorithm]
    model, tokenizer = models.load("tiny", device=device)
    return make(model, tokenizer, tempfile.mkdtemp(prefix="algorithms-"), **options)


def main() -> None:
    """Run every case."""
    options = recording.begin(__doc__)
    torch.set_num_threads(1)
    for case in CASES:
        made = build(case, options.device)
        if made is None:
            print(f"{case:44s} not here, in trl {trl.__version__}", flush=True)
            continue
        record(case, compare(made, (CASES[case].get("max_steps", 1),)), options.device)


if __name__ == "__main__":
    main()
