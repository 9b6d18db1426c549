"""A sign of life under a cell that runs long and says nothing: `still running: 12 s`, gone when the cell ends.

What goes wrong without it: a cell that trains for twenty seconds looks like one that hangs. JupyterLab shows `[*]` and
a filled circle for both, and after *Run All* it shows the last cell's. The sign must never be stored, for it differs on
every run: it is shown only where a person looks (a kernel that a Jupyter server started), only while the cell has put
out nothing, and it is cleared before the first real output, before an error, and at the cell's end.
"""

import contextlib
import os
import sys
import threading
from typing import Any

from failurelab.handles import Handle, wrap_method

# Seconds without any output before the sign comes, and between its changes.
PATIENCE, STEP = 4.0, 1.0
# Set by a Jupyter server in the kernels that it starts for a notebook or console; papermill and nbval do not.
_WATCHED = "JPY_SESSION_NAME"
# Set in everything that `failurelab run` starts (`processes.MARK`).
_RUN = "FAILURELAB_RUN"
_STYLE = "opacity:0.75;font-style:italic"  # of the theme's own colour: readable on light and dark


class _Sign:
    """The sign of one cell: a thread shows it; whatever comes first, an output or the end, takes it away."""

    def __init__(self, shell: Any, where: str):
        self._shell, self._where = shell, where
        # Taken before they are wrapped: the sign's own messages are no output.
        self._publish, self._clear = shell.display_pub.publish, shell.display_pub.clear_output
        self._lock, self._over = threading.RLock(), threading.Event()
        self._shown = False
        outputs = [(stream, "write") for stream in (sys.stdout, sys.stderr)]
        outputs += [(shell.display_pub, name) for name in ("publish", "clear_output")]
        outputs += [(shell.displayhook, "start_displayhook"), (shell, "_showtraceback")]
        self._wraps: list[Handle] = [
            wrap_method(owner, name, self._before, "the sign of life")
            for owner, name in outputs
            if callable(getattr(owner, name, None)) and hasattr(owner, "__dict__")
        ]
        threading.Thread(target=self._run, daemon=True).start()

    def _before(self, method, *args, **kwargs):
        self.take_away()
        return method(*args, **kwargs)

    def _run(self) -> None:
        waited, pause = 0.0, PATIENCE
        while not self._over.wait(pause):
            waited, pause = waited + pause, STEP
            text = f"still running{self._where}: {waited:.0f} s"
            with self._lock:
                if self._over.is_set():
                    return
                data = {"text/plain": text, "text/html": f'<span style="{_STYLE}">{text}</span>'}
                self._publish(data, {}, transient={"display_id": "failurelab-live"}, update=self._shown)
                self._shown = True

    def take_away(self) -> None:
        """Clear the sign if it is shown, and let it not come again."""
        with self._lock:
            self._over.set()
            if self._shown:
                self._shown = False
                self._clear()

    def end(self) -> None:
        """Take the sign away, and leave the shell as it was."""
        self.take_away()
        for wrap in self._wraps:
            wrap.remove()


class Signs:
    """The signs of a shell's cells, one at a time."""

    def __init__(self, shell: Any):
        self._shell, self._sign = shell, None

    def begin(self, info: Any = None) -> None:
        """Watch the cell that begins."""
        self.end()
        words = (getattr(info, "raw_cell", None) or "").split(None, 2)
        self._sign = _Sign(self._shell, f" in {words[1]}" if words[:1] == ["%%era"] and len(words) > 1 else "")

    def end(self, result: Any = None) -> None:
        """The cell has ended."""
        if self._sign:
            self._sign.end()
            self._sign = None


def is_run() -> bool:
    """Whether `failurelab run` or `outputs` started this process."""
    return bool(os.environ.get(_RUN))


def looked_at(shell: Any) -> bool:
    """Whether a person looks at this shell: a Jupyter server started its kernel for a notebook or a console.

    A run that is started from such a notebook (`!failurelab run`, nbval) inherits the server's variable, and nobody
    looks at its kernels: there the process that started the kernel has the variable too, which no server has.

    Args:
        shell: what `get_ipython()` returns, or None.
    """
    if not os.environ.get(_WATCHED) or is_run():
        return False
    import psutil

    with contextlib.suppress(psutil.Error, ValueError):
        starter = psutil.Process(int(os.environ.get("JPY_PARENT_PID") or os.getppid()))
        if starter.environ().get(_WATCHED):
            return False
    return hasattr(shell, "kernel") and hasattr(shell.display_pub, "pub_socket")


def watch(shell: Any) -> None:
    """Show signs of life in this shell from the running cell on; do nothing where nobody looks, or if they are shown.

    Args:
        shell: what `get_ipython()` returns, or None.
    """
    if not looked_at(shell) or hasattr(shell, "failurelab_signs"):
        return
    signs = shell.failurelab_signs = Signs(shell)
    shell.events.register("pre_run_cell", signs.begin)
    shell.events.register("post_run_cell", signs.end)
    signs.begin()
