"""A launcher's line as users have it: `accelerate launch train.py`, `torchrun`, `deepspeed`, `python -m`, `trl grpo`.

The line is read, not run: what counts is the script, its arguments, how many processes there will be, and whether the
launch asks for ZeRO.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
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
        return dataclasses.replace(_read_trl(words), environment=tuple(variables), python=python)
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
    size, stage = _size(options, command)
    script = "" if module else words[0]
    return Launch(script, tuple(words[1:]), size, stage, tuple(variables), python, module)


def _read_trl(words: list[str]) -> Launch:
    """Return what `trl grpo --config x.yaml` starts: a script of trl's own, by accelerate, which takes some options."""
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if not verb or verb in _NO_TRAINING:
        named = f"trl {verb}".strip()
        raise LaunchError(f"{named} trains nothing. Next: a line such as trl grpo --config grpo.yaml")
    arguments, size, stage = [], 1, 0
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in ("--num_processes", "--accelerate_config"):
            arguments.append(word)
            continue
        value = value if equals else rest.pop(0) if rest else ""
        if name == "--num_processes":
            size = _number(value)
        elif its_own := re.fullmatch(r"zero(\d)", value):  # one of trl's
            stage = int(its_own[1])
        elif os.path.exists(value):
            size, stage = _size({"config_file": value}, "accelerate")
    return Launch("", tuple(arguments), size, stage, module=f"trl.scripts.{verb}")


def find_module(module: str, python: str) -> pathlib.Path:
    """Return the file that `-m MODULE` runs, in this folder or where a Python finds it; nothing of it is imported.

    Raises:
        LaunchError: there is none.
    """
    top, *parts = module.split(".")
    code = (
        f"import importlib.util, os, sys; sys.path.insert(0, os.getcwd()); spec = importlib.util.find_spec({top!r}); "
        "print(*(spec and (spec.submodule_search_locations or [spec.origin]) or []), sep='\\n')"
    )
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    for place in map(pathlib.Path, filter(None, asked.stdout.splitlines())):
        inside = place.joinpath(*parts)
        for file in (place, inside.with_suffix(".py"), inside / "__main__.py"):
            if file.is_file():
                return file
    raise LaunchError(
        f"{python} finds no module {module} from {pathlib.Path.cwd()}. Next: start it in the folder from which you "
        "train, or give the path of its file"
    )


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


def _size(options: dict[str, str], command: str) -> tuple[int, int]:
    config = _accelerate_config(options["config_file"]) if options.get("config_file") else {}
    stage = 0
    if "use_deepspeed" in options or str(config.get("distributed_type", "")).upper() == "DEEPSPEED":
        inside = config.get("deepspeed_config") or {}
        file = options.get("deepspeed_config_file") or inside.get("deepspeed_config_file")
        asked = (options.get("zero_stage"), inside.get("zero_stage"), 2)
        stage = _number(next(each for each in asked if each not in (None, "")))
        if file:
            stage = zero_stage(file) or stage
    machines = _number((options.get("nnodes") or options.get("num_nodes") or "1").split(":")[-1])
    if command == "accelerate":
        given = options.get("num_processes") or config.get("num_processes")
        return _number(given or 1), stage
    each = options.get("nproc_per_node") or options.get("num_gpus") or "1"
    return machines * _number(each), stage


def _number(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise LaunchError(
            f"{text!r} is no number of processes that this machine can tell. Next: the number itself"
        ) from None


def _accelerate_config(path: str) -> dict:
    """Read accelerate's configuration: YAML, or JSON in a file of that name."""
    import yaml

    kind = "JSON" if path.endswith(".json") else "YAML"
    try:
        text = pathlib.Path(path).read_text()
        config = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or f"it is no {kind}"
        raise LaunchError(f"the configuration {path} cannot be read ({why})") from error
    return config if isinstance(config, dict) else {}


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
