import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--lr", type=float, default=2e-5)
parser.add_argument("--reentrant", action="store_true")
parser.add_argument("--temperature", type=float, default=1.0)
cli = parser.parse_args()


def length_reward(completions, **kwargs):
    return [-abs(20 - len(c)) / 20 for c in completions]


def main():
    torch.manual_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(cli.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(cli.model, torch_dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    args = GRPOConfig(
        output_dir="out",
        learning_rate=cli.lr,
        num_generations=4,
        per_device_train_batch_size=4,
        temperature=cli.temperature,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": cli.reentrant},
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[length_reward],
        args=args,
        train_dataset=load_dataset("json", data_files="data/sums.jsonl", split="train"),
        processing_class=tokenizer,
    )
    trainer.train()


if __name__ == "__main__":
    main()
