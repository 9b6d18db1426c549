"""Lab 37: like the demo.

"Our chat demo answers nearly half of the sums, with the same checkpoint and at the same temperature. In training it is
one in twelve, and thirty steps hardly change that. I printed the prompts of both, and they are the same."

Find what differs, fill in ANSWER, and let the run train what the demo shows. Number of steps and learning rate stay.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # "sampling", "weights", "prompt" or "reward"
    "temperature_in_training": None,  # at which the run as you found it draws
    "tokens_in_demo": None,  # that the demo generates from, for the first sum
    "tokens_in_training": None,  # that the run as you found it generates from, for the first sum
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def as_chat(tokenizer, question):
    """Return the ids that the demo generates from, for one question of a user."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def demo(model, tokenizer):
    """Return the share of sums that the chat demo answers right, each asked once at temperature 1."""
    right = 0.0
    for question, answer in SUMS[::4]:
        ids = torch.tensor([as_chat(tokenizer, question)], device=model.device)
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=True, top_k=0)
        right += exact([tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)], [answer])[0]
    return right / len(SUMS[::4])


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
        num_generations=4,
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
    prompts = [tokenizer.decode(as_chat(tokenizer, question), skip_special_tokens=True) for question, _ in SUMS]
    rows = Dataset.from_dict({"prompt": prompts, "answer": [answer for _, answer in SUMS]})
    return GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    tokenizer = trainer.processing_class
    print("prompt of the demo    ", repr(tokenizer.decode(as_chat(tokenizer, SUMS[0][0]), skip_special_tokens=True)))
    print("prompt in training    ", repr(trainer.train_dataset[0]["prompt"]))
    print(f"right in the demo      {demo(trainer.model.eval(), tokenizer):.2f}")
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward in training     {rewards[0]:.2f} -> {rewards[-1]:.2f}")
