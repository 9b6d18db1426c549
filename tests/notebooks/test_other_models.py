"""`failurelab run --model FOLDER`: a model in the hub's format that is not the course's, on the CPU."""

import shutil

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from failurelab_course.experiments import models
from failurelab_course.notebook_runs import runs

pytestmark = pytest.mark.nightly


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


def test_counts_are_the_models_own(deeper, tmp_path):
    """Notebook 01 with three layers instead of two: the same story, in other numbers, learning included."""
    (result,) = runs.run(["01"], model=deeper, out=tmp_path / "run", time_limit=1800)
    assert result.status == "PASS", f"{result.reason} (see {result.html})"
    assert result.figures(case="notebook 01: all weights")["gradients"] == "38 of 38"
    assert result.figures(case="notebook 01") == {"lost": 36, "trainable": 37}
    assert result.figures(case="notebook 01: the method")["gradients"] == "37 of 37"
