"""What generation in training is worth: greedy accuracy by mode, checkpointing kind, cache, padding and attention.

Eras: trl-0.14, trl-0.14-tf-4.52, trl-0.15, today.
"""

import recording

from failurelab import gradients
from failurelab_course.experiments import models, observe


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
