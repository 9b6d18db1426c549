"""A process for each stack that has imported the libraries: what preflight starts in that stack is forked from it.

To import them takes five seconds of a core, half of such a test. A kept process runs nothing,
so what is forked from it is as one that has just imported them. With another environment than the tests' a process is
started as usual. Tests of what is left behind have `own_processes`.

Run as a program, `PYTHON kept.py DESCRIPTOR`, it is that process.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys

LIBRARIES = {
    "torch": (),
    "transformers": ("AutoTokenizer", "BitsAndBytesConfig", "PreTrainedTokenizerBase", "Trainer"),
    "datasets": ("Dataset",),
    "peft": ("PeftModel", "LoraConfig"),
    "trl": ("GRPOConfig", "GRPOTrainer"),
}
USUAL = {}  # the variables that tests begin with
# By session or test, and no import reads them, or `run` sets what it read; and what every session sets.
DIFFER = {"TMPDIR", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "HF_DATASETS_CACHE"}
PIPE = subprocess.PIPE
_kept = {}


class Forked:
    """A process that was forked from a kept one, with those names of `subprocess.Popen` that a session uses."""

    def __init__(self, pid, stdin, ended):
        self.pid, self.stdin, self.returncode, self._ended = pid, stdin, None, ended

    def poll(self, patience=0):
        """Return its exit status, or None where it has none after `patience` seconds."""
        if self.returncode is None and select.select([self._ended], [], [], patience)[0]:
            self.returncode = int(self._ended.read() or -signal.SIGKILL)  # nothing is told by one that was ended too
            self._ended.close()
        return self.returncode

    def wait(self):
        """Wait for its exit status."""
        return self.poll(None)


def Popen(command, stdin, stdout, stderr, env, start_new_session):
    """Start `PYTHON SCRIPT ARGUMENTS`, as `subprocess.Popen` does, from what is kept for that Python."""
    assert stdin == PIPE and stdout is stderr and start_new_session
    python, *arguments = command
    if any(env.get(name) != USUAL.get(name) for name in (env.keys() | USUAL.keys()) - DIFFER):
        return subprocess.Popen(  # what is imported may be otherwise
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=start_new_session
        )
    if python not in _kept:
        _kept[python], there = socket.socketpair()
        with there:
            words = [python, __file__, str(there.fileno())]
            own = {name: value for name, value in env.items() if name != "TMPDIR"}  # by which a session ends its own
            subprocess.Popen(words, stdin=subprocess.DEVNULL, env=own, pass_fds=[there.fileno()])
    (read, write), (ended, told) = os.pipe(), os.pipe()
    order = {"arguments": arguments, "folder": os.getcwd(), "variables": dict(env)}
    socket.send_fds(_kept[python], [json.dumps(order).encode()], [read, stdout.fileno(), told])
    for given in (read, told):
        os.close(given)
    return Forked(int(_kept[python].recv(64)), os.fdopen(write, "wb"), os.fdopen(ended))


def serve(channel):
    """Import the libraries, and fork for each order, until nobody is left who could give one."""
    gc.disable()  # a quarter of the time of large imports, which leave little garbage
    for module, names in LIBRARIES.items():
        with contextlib.suppress(Exception):  # an error is left to what is forked
            loaded = importlib.import_module(module)
            for name in names:
                getattr(loaded, name, None)
    gc.freeze()
    gc.enable()
    child, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    left = {}
    while True:
        (source, *_), _, _ = select.select([channel, child], [], [])
        if source == child:
            os.read(child, 4096)
            for pid, told in list(left.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
                    os.close(left.pop(pid))
            continue
        text, descriptors, *_ = socket.recv_fds(channel, 1 << 20, 3)
        if not text:
            return
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (channel.fileno(), child, wakes, *left.values()):
                os.close(descriptor)
            run(json.loads(text), descriptors)
        *given, left[pid] = descriptors
        for descriptor in given:
            os.close(descriptor)
        channel.send(str(pid).encode())


def run(order, descriptors):
    """Be the process that was asked for; it ends here."""
    os.setsid()
    read, write, told = descriptors
    for descriptor, target in ((read, 0), (write, 1), (write, 2)):
        os.dup2(descriptor, target)
    for descriptor in (read, write, told):
        os.close(descriptor)
    os.environ.clear()
    os.environ |= order["variables"]
    if "datasets" in sys.modules and (cache := os.environ.get("HF_DATASETS_CACHE")):
        sys.modules["datasets"].config.HF_DATASETS_CACHE = cache
    os.chdir(order["folder"])
    sys.argv = order["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
