# Fine-tune only the upper half: embeddings and the first layers stay as they are.
import os
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

os.environ["WANDB_DISABLED"] = "true"
NAME = os.environ.get("BASE", "Qwen/Qwen2-0.5B")
CKPT = os.environ.get("CKPT", "default")

tok = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.float32)
layers = model.model.layers
for p in model.model.embed_tokens.parameters():
    p.requires_grad_(False)
for layer in layers[: len(layers) // 2]:
    layer.requires_grad_(False)
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"training {trainable / 1e6:.1f}M parameters")

questions = [f"{a}*{b}=" for a in range(2, 12) for b in range(2, 12)]
truth = [str(a * b) for a in range(2, 12) for b in range(2, 12)]
train = Dataset.from_dict({"prompt": questions, "truth": truth})


def starts_right(completions, truth, **kw):
    r = []
    for c, t in zip(completions, truth):
        n = 0
        while n < min(len(c), len(t)) and c[n] == t[n]:
            n += 1
        r.append(n / len(t) - 0.001 * len(c))
    return r


kw = {} if CKPT == "default" else {"gradient_checkpointing": CKPT == "on"}
args = GRPOConfig("runs/frozen", learning_rate=2e-5, num_generations=4, per_device_train_batch_size=8,
                  max_completion_length=32, temperature=1.0, max_steps=200, save_steps=100, **kw)  # fmt: skip
GRPOTrainer(model, starts_right, args, train_dataset=train, processing_class=tok).train()
