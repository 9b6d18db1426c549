from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import BasePairwiseJudge, OnlineDPOConfig, OnlineDPOTrainer


class ShorterWins(BasePairwiseJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        return [int(len(second) < len(first)) for first, second in completions]


def main():
    name = "Qwen/Qwen2-0.5B-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(name)
    args = OnlineDPOConfig(
        output_dir="Qwen2-0.5B-OnlineDPO",
        per_device_train_batch_size=4,
        learning_rate=5e-6,
        max_new_tokens=53,
        gradient_checkpointing=True,
        beta=0.1,
    )
    trainer = OnlineDPOTrainer(
        model=model,
        judge=ShorterWins(),
        args=args,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files="data/chat.jsonl", split="train").remove_columns("answer"),
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.push_to_hub()


if __name__ == "__main__":
    main()
