"""The models that the fresh half starts from, beside those of small_models.py: other tasks, sizes and families.

- `copier`: a Qwen2 of three layers that writes words of four letters again: `copy: noun ->`.
- `counter`: a Qwen2 with untied embeddings that counts a letter in a word: `a in banana?`.
- `larger-chat`: a Llama that names the larger of two numbers in ChatML and ends; plain text it goes on with.
- `larger-chat-tokenizer`: its tokenizer as the base model has it, which ends texts with another token.
- `copier-bf16`: the copier, kept in bfloat16.
"""

import pathlib
import random
import shutil

import small_models
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from failurelab_course.experiments import models, quiet

tiny = small_models.tiny
PICK = random.Random(5)
WORDS = sorted({"".join(PICK.choices("aeioknstr", k=4)) for _ in range(330)})
COPIES = [(f"copy: {word} ->", word) for word in WORDS]
COUNTED = sorted({"".join(PICK.choices("abc", k=5)) for _ in range(400)})
COUNTS = [(f"{letter} in {word}?", str(word.count(letter))) for word in COUNTED for letter in "ab"]
PAIRS = [tuple(PICK.sample(range(10, 60), 2)) for _ in range(360)]
LARGER = [(f"{a} or {b}", str(max(a, b))) for a, b in PAIRS]


def make(folder: pathlib.Path) -> None:
    """Make each model that is not there."""
    quiet.quiet()
    other = {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 192}
    llama = {name: value for name, value in tiny.SHAPE.items() if name != "use_sliding_window"}
    torch.manual_seed(0)
    small_models.teach(folder / "copier", Qwen2ForCausalLM(Qwen2Config(**tiny.SHAPE | other)), COPIES, COPIES, check=5)
    untied = tiny.SHAPE | {"tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 128}
    small_models.teach(folder / "counter", Qwen2ForCausalLM(Qwen2Config(**untied)), COUNTS, COUNTS[::2], target=0.5)
    chats = [(models.as_chat(prompt), answer) for prompt, answer in LARGER]
    lists = [("", ", ".join(prompt for prompt, _ in PICK.sample(LARGER, 5)) + ", ") for _ in range(300)]
    small_models.teach(folder / "larger-chat", LlamaForCausalLM(LlamaConfig(**llama)), chats, chats, lists, target=0.5)
    if not (folder / "larger-chat-tokenizer").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder / "larger-chat")
        other = folder / "larger-chat-tokenizer"
        shutil.copytree(folder / "larger-chat", other, ignore=lambda *_: ["model.safetensors"])
        path = other / "tokenizer_config.json"
        ends = f'"eos_token": "{tokenizer.eos_token}"'
        path.write_text(path.read_text().replace(ends, '"eos_token": "<|endoftext|>"'))
    if not (folder / "copier-bf16").exists():
        shutil.copytree(folder / "copier", folder / "copier-bf16")
        model = AutoModelForCausalLM.from_pretrained(folder / "copier", dtype=torch.bfloat16)
        model.save_pretrained(folder / "copier-bf16")


if __name__ == "__main__":
    make(small_models.ROOT / ".course" / "runs_corpus" / "models")
