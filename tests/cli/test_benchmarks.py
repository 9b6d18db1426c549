"""The benchmarks' own judgement: what a signature means, and that only right functions are compared."""

import ast
import importlib.util
import pathlib
import sys

import pytest
import torch

from failurelab import logits

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SOURCE = """
class Qwen2Model:
    def forward(self, input_ids): ...

class Qwen2ForCausalLM:
    {decorator}
    def forward(self, input_ids=None, {name}=0{rest}): ...
"""
RENAMES = '@deprecate_kwarg("num_logits_to_keep", version="4.50", new_name="logits_to_keep")'


@pytest.mark.parametrize(
    "version, name, rest, decorator, other",
    [
        ("4.45.2", "num_logits_to_keep", "", "", "TypeError"),
        ("4.48.3", "num_logits_to_keep", ", **kwargs", "", "swallowed"),
        ("4.49.0", "logits_to_keep", ", **kwargs", RENAMES, "renamed, FutureWarning"),
        ("4.50.0", "logits_to_keep", ", **kwargs", RENAMES, "renamed, no warning"),
        ("4.52.4", "logits_to_keep", ", **kwargs", "@can_return_tuple", "swallowed"),
        ("4.100.0", "logits_to_keep", ", **kwargs", RENAMES, "renamed, no warning"),
    ],
)
def test_a_signature_is_read_as_python_would_act_on_it(version, name, rest, decorator, other):
    """Five kinds of release, and a version that string comparison would put in the wrong place."""
    signatures = load("signatures")
    forward = signatures.forward_of(SOURCE.format(name=name, rest=rest, decorator=decorator))
    assert isinstance(forward, ast.FunctionDef)
    assert signatures.judge(version, forward) == (name, other)


def test_ways_are_compared_in_one_run_and_the_missing_say_why(capsys, monkeypatch, tmp_path):
    """A small vocabulary, one round: figures for all that run, a reason for what does not, a record for each figure."""
    monkeypatch.setenv("FAILURELAB_EVIDENCE", str(tmp_path))
    logps = load("logps")
    shape = logps.Shape(2, 8, 8, 64, True, vocabulary=2000)
    found = logps.measure(shape, logps.WAYS, 1, "cpu")
    assert found[logps.KEPT]["memory_to_kept"] == found[logps.KEPT]["time_to_kept"] == 1.0
    assert found["Liger"] == "Liger's kernels need a GPU"
    logps.show(shape, found, "cpu")
    assert "| Liger | NOT RUN: Liger's kernels need a GPU" in capsys.readouterr().out
    ran = sum(isinstance(each, dict) for each in found.values())
    assert ran >= 4
    assert sum(len(file.read_text().splitlines()) for file in tmp_path.glob("*.jsonl")) == ran


def test_a_way_that_scores_other_tokens_is_not_timed():
    """A fast wrong answer would win any benchmark."""
    logps = load("logps")

    def early(model, ids, mask, length):
        rows = model(input_ids=ids, attention_mask=mask).logits[:, :length].log_softmax(-1)
        return torch.gather(rows, -1, ids[:, -length:, None])[..., 0]

    with pytest.raises(logits.MisalignedLogProbs, match="prompt positions"):
        logps.measure(logps.Shape(2, 8, 8, 64, True, vocabulary=2000), {logps.KEPT: early}, 1, "cpu")
