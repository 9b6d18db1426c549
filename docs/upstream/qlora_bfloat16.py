"""QLoRA's adapters in bfloat16: what a step changes. Arguments: a model, a learning rate, a number of steps."""

import sys
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

name, rate, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])


class Changed(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def on_optimizer_step(self, args, state, control, model=None, **_):
        for half in ("lora_A", "lora_B") if state.global_step + 1 in (2, 20, steps) else ():
            pairs = [(p, self.before[n]) for n, p in model.named_parameters() if half in n]
            share = sum((p != b).sum().item() for p, b in pairs) / sum(b.numel() for _, b in pairs)
            print(f"step {state.global_step + 1} changed {share:.2%} of {half}")


for cast_back in (False, True):
    set_seed(0)
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized, dtype=torch.float32)
    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(20) for b in range(20)]})
    args = GRPOConfig("out", max_steps=steps, learning_rate=rate, lr_scheduler_type="constant", report_to=[],
                      bf16=False, per_device_train_batch_size=16, num_generations=8, max_completion_length=4,
                      save_strategy="no")  # fmt: skip
    trainer = GRPOTrainer(model, lambda completions, **_: [float(i % 2) for i in range(len(completions))], args, data,
                          processing_class=AutoTokenizer.from_pretrained(name), callbacks=[Changed()],
                          peft_config=LoraConfig(r=8, target_modules="all-linear"))  # fmt: skip
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    for p in trained if cast_back else ():
        p.data = p.data.float()
    print("cast back" if cast_back else "as trl makes them", {p.dtype for p in trained})
    trainer.train()
