"""A launcher's line as users have it: `accelerate launch train.py`, `torchrun`, `deepspeed`, `python -m`, `trl grpo`.

This is where the launch is read: the script, its arguments, how many processes there will be, and whether the launch
asks for ZeRO. A launcher's options are read by the launcher's own parser, in the Python that trains
(`launcher_options`), and so are the files that it reads: that of `accelerate config`, say. `trl` is accelerate with
options that may stand in the file of `--config` too. Where the processes are started is `session`.

Source: trl `cli`.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

from failurelab.errors import FailureLabError

SCRIPTS = (".py", ".ipynb")
OPTIONS = pathlib.Path(__file__).with_name("launcher_options.py")
_WITH_VALUE = ("-W", "-X")  # options of Python's own that take one
_MODULES = {  # that `python -m` may run, and what they are
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
}
_OF_ACCELERATE = (  # options that trl passes on
    "num_processes", "num_machines", "config_file", "accelerate_config", "zero_stage", "deepspeed_config_file",
    "mixed_precision", "gpu_ids", "main_process_ip", "main_process_port", "machine_rank",
)  # fmt: skip
_FLAGS = ("use_deepspeed", "use_fsdp", "multi_gpu", "cpu")
OF_LAUNCH = (*_OF_ACCELERATE, *_FLAGS)
_NO_TRAINING = ("chat", "env", "skills", "vllm-serve", "vllm_serve", "--help", "-h")  # of the command trl
_STARTERS = [["nohup"], ["time"], ["env"], ["exec"], ["srun"], *([tool, "run"] for tool in ("uv", "poetry", "pdm"))]


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
        environment: variables set in front of the command, and by the launcher.
        python: the interpreter that the line names, or that of its launcher; None where none is found.
        left_out: what the launch asks for and a judgement does without, a text each.
        zero_config: of DeepSpeed: the path of a JSON file, or its text.
    """

    script: str = ""
    arguments: tuple[str, ...] = ()
    world_size: int = 1
    zero_stage: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    python: str | None = None
    module: str = ""
    left_out: tuple[str, ...] = ()
    zero_config: str = ""


def read_line(words: list[str], python: str | None = None) -> Launch:
    """Return what a line would start, by its words, as a shell splits it.

    Args:
        words: of the line.
        python: the Python that trains; by default the line's own, or this one.

    Raises:
        LaunchError: no script in it, a launcher that does not take it, or a configuration that cannot be read.
    """
    words, variables = list(words), {}
    while words:
        if re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        elif words[:2] in _STARTERS or words[:1] in _STARTERS:
            del words[: 2 if words[:2] in _STARTERS else 1]
            while words and words[0].startswith("-"):  # its own options, of which none changes what is started
                del words[0]
        else:
            break
    command = pathlib.Path(words[0]).name if words else ""
    if command.endswith(SCRIPTS):
        return Launch(words[0], tuple(words[1:]), _world_size(variables), **_of_variables(variables))
    named = None
    if re.fullmatch(r"python[\d.]*", command):
        named, *words = words
        if words[:1] != ["-m"] or words[1:2] == [] or words[1] not in _MODULES:
            return _read_python(words, variables, named)
        command, words = _MODULES[words[1]], words[2:]
    elif command in ("accelerate", "torchrun", "deepspeed", "trl"):
        named = _interpreter(words.pop(0))
    else:
        other = "Next: the line that it launches (python -m MODULE too), or SCRIPT with --world-size N"
        if command.endswith((".yaml", ".yml")):
            other = f"Next: failurelab preflight -- trl grpo --config {words[0]}, or with the launcher that reads it"
        known = "accelerate launch, torchrun, deepspeed, trl, python"
        raise LaunchError(f"{command or 'nothing'} is no launcher that preflight reads ({known}). {other}")
    interpreter = python or named or sys.executable
    if command == "trl":
        command, words = "accelerate", _as_accelerate(words, interpreter)
    elif command == "accelerate" and words[:1] == ["launch"]:
        words = words[1:]
    launch = _ask_launcher(command, words, variables, interpreter)
    if not launch["module"] and not launch["script"].endswith(SCRIPTS):
        raise _no_script([launch["script"]])
    size, machines = int(launch["processes"]), int(launch["machines"])
    if size < 1:
        raise LaunchError(f"{size} is no number of processes. Next: the number itself, such as --num_processes 4")
    asked = _of_variables(variables | launch.get("environment", {}))
    if "zero_stage" in launch:
        asked |= _zero(launch["deepspeed_config_file"], launch["zero_stage"])
    left_out = (*launch.get("left_out", ()), *[f"{machines} machines -> 1"] * (machines > 1))
    more = {"python": named, "module": launch["module"], "left_out": left_out}
    return Launch(launch["script"], tuple(launch["arguments"]), size, **asked, **more)


def _world_size(variables: dict[str, str]) -> int:
    """Return how many processes the variables in front of a plain Python tell of."""
    size = variables.get("WORLD_SIZE", "1")
    if not size.isdigit() or not int(size):
        raise LaunchError(f"WORLD_SIZE={size} is no number of processes. Next: the number itself")
    return int(size)


def _of_variables(variables: dict[str, str]) -> dict[str, Any]:
    """Return the variables, and the ZeRO that the environment asks for, as accelerate tells it its processes."""
    environment, zero = os.environ | variables, {}
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        zero = _zero(environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"), stage)
    return {"environment": tuple(variables.items()), **zero}


def _zero(config: str | None, stage: Any) -> dict[str, Any]:
    return {"zero_stage": zero_stage(config) or int(stage), "zero_config": config or ""}


def _read_python(words: list[str], variables: dict[str, str], python: str) -> Launch:
    """Return what `python [options] SCRIPT` or `python [options] -m MODULE` starts."""
    words = list(words)
    while words and words[0].startswith("-") and words[0] != "-m":
        del words[: 2 if words[0] in _WITH_VALUE else 1]
    module = words[1] if words[:1] == ["-m"] and words[1:] else ""
    if not module and not (words and words[0].endswith(SCRIPTS)):
        raise _no_script(words)
    script, arguments = ("", words[2:]) if module else (words[0], words[1:])
    more = _of_variables(variables) | {"python": python, "module": module}
    return Launch(script, tuple(arguments), _world_size(variables), **more)


def _no_script(words: list[str]) -> LaunchError:
    return LaunchError(
        f"no script was found in this line ({' '.join(words[:3]) or 'it ends before one'}). "
        "Next: a line that names the file, such as accelerate launch train.py"
    )


def _ask_launcher(launcher: str, words: list[str], variables: dict[str, str], python: str) -> dict[str, Any]:
    """Return what a launcher's own parser reads in its options, in the Python that trains."""
    command = [python, "-P" if sys.version_info >= (3, 11) else "-u", str(OPTIONS), launcher, *words]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{python} cannot be asked for its launcher ({error}). Next: --python") from error
    return answered(launcher, process.stdout, process.stderr)


def answered(launcher: str, printed: str, errors: str) -> dict[str, Any]:
    """Return what `launcher_options` has printed.

    Raises:
        LaunchError: its launcher does not take the line.
    """
    last = (printed.strip() or "{}").splitlines()[-1]
    launch = json.loads(last) if last.startswith("{") else {}
    if "processes" not in launch:
        said = (errors.strip().splitlines() or ["it said nothing"])[-1]  # argparse's own line, or the last
        why = launch.get("error") or said.partition(" error: ")[2] or said
        raise LaunchError(
            f"{launcher} does not take this line: {why[:300].rstrip('.')}. "
            "Next: a line that it takes, which names the file, such as accelerate launch train.py"
        )
    return dict(launch)


def _as_accelerate(words: list[str], python: str) -> list[str]:
    """Return accelerate's line for `trl grpo --config x.yaml`, which runs a script of trl's own by accelerate.

    The launch's options may stand in that file too; those in the line come first.
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
        if not name.startswith("--") or key not in (*_OF_ACCELERATE, *_FLAGS):
            arguments.append(word)
            if word == "--config" and rest:
                options = _launch_of(rest[0]) | options
            continue
        if not equals and key not in _FLAGS:
            value = rest.pop(0) if rest else ""
        options[key] = value
    if named := options.pop("accelerate_config", ""):
        options["config_file"] = named if os.path.isfile(named) else _config_of_trl(named, python)
    launch = [word for key, value in options.items() for word in (f"--{key}", *[value] * (key not in _FLAGS))]
    return [*launch, "-m", f"trl.scripts.{verb}", *arguments]


def _launch_of(path: str) -> dict[str, str]:
    """Return the launch's options in a file that trl reads."""
    import yaml

    try:
        config = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(config)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or "it is no YAML of names and values"
        raise LaunchError(f"the configuration {path} cannot be read ({why}). Next: mend it, or name another") from error
    flags = {key: "" for key in _FLAGS if config.get(key) is True}
    return flags | {key: str(config[key]) for key in _OF_ACCELERATE if key in config}


def _config_of_trl(name: str, python: str) -> str:
    """Return the path of one of the configurations that trl brings for accelerate, such as `zero3`."""
    for place in _find_places("trl", python):
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
    process = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    return list(map(pathlib.Path, filter(None, process.stdout.splitlines())))


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


def missing_file(config: Any) -> str:
    """Return the path of a DeepSpeed configuration where that file is not there; empty elsewhere."""
    text = str(config) if isinstance(config, (str, os.PathLike)) else ""
    return text if text and not text.lstrip().startswith("{") and not os.path.isfile(text) else ""


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
