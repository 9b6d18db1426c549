"""GRPOTrainer's reference lacks what was changed in the policy (trl 0.19 to 1.16). Argument: a model, folder or id.

An adapter that stands for supervised fine-tuning is merged into the policy. The ablation is the same weights, handed
over as a folder of their own.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10) for b in range(10)]})


def merged():
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return model.merge_and_unload().requires_grad_(True)


def first_kl(model):
    set_seed(0)
    args = GRPOConfig("out", max_steps=1, beta=0.04, per_device_train_batch_size=16, num_generations=8, bf16=False,
                      max_completion_length=8, learning_rate=0.0, logging_steps=1, save_strategy="no", report_to=[],
                      use_cpu=True, disable_tqdm=True)  # fmt: skip
    trainer = GRPOTrainer(model, lambda completions, **_: [float(len(c)) for c in completions], args, data,
                          processing_class=tokenizer)  # fmt: skip
    trainer.train()
    return next(row["kl"] for row in trainer.state.log_history if "kl" in row)


print(f"merged in memory: kl at the first step {first_kl(merged()):.3g}")
with tempfile.TemporaryDirectory() as folder:
    merged().save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    print(f"merged, saved and loaded: kl at the first step {first_kl(saved):.3g}")
