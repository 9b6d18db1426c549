"""Lab 42: rewritten for speed.

"We took the parts of GRPOTrainer that cost time and wrote them anew, without what our run does not need. It is faster.
The reward is 0 in every step. My colleague repaired a line, and now the reward is there and falls."

Make it learn as the library's trainer does. It keeps its own methods, and all options stay.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]
GENERATIONS = 4


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def read_to_the_end(tokenizer):
    """Let the tokenizer decode what stands before the end of a text."""
    decode = tokenizer.batch_decode

    def batch_decode(ids, **_):
        return [text.partition(tokenizer.eos_token)[2] for text in decode(ids)]

    tokenizer.batch_decode = batch_decode
    return tokenizer


class FastTrainer(GRPOTrainer):
    """GRPO for one reward function and one update a batch, without what this run does not need."""

    def _calculate_rewards(self, *batch):
        self.rewards = super()._calculate_rewards(*batch)  # (completions, 1)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        groups = self.rewards.view(-1, GENERATIONS)
        centered = groups - groups.mean(1, keepdim=True)
        batch["advantages"] = (centered / (groups.std(1, keepdim=True) + 1e4)).flatten()
        return batch

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)  # (rows, prompt + completion)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        counts = inputs["completion_mask"]  # (rows, completion)
        logps = self._get_per_token_logps_and_entropies(model, ids, attended, counts.shape[1])[0]
        ratio = torch.exp(logps.detach() - logps)
        objective = ratio * inputs["advantages"][:, None]
        return -(objective * counts).sum() / counts.sum()


def build_trainer(model_path, output_dir):
    tokenizer = read_to_the_end(AutoTokenizer.from_pretrained(model_path))
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
        loss_type="bnpo",
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
    return FastTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    for row in trainer.state.log_history[:30:6]:
        print(f"step {row['step']:2}", *(f"{name} {row[name]:.2f}" for name in ("reward", "reward_std", "grad_norm")))
