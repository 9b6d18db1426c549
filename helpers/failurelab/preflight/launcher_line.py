"""A launcher's line as users have it: `accelerate launch train.py`, `torchrun`, `deepspeed`, `python -m`, `trl grpo`.

The line is read, not run: what counts is the script, its arguments, how many processes there will be, and whether the
launch asks for ZeRO. What a line leaves open is read where its launcher reads it: accelerate in the file that
`accelerate config` has written, trl in the file of `--config` too, torchrun in variables such as PET_NPROC_PER_NODE.

Sources: accelerate `commands.launch._validate_launch_command` and `commands.config.config_args`; torch
`distributed.argparse_util`; trl `cli`.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from failurelab.errors import FailureLabError

# Options of the launchers that take no value; every other one does, unless it is written with "=".
_FLAGS = frozenset((
    "--cpu", "--multi_gpu", "--tpu", "--ipex", "--quiet", "--debug", "--no_python", "--use_deepspeed", "--use_fsdp",
    "--use_megatron_lm", "--standalone", "--multi-gpu", "--use-deepspeed", "--use-fsdp", "--same_network",
    "--dynamo_use_dynamic", "--no-python", "--run-path", "--run_path", "--no_local_rank", "--force_multi",
))  # fmt: skip
_SHORT_FLAGS = ("-u", "-q", "-O", "-I", "-B")
_WITH_VALUE = ("-W", "-X")  # of Python's own
SCRIPTS = (".py", ".ipynb")
_KINDS = {"multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm"}  # of a launch, on accelerate's line
_OF_ACCELERATE = (  # options that trl passes on
    "num_processes", "accelerate_config", "config_file", "use_deepspeed", "zero_stage", "deepspeed_config_file",
)  # fmt: skip
_NO_TRAINING = ("chat", "env", "skills", "vllm-serve", "vllm_serve", "--help", "-h")  # of the command trl


class LaunchError(FailureLabError):
    """A launcher's line cannot be read; the message says why and the next step."""

    exit_status = 3


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a line would start.

    Attributes:
        script: path of the script; empty where a module is named.
        module: that is run by `-m`, such as `package.train`; empty for a file. See `find_module`.
        arguments: of the script.
        world_size: processes in all.
        zero_stage: of DeepSpeed, as the launch asks for it.
        environment: variables set in front of the command.
        python: the interpreter that the line names, or that of its launcher; None where none is found.
    """

    script: str = ""
    arguments: tuple[str, ...] = ()
    world_size: int = 1
    zero_stage: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    python: str | None = None
    module: str = ""


def read_line(words: list[str]) -> Launch:
    """Return what a line would start, by its words, as a shell splits it.

    Raises:
        LaunchError: no script in it, or a configuration that cannot be read.
    """
    words, variables = list(words), []
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables.append((name, value))
    command = pathlib.Path(words[0]).name if words else ""
    python = None
    if re.fullmatch(r"python[\d.]*", command):
        python = words.pop(0)
        command = "python"
        if words[:1] == ["-m"] and words[1:2] and words[1].split(".")[0] in ("accelerate", "torch"):
            command = "accelerate" if words[1].startswith("accelerate") else "torchrun"
            words = words[2:]
    elif command in ("accelerate", "torchrun", "deepspeed"):
        python = _interpreter(words.pop(0))
    elif command == "trl":
        python = _interpreter(words.pop(0))
        return dataclasses.replace(_read_trl(words, variables, python), environment=tuple(variables), python=python)
    elif command.endswith(SCRIPTS):
        command = "python"
    else:
        raise LaunchError(
            f"{command or 'nothing'} is no launcher that preflight reads (accelerate launch, torchrun, deepspeed, trl, "
            "python). Next: failurelab preflight SCRIPT, with --world-size for the number of processes"
        )
    if command == "accelerate" and words[:1] == ["launch"]:
        words.pop(0)
    options, words = _options(words, command)
    module = words[0] if "module" in options and words else ""
    if not module and not (words and words[0].endswith(SCRIPTS)):
        raise LaunchError(
            f"no script was found in this line ({' '.join(words[:3]) or 'it ends before one'}). "
            "Next: a line that names the file, such as accelerate launch train.py"
        )
    size, stage = _size(options, command, variables)
    script = "" if module else words[0]
    return Launch(script, tuple(words[1:]), size, stage, tuple(variables), python, module)


def _read_trl(words: list[str], variables: list[tuple[str, str]], python: str | None) -> Launch:
    """Return what `trl grpo --config x.yaml` starts: a script of trl's own, by accelerate, which takes some options.

    They may stand in that file too; the line comes first.
    """
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if not verb or verb in _NO_TRAINING:
        named = f"trl {verb}".strip()
        raise LaunchError(f"{named} trains nothing. Next: a line such as trl grpo --config grpo.yaml")
    arguments: list[str] = []
    options: dict[str, str] = {}
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or key not in _OF_ACCELERATE:
            arguments.append(word)
            if word == "--config" and rest:
                given = _read_config(rest[0])
                options = {each: str(given[each]) for each in _OF_ACCELERATE if each in given} | options
            continue
        if not equals and key != "use_deepspeed":
            value = rest.pop(0) if rest else ""
        options[key] = value
    if named := options.pop("accelerate_config", ""):
        options["config_file"] = named if os.path.isfile(named) else _config_of_trl(named, python)
    return Launch("", tuple(arguments), *_size(options, "accelerate", variables), module=f"trl.scripts.{verb}")


def _config_of_trl(name: str, python: str | None) -> str:
    """Return the path of one of the configurations that trl brings for accelerate, such as `zero3`."""
    for place in _find_places("trl", python or sys.executable):
        if (file := place / "accelerate_configs" / f"{name}.yaml").is_file():
            return str(file)
    raise LaunchError(
        f"{name} is no file, and trl has no configuration of this name for accelerate. Next: the path of a file, or "
        "a name such as zero3 or multi_gpu"
    )


def find_module(module: str, python: str) -> pathlib.Path:
    """Return the file that `-m MODULE` runs, in this folder or where a Python finds it; nothing of it is imported.

    Raises:
        LaunchError: there is none.
    """
    top, *parts = module.split(".")
    for place in _find_places(top, python):
        inside = place.joinpath(*parts)
        for file in (place, inside.with_suffix(".py"), inside / "__main__.py"):
            if file.is_file():
                return file
    raise LaunchError(
        f"{python} finds no module {module} from {pathlib.Path.cwd()}. Next: start it in the folder from which you "
        "train, or give the path of its file"
    )


def _find_places(package: str, python: str) -> list[pathlib.Path]:
    """Return the folders of a package, or the file of a module, in this folder or where a Python finds it."""
    code = (
        f"import importlib.util, os, sys; sys.path.insert(0, os.getcwd()); spec = importlib.util.find_spec({package!r})"
        "; print(*(spec and (spec.submodule_search_locations or [spec.origin]) or []), sep='\\n')"
    )
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    return list(map(pathlib.Path, filter(None, asked.stdout.splitlines())))


def _interpreter(command: str) -> str | None:
    """Return the Python that a launcher's own file names in its first lines: that of its environment."""
    path = shutil.which(command)
    if path is None:
        return None
    with open(path, "rb") as file:
        first, second = (file.readline().decode(errors="replace").strip() for _ in range(2))
    if first == "#!/bin/sh" and second.startswith("'''exec'"):  # as uv writes it: the Python beside this file
        beside = pathlib.Path(path).resolve().with_name("python")
        return str(beside) if beside.exists() else None
    named = first.removeprefix("#!").split(" ")[0]
    return named if first.startswith("#!/") and pathlib.Path(named).name.startswith("python") else None


def _options(words: list[str], command: str) -> tuple[dict[str, str], list[str]]:
    """Return the launcher's options, by name without dashes, and what follows them: the script and its arguments."""
    options: dict[str, str] = {}
    words = list(words)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-m", "--module"):
            options["module"] = ""
            if command == "python":  # what follows is the module's
                break
            continue
        takes_one = name in _WITH_VALUE if command == "python" else name not in (*_FLAGS, *_SHORT_FLAGS)
        if not equals and takes_one:
            value = words.pop(0) if words else ""
        options[name.lstrip("-").replace("-", "_")] = value
    return options, words


def _size(options: dict[str, str], command: str, variables: list[tuple[str, str]]) -> tuple[int, int]:
    """Return how many processes a launch starts, and its ZeRO stage."""
    environment = os.environ | dict(variables)
    config: dict[str, Any] = {}
    if path := options.get("config_file") or (command == "accelerate" and _default_config(options, environment)):
        config = _read_config(path)
    kind = "" if _KINDS & options.keys() else str(config.get("distributed_type", "")).upper()
    stage = 0
    if "use_deepspeed" in options or (kind == "DEEPSPEED" and "cpu" not in options):
        inside = config.get("deepspeed_config") or {}
        file = options.get("deepspeed_config_file") or inside.get("deepspeed_config_file")
        asked = (options.get("zero_stage"), inside.get("zero_stage"), 2)
        stage = _number(next(each for each in asked if each not in (None, "")))
        if file:
            stage = zero_stage(file) or stage
    elif environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":  # as accelerate tells its processes
        stage = zero_stage(environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
        stage = stage or _number(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
    if kind in ("NO", "FALSE"):  # accelerate starts one process then, whatever the number; a NO without quotes is false
        size = 1
    elif command == "accelerate":
        size = _number(options.get("num_processes") or config.get("num_processes") or 1)
    elif command == "python":
        size = _number(dict(variables).get("WORLD_SIZE", 1))
    else:
        pet = environment if command == "torchrun" else {}
        nodes = options.get("nnodes") or options.get("num_nodes") or pet.get("PET_NNODES") or "1"
        each = options.get("nproc_per_node") or options.get("num_gpus") or pet.get("PET_NPROC_PER_NODE") or "1"
        size = _number(nodes.split(":")[-1]) * _number(each)
    if size < 1:
        raise LaunchError(f"{size} is no number of processes. Next: the number itself, such as --num_processes 4")
    return size, stage


def _default_config(options: dict[str, str], environment: Mapping[str, str]) -> str:
    """Return the path of the file that `accelerate config` has written, where accelerate reads it; else nothing."""
    cache = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    path = os.path.join(os.path.expanduser(cache), "accelerate", "default_config.yaml")
    return path if "cpu" not in options and os.path.isfile(path) else ""


def _number(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise LaunchError(
            f"{text!r} is no number of processes that this machine can tell. Next: the number itself"
        ) from None


def _read_config(path: str) -> dict[str, Any]:
    """Read a launcher's configuration: YAML, or JSON in a file of that name.

    Raises:
        LaunchError: it cannot be read, or holds no settings.
    """
    import yaml

    kind = "JSON" if path.endswith(".json") else "YAML"
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        config = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
        if not isinstance(config, dict):
            raise ValueError(config)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or f"it is no {kind} of names and values"
        raise LaunchError(f"the configuration {path} cannot be read ({why}). Next: mend it, or name another") from error
    return config


def zero_stage(config: Any) -> int:
    """Return the ZeRO stage of a DeepSpeed configuration: a dict, the path of a JSON file, or nothing."""
    if isinstance(config, (str, os.PathLike)) and str(config):
        try:
            text = str(config)
            config = json.loads(text if text.lstrip().startswith("{") else pathlib.Path(text).read_text())
        except (OSError, ValueError):
            return 0
    if not isinstance(config, dict):
        return 0
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return stage if isinstance(stage, int) else 0
