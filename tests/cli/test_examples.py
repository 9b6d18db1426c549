"""The examples that ship: configs, loaded by the libraries that read them, and scripts for one process and for two."""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from failurelab_course import eras
from failurelab_course.experiments import deepspeed

ROOT = eras.root()
EXAMPLES = ROOT / "examples"
ZERO3, QLORA = "examples/train_grpo.py", "examples/train_qlora_grpo.py"
needs_zero = pytest.mark.skipif(not eras.find(eras.TODAY).has_zero3, reason="DeepSpeed is not installed")


def test_deepspeed_s_configs():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    cpu, gpu = (json.loads((EXAMPLES / f"zero3_{name}.json").read_text()) for name in ("cpu", "gpu"))
    assert cpu == deepspeed.config(3) and deepspeed.check_config(gpu) == 3
    fields = DeepSpeedZeroConfig.model_fields
    assert set(gpu["zero_optimization"]) <= {*fields, *(field.alias for field in fields.values())}


@pytest.mark.parametrize("name", ["accelerate_cpu.yaml", "accelerate_zero3.yaml", "accelerate_gpus.yaml"])
def test_accelerate_s_configs(name):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(EXAMPLES / name))
    assert loaded.num_processes > 1
    if name == "accelerate_gpus.yaml":
        assert (loaded.distributed_type.value, loaded.use_cpu) == ("MULTI_GPU", False)
        return
    assert str(loaded.distributed_type).endswith("DEEPSPEED")
    assert deepspeed.check_config(ROOT / loaded.deepspeed_config["deepspeed_config_file"]) == 3
    assert set(loaded.deepspeed_config) == {"deepspeed_config_file", "zero3_init_flag"}


def started(*words):
    """Run a script in two processes on the CPU, from the repository's root; return what its first process says."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *torchrun, *words, "--steps", "2"]
    outer = (*deepspeed.LAUNCHED, "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("TRAINED {", "{"))]
    assert done.returncode == 0 and len(lines) == 1, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("TRAINED "))


@needs_zero
@pytest.mark.slow
def test_zero_3_in_two_processes():
    found = started(ZERO3, "--deepspeed", "examples/zero3_cpu.json")
    assert (found["processes"], found["steps"], found["partitioned"]) == (2, 2, 26)
    assert [text.split("=")[0] for text in found["answers"]] == ["3+4", "7+8"]


@pytest.mark.slow
def test_qlora_trains_the_adapters_and_leaves_the_4_bit_weights(tmp_path):
    found = started(QLORA, "--batch", "8", "--output", str(tmp_path / "adapter"))
    assert (found["processes"], found["steps"]) == (2, 2)
    assert (found["four_bit_unchanged"], found["adapters_changed"]) == ("14 of 14", "28 of 28")
    assert found["adapters_in"] == ["torch.float32"]  # trl casts them to bfloat16, and the script back
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "error", "says"),
    [
        (ZERO3, ["--deepspeed", "WRONG"], deepspeed.EngineError, "asks for ZeRO stage 5"),
        (QLORA, ["--model", "no-such-model"], SystemExit, "unknown model 'no-such-model'"),
    ],
)
def test_a_slip_ends_a_script_before_it_trains(script, words, error, says, tmp_path, monkeypatch):
    wrong = tmp_path / "zero.json"
    wrong.write_text('{"zero_optimization": {"stage": 5}}')
    monkeypatch.setattr(sys, "argv", [script, *(str(wrong) if word == "WRONG" else word for word in words)])
    with pytest.raises(error, match=says) as ended:
        runpy.run_path(str(pathlib.Path(ROOT, script)))["main"]()
    assert "\n" not in str(ended.value)
