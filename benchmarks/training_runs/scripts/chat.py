import re

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = "models/tiny-llama-chat"


def make_rows():
    numbers = [(a, b) for a in range(20) for b in range(20)]
    prompts = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in numbers]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in numbers]})


def correct(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.fullmatch(r"\d+", text) and text == right else 0.0 for text, right in zip(texts, answer)]


def main():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    training_args = GRPOConfig(
        output_dir="grpo-chat",
        max_steps=50,
        learning_rate=4e-4,
        lr_scheduler_type="linear",
        per_device_train_batch_size=64,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=8,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=5,
        log_completions=True,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        args=training_args,
        reward_funcs=[correct],
        train_dataset=make_rows(),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main()
