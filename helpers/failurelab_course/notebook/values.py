"""What runs inside an era's kernel: its quiet start, its quick end, and the values that it exchanges.

It is loaded there as an IPython extension, before the first cell. Without torch, so that a kernel starts in a second.
"""

import atexit
import faulthandler
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from IPython import get_ipython

from failurelab_course import processes

LOG = "FAILURELAB_KERNEL_LOG"  # the environment variable that names the kernel's log


class NotSendable(TypeError):
    """A value that JSON cannot carry between two kernels; the message says which and what to do."""


def load_ipython_extension(shell) -> None:
    """Make a new kernel quiet, let a crash write its Python stack to the kernel's log, and let its end be quick."""
    from failurelab_course.experiments.quiet import quiet

    processes.end_with_parent()
    if os.getppid() != int(os.environ["JPY_PARENT_PID"]):  # it has gone meanwhile
        os._exit(1)
    quiet()
    # The kernel has taken stderr over, to relay it; after a crash nobody would.
    faulthandler.enable(open(os.environ[LOG], "a"), all_threads=False)  # noqa: SIM115 (open until the end)
    atexit.register(_leave, shell)


def _leave(shell) -> None:
    """End the process after all that was registered with atexit since the start: to take torch down takes 2 s more."""
    shell.user_ns.clear()  # files left open are written
    gc.collect()
    os._exit(0)


def preload() -> None:
    """Import what takes long, so that a cell need not wait: torch, transformers, trl's GRPOTrainer, matplotlib.

    A Trainer prints its log as lines from then on (`log_lines`).
    """
    from failurelab_course.experiments import imports

    with imports.uncollected():
        import matplotlib.pyplot  # noqa: F401
        from trl import GRPOConfig, GRPOTrainer  # noqa: F401

        import failurelab_course.experiments.observe  # noqa: F401
        from failurelab_course.notebook import log_lines

    log_lines.install()


def last_traceback() -> str:
    """Return the traceback of the kernel's last error as Python prints it, without this machine's paths.

    A frame of a library is named by its path in site-packages, one of a cell by the cell; IPython's own are left out.
    """
    lines = ["Traceback (most recent call last):"]
    for frame in traceback.extract_tb(sys.last_value.__traceback__):
        name = frame.filename.rpartition("site-packages/")[2]
        if name.startswith("IPython/"):
            continue
        name = "the cell" if "ipykernel_" in name else os.path.basename(name) if os.path.isabs(name) else name
        lines.append(f'  File "{name}", line {frame.lineno}, in {frame.name}')
        lines += [f"    {frame.line}"] if frame.line else []
    return "\n".join(lines)


def pack(values: Mapping[str, Any]) -> str:
    """Return named values as JSON text.

    NaN and infinities travel as they are, for a failing run has such figures to report; a tuple becomes a list.

    Raises:
        NotSendable: a value, or something within it, is no number, string, boolean, None, list or dictionary of these.
    """
    for name, value in values.items():
        try:
            json.dumps(value)  # first: what contains itself ends here
        except (TypeError, ValueError, RecursionError) as error:
            step = "Next: carry the numbers, strings or lists that you need of it, such as x.tolist() or list(x)."
            raise NotSendable(f"{name} cannot be carried by JSON: {error}. {step}") from None
        _check_keys(name, value)
    return json.dumps(dict(values))


def _check_keys(path: str, value: Any) -> None:
    """Refuse keys that JSON would turn into strings."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise NotSendable(
                    f"{path} is a dict with a key of type {type(key).__name__} ({key!r}), and JSON's keys are strings. "
                    f"Next: convert the keys with str(), or carry list({path}.items())."
                )
            _check_keys(f"{path}[{key!r}]", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _check_keys(f"{path}[{index}]", part)


def load(text: str) -> None:
    """Set variables of this kernel from the JSON text of `pack`."""
    get_ipython().push(json.loads(text))


def dump(names: Iterable[str]) -> str:
    """Return variables of this kernel as JSON text, as `pack` does.

    Raises:
        NotSendable: a value that JSON cannot carry.
        NameError: there is no such variable.
    """
    variables = get_ipython().user_ns
    for name in names:
        if name not in variables:
            raise NameError(f"{name} does not exist there after the cell. Next: assign it in the cell")
    return pack({name: variables[name] for name in names})
