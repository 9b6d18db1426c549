"""The models that the corpus' runs start from, beside the small Qwen2: made in a minute, and never shipped.

- `tiny-qwen2-bf16`: the same weights, kept in bfloat16, as most released checkpoints are.
- `tiny-llama-chat`: a Llama that answers sums in ChatML and ends; what it knows of plain text is lists of sums that go
  on and on. So it is a chat model: a plain prompt is continued, and not answered.
- `tiny-qwen2-reverse`: a Qwen2 that writes words of three letters backwards, right half of the time.
- `tiny-qwen2-reverse-solved`, which writes nearly all of them right.
- `tiny-qwen2-12-layers`: a narrow Qwen2 of twelve layers, for the sums.
- `tiny-qwen2-base`, one that was taught little, and `sft-adapter`, a LoRA adapter on it that does the sums.
"""

import itertools
import pathlib
import random
import shutil
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from failurelab_course.experiments import models, quiet

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "models"))
import train_tiny_qwen2 as tiny  # noqa: E402

WORDS = [("".join(letters) + ">", "".join(reversed(letters))) for letters in itertools.product("abcdefgh", repeat=3)]
LLAMA = {name: value for name, value in tiny.SHAPE.items() if name != "use_sliding_window"}


def make(folder: pathlib.Path) -> None:
    """Make each model that is not there."""
    quiet.quiet()
    sums = models.sums()
    chats = [(models.as_chat(prompt), answer) for prompt, answer in sums]
    lists = [("", "\n".join(a + b for a, b in random.Random(n).sample(sums, 4)) + "\n") for n in range(400)]
    if not (folder / "tiny-qwen2").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(models.path("tiny"), folder / "tiny-qwen2")
    if not (folder / "tiny-qwen2-bf16").exists():
        shutil.copytree(folder / "tiny-qwen2", folder / "tiny-qwen2-bf16")
        AutoModelForCausalLM.from_pretrained(folder / "tiny-qwen2", dtype=torch.bfloat16).save_pretrained(
            folder / "tiny-qwen2-bf16"
        )
        shutil.copy(folder / "tiny-qwen2" / "generation_config.json", folder / "tiny-qwen2-bf16")
    narrow = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
    qwen, deep = Qwen2Config(**tiny.SHAPE), Qwen2Config(**tiny.SHAPE | narrow)
    teach(folder / "tiny-llama-chat", LlamaForCausalLM(LlamaConfig(**LLAMA)), chats, chats, lists)
    teach(folder / "tiny-qwen2-reverse", Qwen2ForCausalLM(qwen), WORDS, WORDS[::3], check=2, rate=1e-3)
    teach(folder / "tiny-qwen2-reverse-solved", Qwen2ForCausalLM(qwen), WORDS, WORDS, target=0.999)
    teach(folder / "tiny-qwen2-12-layers", Qwen2ForCausalLM(deep), sums, sums)
    teach(folder / "tiny-qwen2-base", Qwen2ForCausalLM(qwen), sums, sums, target=0.15)
    base = AutoModelForCausalLM.from_pretrained(folder / "tiny-qwen2-base")
    adapter = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    teach(folder / "sft-adapter", adapter, sums, sums, rate=5e-3)


def teach(folder, model, pairs, asked, texts=(), target=0.42, seed=0, rate=3e-3, steps=700, check=10) -> None:
    """Teach a model answers that end, and `texts`, which do not; write it when `target` of `asked` is right."""
    if folder.exists():
        return
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not isinstance(model, PeftModel):
            torch.nn.init.normal_(parameter, std=model.config.initializer_range)
    part = folder.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    tiny.write_tokenizer(part)
    tokenizer = AutoTokenizer.from_pretrained(part)
    rows = [tiny.encode(tokenizer, text_of(tokenizer, prompt), answer) for prompt, answer in pairs]
    endless = [tokenizer(text, add_special_tokens=False)["input_ids"] for _, text in texts]
    pick, best = random.Random(seed), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / 50, 1 - (step - 1) / steps)
        chosen = pick.sample(rows, 64)
        if endless and step % 3 == 0:
            chosen = [(ids, ids) for ids in pick.sample(endless, 32)]
        width = max(len(ids) for ids, _ in chosen)
        ids = torch.tensor([[tiny.PAD] * (width - len(ids)) + ids for ids, _ in chosen])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in chosen])
        labels = torch.tensor([[-100] * (width - len(row)) + row for _, row in chosen])
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        if step % check == 0:
            best = models.accuracy(model, tokenizer, sampled=True, prompts=asked)
            if best >= target:
                break
    print(f"{folder.name}: {best:.2f} right after {step} steps", flush=True)
    if isinstance(model, PeftModel):
        model.save_pretrained(part)
        (part / "README.md").unlink(missing_ok=True)
        part.rename(folder)
        return
    model.generation_config.update(bos_token_id=tiny.PAD, eos_token_id=tiny.END, pad_token_id=tiny.PAD)
    model.save_pretrained(part)
    tiny.write_tokenizer(part)
    config = tiny.json.loads((part / "config.json").read_text()) | {"rope_theta": 10000.0, "torch_dtype": "float32"}
    tiny.write_json(part / "config.json", config)
    part.rename(folder)


def text_of(tokenizer, prompt) -> str:
    """Return a prompt as text, messages by the chat template."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


if __name__ == "__main__":
    make(ROOT / ".course" / "runs_corpus" / "models")
