import os

import torch
from accelerate import PartialState
from datasets import load_dataset
from peft import LoraConfig, TaskType
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

base = "Qwen/Qwen2-0.5B-Instruct"
placement = {
    "first": {"": 0},
    "rank": {"": PartialState().local_process_index},
    "none": None,
}[os.getenv("PLACE", "first")]

nf4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4, device_map=placement)
tokenizer = AutoTokenizer.from_pretrained(base)
tokenizer.padding_side = "left"


def reward_answer(completions, answer, **kwargs):
    texts = [c[0]["content"] for c in completions]
    return [1.0 if t.strip().endswith(a) else 0.0 for t, a in zip(texts, answer)]


trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[reward_answer],
    train_dataset=load_dataset("json", data_files="data/chat.jsonl")["train"],
    peft_config=LoraConfig(task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    args=GRPOConfig(
        output_dir="qlora", temperature=1.0, learning_rate=1e-4, num_generations=4, per_device_train_batch_size=4,
        max_completion_length=96, gradient_checkpointing=False, save_strategy="no",
    ),
)  # fmt: skip
trainer.train()
