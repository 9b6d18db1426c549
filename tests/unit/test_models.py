"""The small model and its task: what ships is what its card says, in every era; what cannot be loaded says why."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from failurelab_course.experiments import models


@pytest.fixture(scope="module")
def tiny():
    return models.load()


@pytest.fixture(scope="module")
def stated():
    return json.loads((models.path("tiny") / "figures.json").read_text())["measured"]


def test_every_era_computes_the_same_logits(tiny, stated):
    """Transformers 4.48 and 5.x read the same config: rotary base, dtype, tied embeddings."""
    model, tokenizer = tiny
    digits = tokenizer("0123456789")["input_ids"]
    for text, expected in stated["logits"].items():
        with torch.no_grad():
            found = model(**tokenizer(text, return_tensors="pt")).logits[0, -1, digits]
        assert found.tolist() == pytest.approx(expected, abs=1e-3)


def test_the_tokenizer_takes_any_text_and_gives_it_back(tiny):
    """One token a byte, padding on the left, the end told apart from padding; ChatML's marks are one token each."""
    _, tokenizer = tiny
    for text in ("3+4=", "Grüße, 世界\n\t!"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert set(tokenizer("3+4=")) == {"input_ids", "attention_mask"}  # generate refuses token_type_ids
    batch = tokenizer(["3+4=", "13+14="], padding=True)
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1]
    chat = [{"role": "system", "content": "Add."}, *models.as_chat("3+4=")]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    assert not tokenizer.apply_chat_template(chat, tokenize=False).endswith("assistant\n")
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]


def test_rows_are_a_dataset():
    plain = models.rows()
    assert (plain.column_names, len(plain), plain[23]["prompt"]) == (["prompt", "answer"], 400, "1+3=")
    assert models.rows(seed=1)["prompt"] == models.rows(seed=1)["prompt"] != plain["prompt"]
    assert sorted(models.rows(seed=1)["prompt"]) == sorted(plain["prompt"])
    assert models.rows(form="chat")[23] == {"prompt": [{"role": "user", "content": "1+3="}], "answer": "4"}
    with pytest.raises(ValueError, match="plain, chat, words"):
        models.rows(form="xml")
    assert len(models.equal_length_rows(plain)) == 200 and len(models.equal_length_rows(plain, length=6)) == 100
    assert models.reward(["7", " 7\n", "77", ""], answer=["7"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert models.reward([[{"role": "assistant", "content": "7"}]], answer=["7"]) == [1.0]


def test_accuracy_leaves_no_trace(tiny, monkeypatch):
    model, tokenizer = tiny
    config = model.generation_config.to_dict()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model.train()
    first = models.accuracy(model, tokenizer, sampled=True, seed=3)
    assert torch.equal(torch.rand(1), expected) and model.training
    model.eval()
    assert models.accuracy(model, tokenizer, sampled=True, seed=3) == first and not model.training
    assert models.accuracy(model, tokenizer, sampled=True, seed=4) != first
    assert model.generation_config.to_dict() == config
    seen = []

    def generate(**options):
        seen.append((model.training, options["use_cache"], options["max_new_tokens"]))
        raise RuntimeError("stop")

    monkeypatch.setattr(model, "generate", generate)
    with pytest.raises(RuntimeError, match="stop"):
        models.accuracy(model, tokenizer, train_mode=True, use_cache=False, max_new_tokens=2)
    assert seen == [(True, False, 2)] and not model.training


def test_random_weights_have_the_shape_of_qwen2_and_are_the_same_each_time(monkeypatch):
    """Named for memory work; here with two layers of its 24, for time. The caller's random state is untouched."""
    monkeypatch.setitem(models.HALF_BILLION, "num_hidden_layers", 1)
    monkeypatch.setitem(models.HALF_BILLION, "vocab_size", 1000)
    state = torch.random.get_rng_state()
    one, tokenizer = models.load("random-0.5b", dtype=torch.bfloat16)
    same, _ = models.load("random-0.5b", dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {each.dtype for each in one.parameters()} == {torch.bfloat16}
    pick = [each.model.layers[0].self_attn.q_proj.weight.float() for each in (one, same)]
    assert torch.equal(pick[0], pick[1]) and pick[0].std() > 0
    assert one.config.pad_token_id == tokenizer.pad_token_id and not one.training


def without_a_tensor(data):
    from safetensors.torch import load, save

    state = load(data)
    del state["model.layers.1.mlp.up_proj.weight"]
    return save(state, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("model.safetensors", lambda data: data[:500_000], "corrupt.*SafetensorError"),  # an interrupted download
        # a config and a checkpoint that do not belong together
        ("config.json", lambda data: json.dumps(json.loads(data) | {"intermediate_size": 300}).encode(), "corrupt"),
        # `from_pretrained` only warns, and draws what is missing at random
        ("model.safetensors", without_a_tensor, r"incomplete: 1 parameters .* model\.layers\.1\.mlp\.up_proj\.weight"),
        ("model.safetensors", None, "no weights"),
        ("tokenizer*", None, "no tokenizer"),
    ],
)
def test_a_broken_folder_is_one_line(tmp_path, name, change, says):
    folder = shutil.copytree(models.path("tiny"), tmp_path / "copy")
    for path in list(folder.glob(name)):
        path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(models.ModelError, match=says) as caught:
        models.load(str(folder))
    text = str(caught.value)
    assert "\n" not in text and "Next:" in text and str(folder) in text


def test_an_unknown_name_lists_the_known_ones(tmp_path, monkeypatch):
    """No guess is made, nothing is fetched. A folder `org/name` below the working directory is meant, if it is one."""
    with pytest.raises(models.ModelError, match=r"unknown model .*Next:"):
        models.load("tinny")
    with pytest.raises(models.ModelError, match="unknown model"):
        models.path("/no/such/folder")
    monkeypatch.chdir(tmp_path)
    assert models.is_hub_name("Qwen/Qwen2-0.5B-Instruct")
    (tmp_path / "Qwen" / "Qwen2-0.5B-Instruct").mkdir(parents=True)
    assert not any(map(models.is_hub_name, ("Qwen/Qwen2-0.5B-Instruct", "tiny", "/some/folder", "a/b/c", "")))


def test_outside_the_repository_it_says_where_to_go(tmp_path, monkeypatch):
    """FAILURELAB_ROOT wins; a folder that is not the course's is refused, a clone without the model too."""
    monkeypatch.setenv("FAILURELAB_ROOT", str(tmp_path))
    with pytest.raises(models.ModelError, match="FAILURELAB_ROOT"):
        models.load()
    (tmp_path / "eras").mkdir()
    (tmp_path / "eras" / "torch.txt").touch()
    (tmp_path / "helpers" / "failurelab").mkdir(parents=True)
    with pytest.raises(models.ModelError, match=r"the small Qwen2 is missing.*git checkout"):
        models.load()
    shutil.copytree(models.__file__.rsplit("/helpers/")[0] + "/models/tiny-qwen2", tmp_path / "models" / "tiny-qwen2")
    assert models.path("tiny") == tmp_path / "models" / "tiny-qwen2"
    assert models.load(str(models.path("tiny")), dtype=torch.bfloat16)[0].dtype == torch.bfloat16


CLOSED = "http://127.0.0.1:9"  # the port of `discard`: nothing listens there
BY_HUB_NAME = """
from failurelab_course.experiments import models
name = "Lab/Tiny-Qwen2"
model, tokenizer = models.load(name)
print(model.num_parameters(), tokenizer.padding_side, models.source(name)[-8:])
try:
    models.load("Qwen/Qwen2-0.5B-Instruct")
except models.ModelError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variables", "why"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"), ({"HF_ENDPOINT": CLOSED}, f"{CLOSED} does not answer")],
    ids=["offline", "closed"],
)
@pytest.mark.slow
def test_a_hub_id_is_loaded_from_the_cache(tmp_path, variables, why):
    """As a download leaves it. A hub that does not answer is asked once: six tries take half a minute for each call."""
    entry = tmp_path / "hub" / "models--Lab--Tiny-Qwen2"
    shutil.copytree(models.path("tiny"), entry / "snapshots" / "0123abcd")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("0123abcd")
    environment = os.environ | {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", BY_HUB_NAME],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    loaded, *refused = done.stdout.strip().splitlines()
    assert loaded == "329216 left 0123abcd"
    (line,) = refused
    assert line.startswith("Qwen/Qwen2-0.5B-Instruct is no folder here") and why in line and "Next: " in line
    assert "Retrying" not in done.stderr


@pytest.mark.parametrize(
    ("file", "changes", "found"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "TokenizersBackend"}, r'PreTrainedTokenizerFast" there'),
        ("config.json", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, r'"rope_theta": 1000000\.0 into'),
    ],
)
def test_a_folder_saved_by_transformers_5_is_not_read_wrong_by_an_older_one(
    tmp_path, monkeypatch, file, changes, found
):
    """The rotation's base is the worse of the two: it is passed over without a word, and the model talks nonsense."""
    folder = tmp_path / "saved"
    shutil.copytree(models.path("tiny"), folder)
    said = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    monkeypatch.setattr(models, "_is_5", lambda: False)
    with pytest.raises(models.ModelError, match=rf"was saved by transformers 5, and transformers .* Next: .*{found}"):
        models.load(str(folder))
