"""Lab 25: a second engine.

A small Qwen2 learns sums by GRPO in today's trl. Its completions come from an engine of its own.

"Since Tuesday we generate with an engine beside the trainer, in bfloat16, and it is fast. All gradients are there, and
the weights move. The reward has not moved in a week. Before Tuesday the same run learned."

Make it learn. The engine stays: completions are drawn by a model of its own in bfloat16.
"""

import copy
import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


class Engine:
    """Generates beside the trainer, with a copy of the model in bfloat16, as our server does."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = copy.deepcopy(model).to(torch.bfloat16).eval(), tokenizer

    @torch.no_grad()
    def __call__(self, prompts, trainer):
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.model.device)
        out = self.model.generate(
            **batch, max_new_tokens=4, do_sample=True, top_k=0, output_logits=True, return_dict_in_generate=True
        )
        new = out.sequences[:, batch.input_ids.shape[1] :]
        logps = torch.stack(out.logits, 1).float().log_softmax(-1).gather(2, new[..., None])[..., 0]
        answer = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt, mask, ids, scores in zip(batch.input_ids, batch.attention_mask, new.tolist(), logps.tolist()):
            end = ids.index(self.tokenizer.eos_token_id) + 1 if self.tokenizer.eos_token_id in ids else len(ids)
            answer["completion_ids"].append(ids[:end])
            answer["prompt_ids"].append(prompt[mask.bool()].tolist())
            answer["logprobs"].append(scores[:end])
        return answer


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=128,  # completions
        num_generations=8,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        activation_checkpointing=False,
        bf16=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    engine = Engine(model, tokenizer)
    return GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        rollout_func=engine,
    )


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first steps {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")
