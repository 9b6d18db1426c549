"""Lab 15: what the first run taught.

"The adapter that came out of our first run answers two sums of three. GRPO was to go on from there, and its first
rewards are 0.45, what the model answers without any adapter. There is no error, and the reward rises a little. I
trained the first run twice as long, and GRPO began at 0.45 again."

Begin where the first run ended, and make it better. One adapter must come out, for the model as it was given.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def first_run(model, tokenizer):
    """Train what is trainable on right answers, as the run did that this one follows."""
    texts = [prompt + answer + tokenizer.eos_token for prompt, answer in SUMS]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, (prompt, _) in zip(labels, SUMS):
        row[: len(prompt)] = -100  # one token for each character
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=5e-3)
    for _ in range(12):
        model(**batch, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def build_trainer(model_path, output_dir):
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    adapter = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    model.add_adapter(adapter)
    first_run(model, tokenizer)
    peft_config = adapter
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=50,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=5,
        per_device_train_batch_size=24,  # prompts, in trl 0.14
        gradient_accumulation_steps=1,
        num_generations=4,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.0,
        beta=0.04,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    # Completions are generated without the cache: checkpointed layers do not keep it.
    trainer.generation_config.use_cache = False
    return trainer


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    print("reward:", [round(row["reward"], 2) for row in trainer.state.log_history if "reward" in row])
