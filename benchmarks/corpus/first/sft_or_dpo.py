import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

which = sys.argv[1]
name = "Qwen/Qwen2-0.5B"
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(name)
data = load_dataset("json", data_files=f"data/{which}.jsonl", split="train")
if which == "sft":
    trainer = SFTTrainer(
        model, args=SFTConfig("out", per_device_train_batch_size=4, num_train_epochs=1, learning_rate=2e-5),
        train_dataset=data, processing_class=tokenizer,
    )
else:
    trainer = DPOTrainer(
        model, args=DPOConfig("out", beta=0.1, per_device_train_batch_size=4, learning_rate=5e-6),
        train_dataset=data, processing_class=tokenizer,
    )
trainer.train()
model.save_pretrained("out/final")
