"""Lab 40: one lucky completion.

"With four completions a prompt, one lucky answer pulled too hard, so we bound the advantages in a subclass of
GRPOTrainer. The bound is far away, and was reached in none of the steps that I looked at. All the same the reward falls
since then. Every tensor has a gradient, and the reward of each completion is right."

Make it learn. Sums, reward, number of steps and learning rate stay.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]
GENERATIONS = 4
BOUND = 3.0


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


class BoundedTrainer(GRPOTrainer):
    """GRPO with advantages between -BOUND and BOUND."""

    def _calculate_rewards(self, *batch):
        self.rewards = super()._calculate_rewards(*batch)  # (completions, reward functions)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        groups = self.rewards.sum(1).view(-1, GENERATIONS)  # (prompts, completions of each)
        centered = groups - groups.mean(1, keepdim=True)
        advantages = centered / (groups.std(1, keepdim=True) + 1e-4)
        bounded = [column.clamp(-BOUND, BOUND) for column in advantages.unbind(1)]
        batch["advantages"] = torch.cat(bounded)
        return batch


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=30,
        learning_rate=8e-4,
        lr_scheduler_type="linear",
        warmup_steps=2,
        per_device_train_batch_size=96,
        num_generations=GENERATIONS,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
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
    return BoundedTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    for row in trainer.state.log_history[:30:6]:
        print(f"step {row['step']:2}", *(f"{name} {row[name]:.2f}" for name in ("reward", "reward_std", "grad_norm")))
