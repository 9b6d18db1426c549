"""The benchmarks' own judgement: what a signature means, and that only right functions are compared."""

import ast
import json
import sys

import pytest
import torch
from tests.cli.benchmark_scripts import FOLDER, load

from failurelab import logits
from failurelab_course import eras
from failurelab_course.experiments import devices

pytestmark = pytest.mark.slow

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
    """A small vocabulary, one round: figures for all that run, a reason for what does not, a record for each."""
    monkeypatch.setenv("FAILURELAB_EVIDENCE", str(tmp_path))
    logps = load("logps")
    shape = logps.Shape(2, 8, 8, 64, True, vocabulary=2000)

    def greedy(model, ids, mask, length):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore.")

    found = logps.measure(shape, logps.WAYS | {"greedy": greedy}, 1, "cpu")
    assert found[logps.KEPT]["memory_to_kept"] == found[logps.KEPT]["time_to_kept"] == 1.0
    ours = found["completion_logps"]
    assert 0 < ours["score_error"] < 1e-4 and 0 < ours["gradient_error"] < 1e-4
    logps.show(shape, found, "cpu")
    reason = "CUDA out of memory. Tried to allocate 9 GiB."
    assert reason in capsys.readouterr().out
    records = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(records) == len(found) == len(logps.WAYS) + 1
    assert [made["figures"] for made in records if "not_run" in made["figures"]] == [{"not_run": reason}]


def test_a_way_that_scores_other_tokens_is_not_timed():
    """A fast wrong answer would win any benchmark."""
    logps = load("logps")

    def early(model, ids, mask, length):
        rows = model(input_ids=ids, attention_mask=mask).logits[:, :length].log_softmax(-1)
        return torch.gather(rows, -1, ids[:, -length:, None])[..., 0]

    with pytest.raises(logits.MisalignedLogProbs, match="prompt positions"):
        logps.measure(logps.Shape(2, 8, 8, 64, True, vocabulary=2000), {logps.KEPT: early}, 1, "cpu")


NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "recording.begin(" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_its_eras_and_takes_a_device_and_never_another(name, monkeypatch, capsys):
    """Asked for a GPU that is not there it ends with one line and status 3, before it computes."""
    script, recording = load(name), load("recording")
    assert set(recording.list_field("Eras", script.__doc__)) <= {era.name for era in eras.known()}
    assert recording.list_field("Eras", script.__doc__)
    assert set(recording.list_field("Needs", script.__doc__)) <= {"zero3", "bitsandbytes"}
    monkeypatch.setattr(devices, "gpu_problem", lambda: "there is none. Next: look for one")
    for words, status, line in (
        (["--device", "cuda"], 3, f"{name}.py: device cuda is asked for, and there is none. Next: look for one"),
        (["--device", "tpu"], 2, "unknown device 'tpu'"),
        (["--help"], 0, ""),
    ):
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words])
        with pytest.raises(SystemExit) as ended:
            script.main()
        said = capsys.readouterr()
        assert ended.value.code == status and line in said.err and bool(said.out) == (status == 0)
