"""Lab 28: repaired last year.

A small Qwen2 learns sums by GRPO in trl 0.22. Its embeddings are shared with another service, so they are frozen.

"This run learned nothing, a year ago, and use_reentrant=False repaired it. The line is still there. Since we moved to
trl 0.22 the reward is flat again, as if the line were gone."

Make it learn again: the embeddings come out as they went in, and each layer is computed again in the backward pass, for
without that the real model does not fit. Fill in ANSWER too: it is about the script as you found it.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # "the line was never right", "the line is undone" or "something else is broken"
    "tensors_changed": None,  # how many tensors training changed
    "undone_by": "",  # the function of trl that makes the difference
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.get_input_embeddings().requires_grad_(False)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        warmup_steps=4,
        per_device_train_batch_size=96,  # completions
        gradient_accumulation_steps=1,
        num_generations=4,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
