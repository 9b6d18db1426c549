"""Lab 32: a perfect reward.

"Since Monday we pay for near misses too, so that the model learns something from a wrong sum. The total reward has
never looked better: it climbs to 1.0 within forty steps. But the people who evaluate say that the model no longer
answers one sum. I think their script is broken."

Who is right? Find out which of the two misleads, the evaluation or the reward. Fill in ANSWER, and make the run learn.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # which of the two misleads: "evaluation" or "reward"
    "distance_last": None,  # what `distance` returns, in the mean of the last four steps, before any repair
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def distance(completions, answer, **_):
    """The cost of an answer: nothing for a right one, up to 1 for one that is ten or more away, or no number at all."""
    costs = []
    for completion, right in zip(completions, answer):
        said = completion.strip()
        miss = abs(int(said) - int(right)) if said.isdecimal() else 10
        costs.append(-min(miss, 10) / 10)
    return costs


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=8e-4,
        lr_scheduler_type="linear",
        warmup_steps=2,
        per_device_train_batch_size=96,
        num_generations=4,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        reward_weights=[1.0, -1.0],  # a right answer earns 1, a miss costs up to 1
        activation_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return GRPOTrainer(
        model=model,
        reward_funcs=[exact, distance],
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
    )


def evaluate(model, tokenizer):
    """Return the share of sums that the model answers right, greedily."""
    prompts = tokenizer([prompt for prompt, _ in SUMS], return_tensors="pt", padding=True, padding_side="left")
    prompts = prompts.to(model.device)
    written = model.eval().generate(**prompts, max_new_tokens=4, do_sample=False)[:, prompts["input_ids"].shape[1] :]
    completions = tokenizer.batch_decode(written, skip_special_tokens=True)
    return sum(exact(completions, [answer for _, answer in SUMS])) / len(SUMS)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    before = evaluate(trainer.model, trainer.processing_class)
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"total reward  {sum(rewards[:10]) / 10:.2f} -> {sum(rewards[-10:]) / 10:.2f}")
    print(f"evaluation    {before:.2f} -> {evaluate(trainer.model, trainer.processing_class):.2f}")
