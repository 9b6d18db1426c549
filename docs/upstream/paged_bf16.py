"""Continuous batching casts the policy itself to bfloat16 (trl 1.16). Argument: a model, by folder or hub id."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])


class GivesBack(GRPOTrainer):
    """After each generation the weights are those that were there before, as the optimizer left them."""

    def _generate_single_turn(self, *given, **options):
        kept = {weight: weight.data for weight in self.model.parameters()}
        answer = super()._generate_single_turn(*given, **options)
        for weight, data in kept.items():
            weight.data = data
        return answer


def share_moved(before, now):
    moved = sum(int((now[name].float() != before[name].to(now[name].dtype).float()).sum()) for name in before)
    return moved / sum(weight.numel() for weight in before.values())


for paged, kind in ((False, GRPOTrainer), (True, GRPOTrainer), (True, GivesBack)):
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(20) for b in range(20)]})
    args = GRPOConfig("out", max_steps=3, per_device_train_batch_size=16, num_generations=8, max_completion_length=4,
                      bf16=True, use_cpu=not torch.cuda.is_available(), save_strategy="no", report_to=[],
                      use_transformers_continuous_batching=paged, lr_scheduler_type="constant",
                      disable_tqdm=True)  # fmt: skip
    trainer = kind(model, lambda completions, **_: [float(i % 2) for i in range(len(completions))], args, data,
                   processing_class=tokenizer)  # fmt: skip
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer.train()
    now = dict(model.named_parameters())
    dtypes = {str(weight.dtype) for weight in now.values()}
    print(f"paged {paged}, {kind.__name__}: weights in {dtypes}, {share_moved(before, now):.1%} moved in 3 steps")
