"""A notebook's own kernel, as JupyterLab starts it, and what its cells give back."""

import dataclasses
import os
import re
import tempfile

from jupyter_client.manager import KernelManager

PATIENCE = 300  # seconds until a test gives up: a limit against hanging, which no test waits for


@dataclasses.dataclass
class Output:
    """What one cell of the notebook gave back."""

    status: str = ""
    text: str = ""
    errors: str = ""  # what was written to stderr
    messages: list = dataclasses.field(default_factory=list)  # (kind, content), streams apart
    error: dict = dataclasses.field(default_factory=dict)

    @property
    def kinds(self):
        return [kind for kind, _ in self.messages]

    @property
    def value(self):
        """The value of the cell's last expression, as text."""
        return self.messages[0][1]["data"]["text/plain"]

    @property
    def traceback(self):
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(self.error["traceback"]))


class Notebook:
    """A notebook's kernel; `variables` are those of its environment that it has beside this process's."""

    def __init__(self, **variables):
        # Sockets in a folder of its own: a port may be taken by another process before the kernel has it.
        self.folder = tempfile.TemporaryDirectory(prefix="kernel-", dir="/tmp")
        place = os.path.join(self.folder.name, "socket")
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=place, shutdown_wait_time=PATIENCE)
        self.manager.start_kernel(env=os.environ | variables)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def run(self, cell, when_it_says="", do=None):
        """Run a cell; call `do` with what it prints, once that has these words in it."""
        output, waiting = Output(), [do] if do else []

        def add(message):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                if content["name"] == "stdout":
                    output.text += content["text"]
                else:
                    output.errors += content["text"]
                if waiting and when_it_says in output.text:
                    waiting.pop()(output.text)
            elif kind == "error":
                output.error = content
            elif kind not in ("status", "execute_input"):
                output.messages.append((kind, content))

        reply = self.client.execute_interactive(cell, allow_stdin=False, timeout=PATIENCE, output_hook=add)
        output.status = reply["content"]["status"]
        return output

    def end(self):
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.folder.cleanup()
