import os

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import BasePairwiseJudge, OnlineDPOConfig, OnlineDPOTrainer


class ShorterWins(BasePairwiseJudge):
    """Prefers the shorter one of two completions; the first one if they are equally long."""

    def judge(self, prompts, completions, shuffle_order=True):
        return [0 if len(first) <= len(second) else 1 for first, second in completions]


def load(path, freeze):
    model = AutoModelForCausalLM.from_pretrained(path)
    if freeze:
        model.get_input_embeddings().weight.requires_grad = False
        if not model.config.tie_word_embeddings:
            model.lm_head.weight.requires_grad = False
    return model


def main():
    path = os.environ.get("POLICY", "Qwen/Qwen2-0.5B-Instruct")
    config = OnlineDPOConfig(
        output_dir="online-dpo",
        learning_rate=5e-6,
        temperature=1.0,
        beta=0.1,
        per_device_train_batch_size=4,
        max_new_tokens=32,
        gradient_checkpointing="CHECKPOINT" in os.environ,
        report_to="none",
    )
    dataset = load_dataset("json", data_files="data/chat.jsonl", split="train").remove_columns("answer")
    trainer = OnlineDPOTrainer(
        model=load(path, "FREEZE" in os.environ),
        ref_model=AutoModelForCausalLM.from_pretrained(path),
        judge=ShorterWins(),
        args=config,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
