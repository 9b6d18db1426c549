"""Why a script could not be judged: one clear line for each error of its own, and what it would start beside itself."""

import ast
import contextlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

_LAUNCHERS = ("python", "accelerate", "torchrun", "deepspeed", "pip", "uv", "conda", "ray")
_NETWORK = (
    "ConnectionError",
    "ConnectTimeout",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "NewConnectionError",
)
_OWN = str(pathlib.Path(__file__).parent.parent)
_GATED = ("GatedRepoError", "RepositoryNotFoundError")


class Stopped(BaseException):
    """The script would start another process that trains; the message names its command."""


def describe(error: BaseException, script: str | pathlib.Path, log: str = "", line: int = 0) -> str:
    """Return one line about an error that ended a script: where, what, and the next step where there is one.

    Args:
        error: as it came out of the script.
        script: its path.
        line: of the script that began training, for an error from there.
        log: the file that holds what the script printed to stderr, for a script that ended by itself.
    """
    where = _place(error, str(script), line)
    chain = list(_causes(error))
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    text = " ".join(str(error).split())[:300]
    if isinstance(error, SystemExit):
        said = _last_line(log)
        because = f'; it said last: "{said}"' if said else ""
        if error.code == 2 and said:
            return f"{where} wants other arguments{because}. Next: give them after the script's name"
        return f"{where} ended by itself with status {error.code or 0} before training{because}"
    if isinstance(error, Stopped):
        return f"{where} {text}"
    if isinstance(error, EOFError):
        return f"{where} asks on its input, and nobody is there to answer. Next: give it as an argument or a file"
    if isinstance(error, ModuleNotFoundError):
        return (
            f"{where} needs {error.name}, which {sys.executable} does not have. "
            "Next: --python with the Python that you train with"
        )
    gated = any("gated repo" in str(each) for each in chain)
    if gated or names & set(_GATED):
        return (
            f"{where} asks the hub for what it does not give to this user (gated, private or not there): {text}. "
            "Next: huggingface-cli login, or the path of a local copy"
        )
    if names & set(_NETWORK) or "couldn't connect to" in text.lower() or "offline mode" in text.lower():
        return (
            f"{where} needs the network, which is not there: {text}. Next: a local copy of the configuration, the "
            "tokenizer and the dataset, or a machine with a network"
        )
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{where} reads {error.filename}, which is not there (from {os.getcwd()})"
    if isinstance(error, KeyboardInterrupt):
        return f"{where} was interrupted"
    return f"{where} ended in {type(error).__name__}: {text}" if text else f"{where} ended in {type(error).__name__}"


def _place(error: BaseException, script: str, line: int) -> str:
    lines = [line] * bool(line) + [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script
    ]
    name = pathlib.Path(script).name
    return f"{name}, line {lines[-1]}," if lines else name


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _last_line(log: str) -> str:
    sys.stderr.flush()
    try:
        lines = [line.strip() for line in pathlib.Path(log).read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""


@contextlib.contextmanager
def no_other_processes(script: str) -> Iterator[None]:
    """Inside, the script cannot start another Python or a launcher: what that trains would not be watched, nor cut."""
    import subprocess

    import torch.multiprocessing

    original = subprocess.Popen.__init__

    def start(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        first = args if isinstance(args, (str, bytes, os.PathLike)) else next(iter(args), "")
        words = os.fsdecode(first).split()
        name = pathlib.Path(next((word for word in words if "=" not in word), "")).name
        if name.startswith(_LAUNCHERS) and _is_called_by(script):
            shown = args if isinstance(args, str) else " ".join(map(str, args))
            raise Stopped(
                f'starts another process, "{shown[:120]}", which preflight does not follow. Next: failurelab '
                "preflight of the script that it runs"
            )
        original(self, args, *rest, **options)

    def spawn(function: Any, *_: Any, **__: Any) -> None:
        raise Stopped(
            f"spawns processes that run {getattr(function, '__name__', 'a function')}, which preflight does not "
            "follow. Next: a script that one process can run, started by torchrun or accelerate launch"
        )

    with (
        mock.patch.object(subprocess.Popen, "__init__", start),
        mock.patch.object(os, "system", lambda command: start(None, command)),
        mock.patch.object(torch.multiprocessing, "spawn", spawn),
        mock.patch.object(torch.multiprocessing, "start_processes", spawn),
    ):
        yield


def _is_called_by(script: str) -> bool:
    """Whether the script itself, or code beside it, is the nearest caller that is not the standard library."""
    folder, frame = str(pathlib.Path(script).resolve().parent), sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" in name or name.startswith(_OWN):
            return False
        if name == script or os.path.realpath(name).startswith(folder + os.sep):
            return True
        frame = frame.f_back
    return False


def visible_gpus() -> int | None:
    """Return how many GPUs a process sees: as CUDA_VISIBLE_DEVICES says, or as they are; None where nothing tells."""
    import torch

    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said:
        return len([device for device in said.split(",") if device.strip() not in ("", "-1")])
    return torch.cuda.device_count() if torch.cuda.is_available() else None


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


def trainings(text: str) -> list[int]:
    """Return the lines of a script that call `train()` of what is called a trainer."""
    calls = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "train"
    )
    return sorted(call.lineno for call in calls if "trainer" in ast.unparse(call.func.value).lower())
