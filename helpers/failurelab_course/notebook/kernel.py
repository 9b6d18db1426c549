"""The notebook's side of an era's kernel: start it, run code in it, interrupt it, end it.

The kernel is a child of the notebook's own. It ends when that is gone, however that ended: ipykernel looks for its
parent each second, and Linux kills it at once (`processes.end_with_parent`). What it started is ended from here, by a
mark in its environment. What can go wrong on the way has an exception of its own (`kernel_output`) that says it in a
line.

Messages are read here, and not by jupyter_client's `execute_interactive`: that one waits without end for a kernel that
dies during the cell, and after an interrupt in a notebook it goes on reading, in a thread, what the next cell needs.
"""

import ast
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from queue import Empty
from typing import Any

from IPython.core import page
from jupyter_client import BlockingKernelClient

from failurelab_course import eras, processes
from failurelab_course.notebook import values
from failurelab_course.notebook.kernel_output import EraCellError, EraInterrupted, EraKernelDied, EraMagicError, show

# Seconds for a new kernel's first answer, after trl's import (a cold disk is slow), and for a cell to end after an
# interrupt.
START_SECONDS = 600.0
INTERRUPT_SECONDS = 15.0
_FOREVER = float("inf")


@contextlib.contextmanager
def _interrupts() -> Iterator[list[float]]:
    """Yield the times of the interrupts that come meanwhile; none is raised.

    One that was raised between two statements, or in the handler of another exception, would leave the cell running
    there. Outside the main thread Python raises none, and the list stays empty.
    """
    times: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield times
        return
    before = signal.signal(signal.SIGINT, lambda *_: times.append(time.monotonic()))
    try:
        yield times
    finally:
        signal.signal(signal.SIGINT, before)


class EraKernel:
    """A kernel of one era: it starts at the first need, and keeps its variables until it is stopped."""

    def __init__(self, name: str):
        """Find the era; nothing is started yet. Where a set-up is making it, wait for that, and show how far it is.

        Raises:
            eras.EraError: there is no such era, or it has not been made.
        """
        self.era = eras.find(name, wait=print)
        self._lock = threading.RLock()
        self._process: subprocess.Popen | None = None
        self._client: BlockingKernelClient | None = None
        self._folder: pathlib.Path | None = None
        self._ready = False  # it has answered
        self._cells: set[str] = set()  # requests whose output is shown
        self._log_shown = 0  # bytes of the log that belong to cells before this one

    @property
    def alive(self) -> bool:
        """Whether the kernel's process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, preload: bool = False) -> None:
        """Start the kernel, without waiting for it; with `preload` it imports trl's GRPOTrainer meanwhile.

        Raises:
            EraKernelDied: the last kernel ended by itself, and its variables with it; the next call starts a new one.
        """
        with self._lock:
            if self._process is not None and not self.alive:
                had_variables = bool(self._cells)
                error = self._end_of_kernel("ended after its last cell")
                if had_variables:
                    raise error
            if self._process is None:
                self._launch()
            if preload:
                # Should an import fail, the cell that needs it says so itself.
                self._request("preload()")

    def run(self, code: str, send: Mapping[str, Any] | None = None, fetch: Iterable[str] = ()) -> dict[str, Any]:
        """Run code in the kernel, show its output as it comes, and return the variables named in `fetch`.

        Args:
            code: what IPython accepts as a cell.
            send: variables to set there first, as JSON can hold them (see `values.pack`).
            fetch: names of the variables to bring back.

        Raises:
            EraCellError: the code raised.
            EraInterrupted: an interrupt here was passed on, and ended the code there.
            EraMagicError: a value cannot be carried, or a variable named in `fetch` does not exist.
            EraKernelDied: the kernel ended by itself, or did not start.
        """
        names = list(fetch)
        try:
            packed = values.pack(send or {})
        except values.NotSendable as error:
            raise EraMagicError(f"-i: {error}") from None
        with self._lock:
            self.start()
            self._wait_until_free()
            if send:
                self._ask(f"load({packed!r})", "-i")
            self._run_cell(code)
            return json.loads(self._ask(f"dump({names!r})", "-o")) if names else {}

    def last_traceback(self) -> str:
        """Return the traceback of the last error there, as `values.last_traceback` writes it."""
        with self._lock:
            return self._ask("last_traceback()", "--traceback")

    def interrupt(self) -> None:
        """Interrupt what runs in the kernel, and the processes it has started, as Ctrl-C would."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGINT)

    def stop(self) -> None:
        """End the kernel and every process it started; its variables are lost."""
        if not self._lock.acquire(timeout=1):
            # Another thread runs a cell in it: that thread reports the end.
            self._process.kill()
            return
        try:
            if self.alive and self._ready:
                # Politely, so that open files are written; one that is busy does not answer.
                self._client.shutdown()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
            if self._process is not None:
                self._discard()
        finally:
            self._lock.release()

    def _launch(self) -> None:
        # Sockets in a folder of its own, not ports: nobody else can reach them, and no two kernels get the same.
        # The path of a socket is at most some hundred bytes long.
        place = tempfile.gettempdir() if len(tempfile.gettempdir()) < 60 else "/tmp"
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="failurelab-era-", dir=place))
        connection, log = self._folder / "connection.json", self._folder / "log"
        self._client = BlockingKernelClient(
            transport="ipc", ip=str(self._folder / "socket"), connection_file=str(connection)
        )
        self._client.context.rcvhwm = 0  # no output is dropped while another is shown
        try:
            self._client.write_connection_file()
        except OSError as error:
            self._client.context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            step = "Next: free some room, and run this cell again."
            raise EraMagicError(f"the kernel of era {self.era.name} cannot be started: {error}. {step}") from None
        environment = eras.environment(self.era) | {
            values.LOG: str(log),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "JPY_PARENT_PID": str(os.getpid()),
        }
        # Inside a test, ipykernel would not relay what subprocesses and C code write.
        environment.pop("PYTEST_CURRENT_TEST", None)
        # An interpreter that is gone is an exit status of env, and a line in the log, as what breaks later.
        kernel = ["/usr/bin/env", str(self.era.python), "-m", "ipykernel_launcher", "-f", str(connection)]
        kernel += ["--HistoryManager.enabled=False", f"--IPKernelApp.extensions={values.__name__}"]
        kernel += ["--IPKernelApp.reraise_ipython_extension_failures=True"]
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                kernel,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._client.start_channels(hb=False, stdin=False)
        self._ready, self._cells, self._log_shown = False, set(), 0

    def _discard(self) -> int:
        """Forget the kernel, ending it and all that it started; return its exit status."""
        self._process.kill()
        code = self._process.wait()
        processes.end(lambda: processes.marked(str(self._folder / "log"), values.LOG))
        self._client.stop_channels()
        self._client.context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process = self._client = self._folder = None
        return code

    def _last_words(self) -> list[str]:
        """Return what the kernel's process wrote since the cell began: the stack of a crash, or the last lines."""
        try:
            text = (self._folder / "log").read_bytes()[self._log_shown :].decode(errors="replace")
        except OSError:
            return []
        lines = [line for line in text.splitlines() if line.strip()]
        crash = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        return lines[-12:] if crash is None else lines[crash : crash + 8]

    def _end_of_kernel(self, how: str) -> EraKernelDied:
        """Discard the kernel; return the error that says `how` it ended, by itself or because it has to be ended."""
        was_alive, ran, last_words = self.alive, bool(self._cells), self._last_words()
        code = self._discard()
        if was_alive:
            why = "it was ended"
        elif code < 0:
            why = f"killed by {signal.Signals(-code).name}"
            why += ", which the system sends when memory runs out" if -code == signal.SIGKILL else ""
        else:
            why = f"exit status {code}"
        name = self.era.name
        if ran:
            next_step = "its variables are lost. Next: run the cells of this era again, the first starts a new kernel."
        else:
            next_step = f"nothing was run. Next: failurelab eras remove {name}, failurelab eras create {name}."
        text = f"the kernel of era {name} {how} ({why}); {next_step}"
        return EraKernelDied("\n".join([text, *(["Its last words:", *last_words] if last_words else [])]))

    def _check_alive(self, how: str) -> None:
        if not self.alive:
            raise self._end_of_kernel(how)

    def _request(self, call: str) -> str:
        """Ask for a call of a function of `values` in the kernel, without waiting; return the request's id."""
        expression = f"__import__({values.__name__!r}, fromlist=['_']).{call}"
        return self._client.execute("", silent=True, user_expressions={"answer": expression}, stop_on_error=False)

    def _ask(self, call: str, option: str) -> Any:
        """Call a function of `values` in the kernel and return its answer."""
        reply = self._reply(self._request(call), f"died while values were carried ({option})")
        answer = reply["user_expressions"]["answer"]
        if answer["status"] == "error":
            raise EraMagicError(f"{option} (era {self.era.name}): {answer['evalue']}")
        return ast.literal_eval(answer["data"]["text/plain"])

    def _reply(self, request: str, how: str, seconds: float = _FOREVER) -> dict[str, Any]:
        """Wait for the reply to a request; `how` describes the kernel's end, should it end now.

        Raises:
            EraKernelDied: the kernel ended.
            TimeoutError: it lives, and has not replied in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                message = self._client.shell_channel.get_msg(timeout=0.2)
            except Empty:
                self._check_alive(how)
                continue
            if message["parent_header"].get("msg_id") == request:
                return message["content"]
        raise TimeoutError

    def _wait_until_free(self) -> None:
        """Wait until the kernel has started and imported what was asked for. An interrupt here leaves that going on."""
        how = "did not start"
        try:
            self._reply(self._client.kernel_info(), how, START_SECONDS)
        except TimeoutError:
            raise self._end_of_kernel(f"did not answer within {START_SECONDS:.0f} s") from None
        while not self._ready:  # its output is heard only some time after the connection
            self._client.kernel_info()
            self._ready = bool(self._client.iopub_channel.socket.poll(500))
            self._check_alive(how)

    def _run_cell(self, code: str) -> None:
        self._log_shown = (self._folder / "log").stat().st_size
        # An input() there fails at once: nobody could answer it.
        request = self._client.execute(code, allow_stdin=False, stop_on_error=False)
        self._cells.add(request)
        interrupted, errors = self._show_output(request)
        try:
            reply = self._reply(request, "died", 5.0 if interrupted else _FOREVER)
        except TimeoutError:
            raise EraInterrupted(self.era.name, "interrupted") from None
        for payload in reply.get("payload", []):
            if payload.get("source") == "page":  # `name?` in a cell
                page.page(payload["data"])
            elif payload.get("source") == "ask_exit":  # `exit` in a cell: here it is the front-end that ends a kernel
                self.stop()
        if reply["status"] == "ok":
            for error in errors:  # shown by the cell itself, which went on
                print("\n".join(error["traceback"]), file=sys.stderr)
        elif interrupted and reply["ename"] in ("KeyboardInterrupt", "CancelledError"):
            raise EraInterrupted(self.era.name, "interrupted", reply["traceback"])
        else:
            traceback = errors[-1]["traceback"] if errors else reply["traceback"]
            raise EraCellError(self.era.name, reply["ename"], reply["evalue"], traceback)

    def _show_output(self, request: str) -> tuple[bool, list[dict[str, Any]]]:
        """Show output until the cell has ended; return whether it was interrupted, and the errors it published.

        An interrupt is passed on once the cell runs: a kernel that has not begun would ignore it.
        """
        running, passed = False, 0
        errors: list[dict[str, Any]] = []
        with _interrupts() as asked:
            while not asked or time.monotonic() < asked[-1] + INTERRUPT_SECONDS:
                if running and passed < len(asked):
                    self.interrupt()
                    passed = len(asked)
                try:
                    message = self._client.iopub_channel.get_msg(timeout=0.2)
                except Empty:
                    self._check_alive("died while this cell ran in it")
                    continue
                kind, content = message["header"]["msg_type"], message["content"]
                sender = message["parent_header"].get("msg_id")
                if sender == request and kind == "execute_input":
                    running = True
                elif sender == request and kind == "error":
                    errors.append(content)
                elif sender == request and kind == "status" and content["execution_state"] == "idle":
                    return bool(asked), errors
                elif sender in self._cells:  # of this cell, or of a thread that an earlier one left running
                    show(kind, content)
        text = f"the cell still runs {INTERRUPT_SECONDS:.0f} s after the interrupt. Next: %era_stop {self.era.name}"
        raise EraInterrupted(self.era.name, text)
