"""OnlineDPOTrainer trains a bfloat16 checkpoint in bfloat16 (trl 1.16). Argument: a model, by folder or hub id."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained("bfloat16")
tokenizer.save_pretrained("bfloat16")  # a checkpoint as most are


class Changed(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def on_optimizer_step(self, args, state, control, model=None, **_):
        pairs = [(p, self.before[n]) for n, p in model.named_parameters()]
        changed, all_of = sum((p != b).sum().item() for p, b in pairs), sum(b.numel() for _, b in pairs)
        if state.global_step + 1 == args.max_steps:
            print(f"step {args.max_steps} at {args.learning_rate} changed {changed / all_of:.2%} of the elements")


def reward(completions, **_):
    return [float(i % 2) for i in range(len(completions))]


def run(kind, config, rate, **options):
    set_seed(0)
    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(20) for b in range(20)]})
    args = config("out", max_steps=3, learning_rate=rate, lr_scheduler_type="constant", per_device_train_batch_size=16,
                  save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
                  **options)  # fmt: skip
    trainer = kind(model="bfloat16", reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer,
                   callbacks=[Changed()])  # fmt: skip
    print(kind.__name__, {p.dtype for p in trainer.model.parameters()})
    trainer.train()


for rate in (5e-7, 1e-5):
    run(OnlineDPOTrainer, OnlineDPOConfig, rate)
    run(OnlineDPOTrainer, OnlineDPOConfig, rate, model_init_kwargs={"dtype": "float32"})
    run(GRPOTrainer, GRPOConfig, rate, num_generations=8, max_completion_length=4)
