"""The configs that ship: loaded by the libraries that read them, and one script for one process and for two."""

import json
import os
import pathlib
import subprocess

import pytest

from failurelab_course import eras
from failurelab_course.experiments import deepspeed

ROOT = eras.root()
CONFIGS = ROOT / "configs"
SCRIPT = "configs/train_grpo.py"
LAUNCHER = (*deepspeed.LAUNCHED, "LOCAL_WORLD_SIZE")
needs_zero = pytest.mark.skipif(not eras.find(eras.TODAY).has_zero3, reason="DeepSpeed's operation is not built")


@pytest.mark.parametrize("name", ["zero3_cpu.json", "zero3_gpu.json"])
def test_deepspeed_s_configs(name):
    """Stage 3, and DeepSpeed's own model of its config takes every entry of that part."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert deepspeed.check_config(CONFIGS / name) == 3
    zero = json.loads((CONFIGS / name).read_text())["zero_optimization"]
    given = {key: value for key, value in zero.items() if value != "auto"}
    assert DeepSpeedZeroConfig(**given).stage == 3
    known = set(DeepSpeedZeroConfig.model_fields) | {
        field.alias for field in DeepSpeedZeroConfig.model_fields.values() if field.alias
    }
    assert set(zero) <= known


def test_the_config_for_a_cpu_is_the_one_that_the_course_uses():
    assert json.loads((CONFIGS / "zero3_cpu.json").read_text()) == deepspeed.config(3)


@pytest.mark.parametrize("name", ["accelerate_cpu.yaml", "accelerate_zero3.yaml"])
def test_accelerate_s_configs(name):
    """Accelerate reads it without a complaint, and the DeepSpeed config that it names is there."""
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(CONFIGS / name))
    assert str(loaded.distributed_type).endswith("DEEPSPEED") and loaded.num_processes > 1
    named = loaded.deepspeed_config["deepspeed_config_file"]
    assert deepspeed.check_config(ROOT / named) == 3
    assert set(loaded.deepspeed_config) == {"deepspeed_config_file", "zero3_init_flag"}


def started(command):
    """Run the script as a user would, from the repository's root, and return what rank 0 said."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    done = subprocess.run(
        command, cwd=ROOT, env=kept | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TRAINED ")]
    assert done.returncode == 0 and len(lines) == 1, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("TRAINED "))


@needs_zero
@pytest.mark.slow
def test_one_script_alone_and_in_two_processes():
    """The same file: in one process, and in two that torchrun starts over gloo; each generates in its callback."""
    binaries = pathlib.Path(eras.find(eras.TODAY).folder) / "bin"
    arguments = [SCRIPT, "--steps", "2", "--deepspeed", "configs/zero3_cpu.json"]
    alone = started([str(binaries / "python"), *arguments])
    launcher = [str(binaries / "torchrun"), "--nproc_per_node", "2", "--master_port", str(deepspeed.free_port())]
    both = started([*launcher, *arguments])
    assert (alone["processes"], both["processes"]) == (1, 2)
    for found in (alone, both):
        assert found["steps"] == 2 and found["partitioned"] == 26
        assert [text.split("=")[0] for text in found["answers"]] == ["3+4", "7+8"]


@pytest.mark.slow
def test_a_config_with_a_wrong_stage_ends_the_script_before_it_starts(tmp_path):
    """Before the model is loaded, in words, and not as a traceback of pydantic's."""
    wrong = tmp_path / "zero.json"
    wrong.write_text('{"zero_optimization": {"stage": 5}}')
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    done = subprocess.run(
        [str(eras.find(eras.TODAY).python), SCRIPT, "--deepspeed", str(wrong)],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0 and "asks for ZeRO stage 5" in done.stderr
