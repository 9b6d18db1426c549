import os
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def main(name="Qwen/Qwen2-0.5B-Instruct", lora=os.getenv("LORA") == "1"):
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    pairs = load_dataset("json", data_files="data/dpo.jsonl", split="train")
    pairs = pairs.map(
        lambda r: {
            "prompt": [{"role": "user", "content": r["prompt"]}],
            "chosen": [{"role": "assistant", "content": r["chosen"]}],
            "rejected": [{"role": "assistant", "content": r["rejected"]}],
        }
    )
    split = pairs.train_test_split(test_size=0.1, seed=1)
    config = DPOConfig(
        output_dir="dpo-out",
        beta=0.1,
        learning_rate=1e-5 if lora else 5e-7,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        gradient_checkpointing=lora,
        max_length=256,
        warmup_steps=10,
        report_to=[],
    )
    peft_config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    trainer = DPOTrainer(
        model=model,
        args=config,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    print("trainable:", sum(p.requires_grad for p in trainer.model.parameters()))
    trainer.train()


if __name__ == "__main__":
    main()
