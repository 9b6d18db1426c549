"""Without Triton the fused head scores the prompt too (trl 1.15, 1.16). Argument: a model, by folder or id.

The ablation has `add_fused_lm_head` score the labelled positions alone, as where Triton runs; the kernel is the same.
"""

import gc
import sys
from unittest import mock

import torch
import trl.trainer.utils as utils
from transformers import AutoModelForCausalLM

COMPLETION, VOCABULARY = 4, 32768


def peak_of(step):
    """Return the peak of what torch allocates while a step runs, in MiB, from every allocation that it tells."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / 2**20


def train(ids, labels, compact):
    """Make a forward and a backward pass; return the peak in MiB, and the log-probabilities."""
    kept = []

    def step():
        kept.append(model(ids, labels=labels, fused_lm_head=True).log_probs)
        kept[0].sum().backward()

    with mock.patch.object(utils, "_use_triton", lambda device: compact):
        peak = peak_of(step)
    model.zero_grad()
    return peak, kept[0].detach()


model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model.resize_token_embeddings(VOCABULARY)
utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
for prompt in (24, 156):
    ids = torch.randint(3, 250, (4, prompt + COMPLETION), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :prompt] = -100
    (peak, scores), (peak_labelled, scores_labelled) = (train(ids, labels, compact) for compact in (False, True))
    apart = float((scores - scores_labelled).abs().max())
    print(f"prompt {prompt}, completion {COMPLETION}: as it comes {peak:.0f} MiB, labelled positions alone "
          f"{peak_labelled:.0f} MiB; largest difference of the log-probabilities {apart:.1g}")  # fmt: skip
