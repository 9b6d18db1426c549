from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

base = "Qwen/Qwen2-0.5B"
tokenizer = AutoTokenizer.from_pretrained(base)
model = AutoModelForCausalLM.from_pretrained(base)
# go on from the SFT adapter
model = PeftModel.from_pretrained(model, "adapters/sft", is_trainable=True)

trainer = GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, answer, **kw: [float(a in c) for a, c in zip(answer, completions)],
    args=GRPOConfig(
        output_dir="out", learning_rate=5e-6, num_generations=4, per_device_train_batch_size=4, temperature=1.0
    ),
    train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
)
trainer.train()
