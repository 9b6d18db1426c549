"""What generation in training is worth: greedy accuracy by mode, checkpointing kind, cache, padding and attention.

Eras: trl-0.14, trl-0.14-tf-4.52, trl-0.15, trl-0.22, today.
"""

import pathlib

import frames
import recording

from failurelab import gradients
from failurelab_course.experiments import models, observe


def table_generation(folder: pathlib.Path) -> str:
    """Greedy accuracy of generation, by set-up and version."""
    labels = {
        "eval mode, checkpointing reentrant, cache, mixed lengths, sdpa": "evaluation",
        "train mode, checkpointing off, cache, mixed lengths, sdpa": "train mode, checkpointing off",
        "train mode, checkpointing reentrant, cache, mixed lengths, sdpa": "train mode, reentrant",
        "train mode, checkpointing non-reentrant, cache, mixed lengths, sdpa": "train mode, non-reentrant",
        "train mode, checkpointing non-reentrant, no cache, mixed lengths, sdpa": "non-reentrant, `use_cache=False`",
        "train mode, checkpointing non-reentrant, cache, equal lengths, sdpa": "non-reentrant, prompts of equal length",
        "train mode, checkpointing non-reentrant, cache, equal lengths, eager": "the same with eager attention",
    }
    eras = ("trl-0.14", "trl-0.14-tf-4.52", "trl-0.22", "today")
    runs = frames.read_runs(folder, "generation_matrix", "|".join(labels))
    runs["label"] = runs["case"].map(labels)
    head = ["generation in", *frames.version_heads(runs, eras, "transformers")]
    return frames.grid(head, runs, lambda run: f"{run['greedy_accuracy']:.2f}", label=labels.values(), era=eras)


def main() -> None:
    """Measure every combination and record it."""
    device = recording.begin(__doc__).device
    even = [pair for pair in models.sums() if len(pair[0]) == 6]
    for attention in ("sdpa", "eager"):
        policy, tokenizer = models.load(device=device)
        if attention == "eager":
            from transformers import AutoModelForCausalLM

            policy = AutoModelForCausalLM.from_pretrained(models.path("tiny"), attn_implementation="eager").to(device)
        for kind in ("off", "reentrant", "non-reentrant"):
            if kind != "off":
                gradients.enable_checkpointing(policy, {"use_reentrant": kind == "reentrant"})
            for mode in ("eval", "train"):
                for cache in (True, False):
                    for length, pairs in (("mixed", None), ("equal", even)):
                        accuracy = models.accuracy(
                            policy,
                            tokenizer,
                            prompts=pairs,
                            train_mode=mode == "train",
                            **({} if cache else {"use_cache": False}),
                        )
                        case = (
                            f"{mode} mode, checkpointing {kind}, {'cache' if cache else 'no cache'}, "
                            f"{length} lengths, {attention}"
                        )
                        observe.record("F7", "measured", {"greedy_accuracy": accuracy}, case=case, device=device)
                        print(f"{accuracy:.4f}  {case}")


if __name__ == "__main__":
    main()
