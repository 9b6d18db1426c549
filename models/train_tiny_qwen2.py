"""Train the small Qwen2 that ships in models/tiny-qwen2, from a seed, and write its model card.

    python models/train_tiny_qwen2.py            trains, and writes the folder, card and figures (half a minute)
    python models/train_tiny_qwen2.py --check    measures what ships; exit status 1 if the card says otherwise

It is stopped when it can do part of its task, so that GRPO has something to improve. The seed is chosen: of a few,
one from which GRPO learns fast, and whose completions suffer when generation is wrong (those of some hardly do). Made
in the era `today`; loads from transformers 4.48 on, for which config.json and tokenizer_config.json are written in
words both understand.
"""

import argparse
import json
import pathlib
import random
import shutil
import sys
import tempfile

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from failurelab_course.experiments import models

FOLDER = pathlib.Path(__file__).resolve().parent / "tiny-qwen2"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = range(3)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHAPE = {
    "vocab_size": len(SPECIAL) + 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.08,
    "attention_dropout": 0.0,
    "use_cache": True,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "bos_token_id": PAD,
    "pad_token_id": PAD,
    "eos_token_id": END,
}
# After these, the logits of the ten digits are kept; any era must give them again
PROBES = ("3+4=", "17+5=2")


def write_tokenizer(folder: pathlib.Path) -> None:
    """Write a byte-level tokenizer without merges: one token a byte, so that any text goes through and comes back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    raw = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    raw.save(str(folder / "tokenizer.json"))
    config = {
        # transformers 5 would write TokenizersBackend, which 4.x does not know; both know this one.
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Without this, generate() is handed token_type_ids, and refuses them.
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "pad_token": SPECIAL[PAD],
        "eos_token": SPECIAL[END],
        "additional_special_tokens": [SPECIAL[START]],
        "model_max_length": SHAPE["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: pathlib.Path, content: dict) -> None:
    """Write JSON that a diff can show."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def train(
    folder: pathlib.Path,
    *,
    seed: int,
    steps: int,
    rate: float,
    batch_size: int,
    chat_share: float,
    target: float,
) -> tuple[Qwen2ForCausalLM, int]:
    """Train from random weights by next-token prediction on the answers, in both forms.

    It stops when the sampled accuracy is `target` in both forms: the step at which a machine gets there varies.

    Returns:
        the model, and the steps taken.

    Raises:
        SystemExit: `steps` were not enough.
    """
    torch.set_num_threads(1)  # so that sums of floats, and with them the weights, do not depend on the machine's cores
    torch.manual_seed(seed)
    pick = random.Random(seed)
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    pairs = models.sums()
    chats = [(models.as_chat(prompt), answer) for prompt, answer in pairs]
    encoded = []
    for prompt, answer in pairs:
        chat = tokenizer.apply_chat_template(models.as_chat(prompt), tokenize=False, add_generation_prompt=True)
        encoded.append([encode(tokenizer, text, answer) for text in (prompt, chat)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / 50, 1 - (step - 1) / steps)
        form = int(pick.random() < chat_share)
        chosen = [encoded[index][form] for index in pick.sample(range(len(pairs)), batch_size)]
        width = max(len(ids) for ids, _ in chosen)
        ids = torch.tensor([[PAD] * (width - len(ids)) + ids for ids, _ in chosen])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in chosen])
        labels = torch.tensor([[-100] * (width - len(labels)) + labels for _, labels in chosen])
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            reached = [models.accuracy(model, tokenizer, sampled=True, prompts=each) for each in (pairs, chats)]
            print(f"step {step}: sampled accuracy {reached[0]:.2f}, in ChatML {reached[1]:.2f}", flush=True)
            if min(reached) >= target:
                return model.eval(), step
    raise SystemExit(f"not there after {steps} steps, nothing written. Next: more --steps, or another --seed.")


def encode(tokenizer, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Return token ids of prompt, answer and end, and the labels, which leave the prompt out."""
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    rest = [*tokenizer(answer, add_special_tokens=False)["input_ids"], END]
    return start + rest, [-100] * len(start) + rest


def measure(model, tokenizer) -> dict:
    """Return the accuracies that the card states, and a few logits."""
    chat = [(models.as_chat(prompt), answer) for prompt, answer in models.sums()]
    draws = [models.accuracy(model, tokenizer, sampled=True, seed=seed) for seed in range(10)]
    digits = tokenizer("0123456789", add_special_tokens=False)["input_ids"]
    logits = {}
    for text in PROBES:
        with torch.no_grad():
            found = model(**tokenizer(text, return_tensors="pt").to(model.device)).logits[0, -1]
        logits[text] = [round(value, 4) for value in found[digits].tolist()]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tensors": len(list(model.parameters())),
        "greedy": round(models.accuracy(model, tokenizer), 4),
        "sampled": round(sum(draws) / len(draws), 4),
        "chat_greedy": round(models.accuracy(model, tokenizer, prompts=chat), 4),
        "chat_sampled": round(
            sum(models.accuracy(model, tokenizer, prompts=chat, sampled=True, seed=seed) for seed in range(10)) / 10, 4
        ),
        "logits": logits,
    }


def write(folder: pathlib.Path, model, settings: dict) -> dict:
    """Write weights, configs, figures and card; return the figures, measured on what was written."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **SHAPE,
        # As 4.x writes them; 5.x reads them too (it would write rope_parameters and dtype, which 4.48 ignores).
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": PAD, "eos_token_id": END, "pad_token_id": PAD})
    figures = measure(*models.load(str(folder)))
    write_json(folder / "figures.json", {"training": settings, "measured": figures})
    (folder / "README.md").write_text(card(folder, settings, figures))
    return figures


def card(folder: pathlib.Path, settings: dict, figures: dict) -> str:
    """Return the model card."""
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != "README.md") / 1e6
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [qwen2, grpo, course]
---

# tiny-qwen2

A Qwen2 of {figures["parameters"]:,} parameters in {figures["tensors"]} tensors ({size:.1f} MB with its tokenizer), for
the GRPO Failure Lab. It adds two numbers from 0 to 19, and is wrong about half of the time, on purpose: GRPO has
something to improve, and a broken run shows. It is of no other use.

- Prompt `3+4=`, completion `7` and `<|im_end|>`; or the same in ChatML, by the chat template.
- Tokenizer: one token a byte, beside `<|endoftext|>` (padding), `<|im_start|>` and `<|im_end|>` (end).
- Loads in transformers 4.48 and later, 5.x included.

Accuracy over all 400 sums (sampled: temperature 1, mean of 10 draws):

| prompt | greedy | sampled |
|---|---|---|
| plain | {figures["greedy"]:.4f} | {figures["sampled"]:.4f} |
| ChatML | {figures["chat_greedy"]:.4f} | {figures["chat_sampled"]:.4f} |

Trained on the answers of these sums by `models/train_tiny_qwen2.py`, from random weights: {settings["steps"]} steps of
{settings["batch_size"]} sums, {settings["chat_share"]:.0%} of the batches in ChatML, AdamW at {settings["rate"]},
falling linearly to zero at step {settings["planned"]} if it ran that far, seed {settings["seed"]}.
The seed is chosen: of a few, one from which GRPO learns fast, and whose completions suffer when generation is wrong.
That script wrote this card and `figures.json`. Licence: Apache-2.0.
"""


def check() -> int:
    """Print what ships and what the card's figures say; return the exit status."""
    claimed = json.loads((FOLDER / "figures.json").read_text())["measured"]
    found = measure(*models.load("tiny"))
    for key in claimed:
        if key != "logits":
            print(f"{key:14} stated {claimed[key]:<10} measured {found[key]}")
    off = [key for key in claimed if key != "logits" and abs(claimed[key] - found[key]) > 0.005]
    for text, values in claimed["logits"].items():
        if max(abs(one - other) for one, other in zip(values, found["logits"][text], strict=True)) > 1e-3:
            off.append(f"logits after {text}")
    print(f"differs: {', '.join(off)}" if off else "as stated")
    return 1 if off else 0


def main() -> int:
    """Train and write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="measure the model that ships, train nothing")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--chat-share", type=float, default=0.5)
    parser.add_argument("--target", type=float, default=0.4, help="sampled accuracy at which to stop")
    arguments = vars(parser.parse_args())
    if arguments.pop("check"):
        return check()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model, steps = train(folder, **arguments)
        figures = write(folder, model, arguments | {"steps": steps, "planned": arguments["steps"]})
        shutil.copytree(folder, FOLDER, dirs_exist_ok=True)
    print(json.dumps({key: value for key, value in figures.items() if key != "logits"}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
