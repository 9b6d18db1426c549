"""Lab 14: the reward of our own loop.

"The reward of our own loop starts at 0.01. The same model, evaluated, answers four sums in ten. We had moved from
transformers 4.52 to 4.56. There is no warning, only a notice about caching, as before; every tensor has a gradient, and
the reward function is right: I fed it by hand."

Make it learn. Activations are not kept, for the real model would not fit.
"""

import pathlib
import random

import torch

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]
GROUP = 8  # completions of one prompt, compared with each other


def sample(model, tokenizer, prompts):
    """Return the completions of each prompt, GROUP times, as ids behind their prompts."""
    repeated = [each for each in prompts for _ in range(GROUP)]
    batch = tokenizer(repeated, return_tensors="pt", padding=True).to(model.device)
    with torch.no_grad():
        sequences = model.generate(**batch, max_new_tokens=4, do_sample=True, top_k=0, top_p=1.0)
    return sequences, batch["attention_mask"]


def log_probs(model, sequences, prompt_mask):
    """Return the log-probability of each completion token, and which of them count: up to the first end token."""
    length = sequences.shape[1] - prompt_mask.shape[1]
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(sequences), length)], dim=1)
    logits = model(input_ids=sequences, attention_mask=mask).logits[:, -length - 1 : -1]
    chosen = sequences[:, -length:]
    ended = (chosen == model.config.eos_token_id).cumsum(1) - (chosen == model.config.eos_token_id).int()
    return logits.log_softmax(-1).gather(2, chosen.unsqueeze(2)).squeeze(2), (ended == 0).float()


def train(model, tokenizer, steps):
    chance = random.Random(0)
    torch.manual_seed(0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(steps):
        rows = chance.sample(SUMS, 16)
        sequences, prompt_mask = sample(model, tokenizer, [prompt for prompt, _ in rows])
        said = tokenizer.batch_decode(sequences[:, prompt_mask.shape[1] :], skip_special_tokens=True)
        right = [answer for _, answer in rows for _ in range(GROUP)]
        rewards = torch.tensor([float(text.strip() == answer) for text, answer in zip(said, right)]).to(model.device)
        groups = rewards.view(-1, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)
        scores, counts = log_probs(model, sequences, prompt_mask)
        loss = -(scores * counts * advantages.unsqueeze(1)).sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():+.4f}  reward {rewards.mean().item():.2f}")


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    tokenizer = AutoTokenizer.from_pretrained(tiny, padding_side="left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train(AutoModelForCausalLM.from_pretrained(tiny).to(device), tokenizer, steps=50)
