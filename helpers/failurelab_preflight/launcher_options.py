"""Runs in the Python that trains: what a launcher's own parser makes of its line, as JSON in the last line printed.

`PYTHON launcher_options.py LAUNCHER WORDS...`, where LAUNCHER is accelerate, torchrun or deepspeed. Nothing is started,
and only the standard library and that launcher are imported. `launcher_line` is what asks.

Sources: accelerate `commands.launch`; torch `distributed.run`; DeepSpeed `launcher.runner`.
"""

import contextlib
import json
import sys
from typing import Any


def by_accelerate(words: list[str]) -> dict[str, Any]:
    """Return what `accelerate launch` starts, with the files that it reads."""
    from accelerate.commands import launch
    from accelerate.utils import DistributedType

    # it completes the options by those of a file, as it does before it starts anything
    options, defaults, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    kinds = ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
    alone = defaults is not None and defaults.distributed_type != DistributedType.MULTI_CPU  # a file that names no kind
    alone = alone and not any(getattr(options, kind, False) for kind in kinds)
    left_out = [f"{kind} of the launch" for kind in kinds[1:2] + kinds[4:] if getattr(options, kind, False)]
    if options.use_fsdp and not options.cpu:
        left_out.append("FSDP: each process has the whole model, for accelerate takes FSDP for accelerators only")
    for name in ("mixed_precision", "dynamo_backend"):
        value = str(getattr(options, name, None) or "no").lower()
        if value not in ("no", "bf16"):
            left_out.append(f"{name} {value} of the launch")
    started = _script(options.training_script, options.module, options.training_script_args)
    started |= {"processes": 1 if alone else options.num_processes or 1, "left_out": left_out}
    started["machines"] = options.num_machines or 1
    if str(options.mixed_precision).lower() == "bf16":
        started["environment"] = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    if options.use_deepspeed and not options.cpu:
        started["deepspeed_config_file"] = options.deepspeed_config_file
        started["zero_stage"] = 2 if options.zero_stage is None else options.zero_stage
    return started


def by_torchrun(words: list[str]) -> dict[str, Any]:
    """Return what `torchrun` starts; it reads variables such as PET_NPROC_PER_NODE too."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    launch = _script(options.training_script, options.module, options.training_script_args)
    machines = str(options.nnodes).split(":")[-1]
    return launch | {"processes": _times(machines, options.nproc_per_node), "machines": machines}


def by_deepspeed(words: list[str]) -> dict[str, Any]:
    """Return what `deepspeed` starts; if no number of GPUs is given, one GPU is assumed."""
    from deepspeed.launcher.runner import parse_args

    options = parse_args(words)
    named = [host.partition(":")[2].split(",") for host in options.include.split("@")]  # "a:0,1@b:0"
    machines = max(options.num_nodes, len(named))
    processes = machines * options.num_gpus if options.num_gpus > 0 else max(machines, sum(map(len, named)))
    number = [] if options.no_local_rank else ["--local_rank={LOCAL_RANK}"]  # which it passes to the script
    launch = _script(options.user_script, options.module, number + options.user_args)
    return launch | {"processes": processes, "machines": machines}


def _script(script: str, module: bool, arguments: list[str]) -> dict[str, Any]:
    return {"script": "" if module else script, "module": script if module else "", "arguments": arguments}


def _times(machines: str, processes: str) -> int:
    for number in (machines, processes):
        if not str(number).isdigit():
            raise ValueError(f"{number!r} is no number of processes that this machine can tell")
    return int(machines) * int(processes)


_LAUNCHERS = {"accelerate": by_accelerate, "torchrun": by_torchrun, "deepspeed": by_deepspeed}


def main() -> None:
    """Print what the line starts, or why its launcher does not take it."""
    launcher, *words = sys.argv[1:]
    launch: dict[str, Any]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            launch = _LAUNCHERS[launcher](words)
    except ModuleNotFoundError as error:
        launch = {"error": f"{error.name} is not installed for {sys.executable}"}
    except Exception as error:  # of the launcher's own: its line, or a file of it
        launch = {"error": " ".join(str(error).split()) or type(error).__name__}
    print(json.dumps(launch))


if __name__ == "__main__":
    main()
