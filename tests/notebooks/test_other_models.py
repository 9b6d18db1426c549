"""`failurelab run --model FOLDER`: a model in the hub's format that is not the course's, on the CPU."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds
from transformers import Qwen2Config, Qwen2ForCausalLM

from failurelab_course.experiments import models
from failurelab_course.notebook_runs import notebooks as course

pytestmark = pytest.mark.nightly

LEARNING = ["00_start_here", "02_garbage_rollouts", "05_silent_misalignment", "08_everything_together"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def deeper(tmp_path):
    """The small model with a third layer that changes little: another shape, and it can still do the sums."""
    small, _ = models.load()
    shape = {key: value for key, value in small.config.to_dict().items() if key != "layer_types"}  # one entry a layer
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(Qwen2Config(**shape | {"num_hidden_layers": 3}))
    made.load_state_dict(small.state_dict(), strict=False)
    with torch.no_grad():
        last = made.model.layers[2]
        for part in (last.self_attn.o_proj, last.mlp.down_proj):
            part.weight.normal_(std=1e-3)
    made.save_pretrained(tmp_path / "deeper")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.path("tiny") / name, tmp_path / "deeper")
    return str(tmp_path / "deeper")


@pytest.fixture
def stranger(tmp_path):
    """A Qwen2 of another shape with a tokenizer of its own, with a chat template; it knows nothing."""
    words = Tokenizer(kinds.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks, letters = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=marks, initial_alphabet=letters, show_progress=False)
    words.train_from_iterator((f"{n} plus {n * 7} equals {n * 8}" for n in range(2000)), trainer)
    heads = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    size = {"num_hidden_layers": 3, "vocab_size": words.get_vocab_size(), "max_position_embeddings": 512}
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(Qwen2Config(**heads, **size, tie_word_embeddings=False, pad_token_id=0, eos_token_id=2))
    made.save_pretrained(tmp_path / "stranger")
    words.save(str(tmp_path / "stranger" / "tokenizer.json"))
    said = {  # as transformers 4 writes it: what transformers 5 writes, older ones cannot read
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": marks[0],
        "eos_token": marks[2],
        "additional_special_tokens": [marks[1]],
        "padding_side": "left",
        "chat_template": TEMPLATE,
    }
    (tmp_path / "stranger" / "tokenizer_config.json").write_text(json.dumps(said))
    return str(tmp_path / "stranger")


def test_learning_is_not_shown_with_a_model_that_cannot(stranger, tmp_path):
    """Each notebook about learning ends with the reason in one line, and no verdict of another model under its name."""
    found = course.run(LEARNING, model=stranger, out=tmp_path / "run", time_limit=1800, progress=False)
    assert [each.name for each in found] == LEARNING
    for result in found:
        assert result.status == "NOT RUN", f"{result.name}: {result.reason} (see {result.html})"
        assert (
            result.reason.startswith("stranger answers 0% of the sums right") and "Next: --model tiny" in result.reason
        )
        assert result.records == []
    assert course.exit_status(found) == 3


def test_counts_are_the_models_own(deeper, tmp_path):
    """Notebook 01 with three layers instead of two: the same story, in other numbers, learning included."""
    (result,) = course.run(["01"], model=deeper, out=tmp_path / "run", time_limit=1800, progress=False)
    assert result.status == "PASS", f"{result.reason} (see {result.html})"
    assert result.figures(case="notebook 01: all weights")["gradients"] == "38 of 38"
    assert result.figures(case="notebook 01") == {"lost": 36, "trainable": 37}
    assert result.figures(case="notebook 01: the method")["gradients"] == "37 of 37"
