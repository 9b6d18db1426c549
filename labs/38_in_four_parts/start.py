"""Lab 38: in four parts.

"Our loop learned well, until the batch did not fit any more. Now we cut it into four parts and add up their gradients:
the same completions, the same options, and the update once for all of them. Since then it forgets what it could. My
colleague says that the learning rate was too high all the time, and that we were lucky."

Make it learn as it did. The batch is still cut; optimizer, momentum and learning rate stay. Fill in ANSWER as well.
"""

import pathlib
import random

import torch

ANSWER = {
    "verdict": "",  # "rate": it was too high before too; "scale": the cut made the gradient another; or "luck"
    "gradient_scale": None,  # norm of the gradient that a step uses, over that of the same completions in one part
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]
GROUP = 8  # completions of one prompt, compared with each other
PARTS = 4  # of a batch, which does not fit into memory as a whole


def generate(model, tokenizer, rows):
    """Return for GROUP completions of each prompt: ids, mask of the prompt, what counts, advantages; and the reward."""
    prompts = [prompt for prompt, _ in rows for _ in range(GROUP)]
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=4, do_sample=True, top_k=0, top_p=1.0)
    written = ids[:, batch["input_ids"].shape[1] :]
    said = tokenizer.batch_decode(written, skip_special_tokens=True)
    right = [answer for _, answer in rows for _ in range(GROUP)]
    rewards = torch.tensor([float(text.strip() == answer) for text, answer in zip(said, right)], device=model.device)
    groups = rewards.view(-1, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)
    end = (written == model.config.eos_token_id).int()
    counts = (end.cumsum(1) - end == 0).float()  # up to the first end
    return (ids, batch["attention_mask"], counts, advantages), rewards.mean().item()


def log_probs(model, ids, prompt_mask, length):
    """Return the log-probability of each of the last `length` tokens."""
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(ids), length)], dim=1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    return logits.log_softmax(-1).gather(2, ids[:, -length:, None]).squeeze(2)


def train(model, tokenizer, steps):
    chance = random.Random(0)
    torch.manual_seed(0)
    model.eval()  # it has no dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        drawn, reward = generate(model, tokenizer, chance.sample(SUMS, 16))
        optimizer.zero_grad()
        for ids, prompt_mask, counts, advantages in zip(*(tensor.chunk(PARTS) for tensor in drawn)):
            scores = log_probs(model, ids, prompt_mask, counts.shape[1])
            loss = -(scores * counts * advantages[:, None]).sum() / counts.sum()
            loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():+.4f}  grad_norm {norm:.2f}  reward {reward:.2f}")


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    tokenizer = AutoTokenizer.from_pretrained(tiny, padding_side="left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train(AutoModelForCausalLM.from_pretrained(tiny).to(device), tokenizer, steps=50)
