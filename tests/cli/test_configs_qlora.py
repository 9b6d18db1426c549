"""The QLoRA script to take home: started as a user starts it, in one process and in two."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from failurelab_course import eras

pytestmark = pytest.mark.slow

ROOT = eras.root()
SCRIPT = pathlib.Path("configs", "train_qlora_grpo.py")
STARTS = {
    "one process": ([sys.executable], 1),
    "two processes": ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], 2),
}


def started(start, *options):
    """Run the script on the CPU; return what came of it."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in outer}
    environment = clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [*start, str(SCRIPT), "--steps", "2", "--batch", "8", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", STARTS)
def test_it_trains_the_adapters_and_leaves_the_4_bit_weights(name, tmp_path):
    """Two steps with every guard on: each adapter weight moved, no 4-bit weight did, and the adapter is saved."""
    start, processes = STARTS[name]
    done = started(start, "--output", str(tmp_path / "adapter"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stdout
    (found,) = lines
    assert (found["processes"], found["steps"]) == (processes, 2)
    assert (found["four_bit_unchanged"], found["adapters_changed"]) == ("14 of 14", "28 of 28")
    assert found["adapters_in"] == ["torch.float32"]  # trl casts them to bfloat16, and the script back
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_an_unknown_model_is_said_in_a_line():
    """A slip of the pen does not end in a traceback."""
    done = started([sys.executable], "--model", "no-such-model")
    assert done.returncode == 1
    assert "unknown model 'no-such-model'" in done.stderr and "Traceback" not in done.stderr


def test_the_launch_config_starts_one_process_for_each_gpu():
    """What `accelerate launch` reads: several GPUs, and no DeepSpeed."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "configs" / "accelerate_gpus.yaml"))
    assert (config.distributed_type.value, config.use_cpu, config.num_processes) == ("MULTI_GPU", False, 2)
