"""What an era's kernel says, shown in the notebook: its text, results and pictures, and its errors.

All is shown as it comes, by the notebook's own IPython, so that it lands in the cell that asked for it, in `%%capture`
or in a terminal alike. What goes wrong has an exception of its own, which shows no stack of this package's frames.
"""

import sys
from collections.abc import Iterable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import clear_output

from failurelab_course import eras

# A widget lives in the kernel that made it: its view would show nothing here.
_WIDGET = "application/vnd.jupyter.widget-view+json"


class EraMagicError(eras.EraError):
    """A cell cannot be run in an era: the era, an option or a value is wrong."""


class EraKernelDied(EraMagicError):
    """An era's kernel ended by itself, or never started. The next cell starts a new one."""


class EraCellError(Exception):
    """Code in an era raised: `era`, `ename`, `evalue` and `traceback` (lines) say where and what."""

    def __init__(self, era: str, ename: str, evalue: str, traceback: Iterable[str]):
        super().__init__(f"{ename}: {evalue} (in era {era})")
        self.era, self.ename, self.evalue, self.traceback = era, ename, evalue, list(traceback)
        self.add_note("\n".join(self.traceback))  # shown by plain Python, which knows no _render_traceback_

    def _render_traceback_(self) -> list[str]:
        return self.traceback


class EraInterrupted(KeyboardInterrupt):
    """Code in an era was interrupted from here; `era` and `traceback` as in `EraCellError`."""

    def __init__(self, era: str, message: str, traceback: Iterable[str] = ()):
        super().__init__(f"{message} (in era {era})")
        self.era, self.traceback = era, list(traceback)

    def _render_traceback_(self) -> list[str]:
        return self.traceback or [f"KeyboardInterrupt: {self}"]


class CellValue:
    """The value of an era cell's last expression, as its kernel formatted it."""

    def __init__(self, data: dict[str, Any], metadata: dict[str, Any]):
        self._data, self._metadata = data, metadata

    def __repr__(self) -> str:
        return self._data.get("text/plain", "")

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._data, self._metadata


def show(kind: str, content: dict[str, Any]) -> None:
    """Show one message of an era's kernel as if it came from here; messages of other kinds are for front-ends."""
    if kind == "stream":
        stream = sys.stdout if content["name"] == "stdout" else sys.stderr
        stream.write(content["text"])
        stream.flush()
    elif kind == "clear_output":
        clear_output(content["wait"])
    elif kind in ("execute_result", "display_data", "update_display_data") and _WIDGET not in content["data"]:
        result = CellValue(content["data"], content["metadata"])
        if kind == "execute_result" or not InteractiveShell.initialized():
            sys.displayhook(result)
        else:
            InteractiveShell.instance().display_pub.publish(
                content["data"],
                content["metadata"],
                transient=content.get("transient") or {},
                update=kind == "update_display_data",
            )
