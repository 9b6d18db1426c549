"""Lab 04: the adapter that never trains.

A small Qwen2 learns sums by GRPO in trl 0.14 with LoRA: the model is frozen, adapters beside its layers learn.

"The first step ends in 'element 0 of tensors does not require grad and does not have a grad_fn'. To save memory we had
switched on bf16 and checkpointing on the same day, and half of us blame the one, half the other."

Make it learn, and fill in ANSWER: it is about the script as you found it. The adapter stays as it is, and each layer is
computed again in the backward pass.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # which of the two newcomers the error needs: "bf16" or "checkpointing"
    "steps_in_float32": None,  # how many steps are done when bf16 alone is switched off
    "steps_without_checkpointing": None,  # how many when checkpointing alone is switched off
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=30,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=3,
        per_device_train_batch_size=24,  # prompts, in trl 0.14
        gradient_accumulation_steps=1,
        num_generations=4,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.0,
        beta=0.04,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        bf16=True,
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
        peft_config=adapter,
    )
    trainer.generation_config = GenerationConfig(
        max_new_tokens=4,
        do_sample=True,
        temperature=1.0,
        use_cache=False,
        num_return_sequences=config.num_generations,
        pad_token_id=tokenizer.pad_token_id,
    )
    return trainer


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
