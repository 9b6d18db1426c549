"""The benchmarks' own judgement: what a signature means."""

import ast
import sys

import pytest
from tests.cli.benchmark_scripts import FOLDER, load

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
