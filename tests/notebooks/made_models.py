"""Models in the hub's format that are not the course's: a folder with config.json, weights and tokenizer files each."""

import json
import pathlib
import shutil

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds
from transformers import Qwen2Config, Qwen2ForCausalLM

from failurelab_course.experiments import models

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_three_layers() -> Qwen2ForCausalLM:
    """Return a model of the small one's shape with a third layer, and random weights."""
    small, _ = models.load()
    shape = {key: value for key, value in small.config.to_dict().items() if key != "layer_types"}  # one entry a layer
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**shape | {"num_hidden_layers": 3}))


def deeper(folder: pathlib.Path) -> pathlib.Path:
    """Make the small model with a third layer that changes little: another shape, and it can still do the sums."""
    small, _ = models.load()
    made = with_three_layers()
    made.load_state_dict(small.state_dict(), strict=False)
    with torch.no_grad():
        last = made.model.layers[2]
        for part in (last.self_attn.o_proj, last.mlp.down_proj):
            part.weight.normal_(std=1e-3, generator=torch.Generator().manual_seed(0))
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.path("tiny") / name, folder)
    return folder


def stranger(folder: pathlib.Path) -> pathlib.Path:
    """Make a Qwen2 of another shape with a tokenizer of its own, with a chat template; it knows nothing."""
    words = Tokenizer(kinds.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator((f"{n} plus {n * 7} equals {n * 8}" for n in range(2000)), trainer)
    shape = Qwen2Config(
        vocab_size=words.get_vocab_size(),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    words.save(str(folder / "tokenizer.json"))
    said = {  # as transformers 4 writes it: what transformers 5 writes, older ones cannot read
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": marks[0],
        "eos_token": marks[2],
        "additional_special_tokens": [marks[1]],
        "padding_side": "left",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=1))
    return folder
