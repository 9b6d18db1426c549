"""use_reentrant=False is lost at the first generation (trl 0.22 to 0.25). Argument: a model, by folder or hub id."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer


def kinds(model):
    inside = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    return {m._gradient_checkpointing_func.keywords.get("use_reentrant") for m in inside}


for cure in (False, True):
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
    model.get_input_embeddings().requires_grad_(False)
    if cure:
        model.enable_input_require_grads()
    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(20) for b in range(20)]})
    args = GRPOConfig("out", max_steps=3, learning_rate=1e-3, per_device_train_batch_size=16, num_generations=8,
                      max_completion_length=4, gradient_checkpointing=True, bf16=False, save_strategy="no",
                      gradient_checkpointing_kwargs={"use_reentrant": False}, report_to=[])  # fmt: skip
    trainer = GRPOTrainer(model, lambda completions, **_: [float(i % 2) for i in range(len(completions))], args, data,
                          processing_class=AutoTokenizer.from_pretrained(sys.argv[1]))  # fmt: skip
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    changed = sum(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
    print("with enable_input_require_grads()" if cure else "as it is", changed, "of", len(before), kinds(trainer.model))
