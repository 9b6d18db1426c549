"""Runs in the Python that trains: `PYTHON child.py SPEC`. It takes this package along, and nothing else from beside it.

It reads one order a line on its input, and for each runs the script once: in a fork of itself, which has the script's
libraries imported already, or, where the specification says so, in this process.

That Python may have another failurelab, or none; what else stands in this package's folder must not be found there.
"""

import contextlib
import gc
import importlib.util
import json
import os
import pathlib
import select
import signal
import sys
import tempfile
import threading
import time

PACKAGE = pathlib.Path(__file__).parent.parent
_PAUSE = 50  # milliseconds between two looks at a run


def main() -> None:
    """Take the package along, then run the script that SPEC names, once for each order."""
    loader = importlib.util.spec_from_file_location(
        "failurelab", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert loader is not None and loader.loader is not None  # there is a file
    package = importlib.util.module_from_spec(loader)
    for name in [name for name in sys.modules if name.split(".")[0] == "failurelab"]:
        del sys.modules[name]
    sys.modules["failurelab"] = package
    loader.loader.exec_module(package)
    spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
    sys.path[0] = spec["folder"]
    if spec["fork"]:
        from failurelab.preflight import preload

        gc.disable()  # a quarter of the time of large imports, which leave little garbage
        preload.preload(spec["script"], spec["folder"])
        gc.freeze()  # or the collector of each run would write into all pages that it shares with this process
        gc.enable()
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if not spec["fork"]:
            _run(spec, order)
        pid = os.fork()
        if not pid:
            os.setsid()
            _run(spec, order)
        pathlib.Path(order["pid"]).write_text(str(pid))
        _wait(pid, pathlib.Path(order["status"]))


def _run(spec: dict, order: dict) -> None:
    """Run the script once; this process ends with it."""
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    for target, name, flags in ((0, os.devnull, os.O_RDONLY), (1, order["log"], os.O_WRONLY | os.O_APPEND)):
        descriptor = os.open(name, flags)
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.dup2(1, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = order["tmp"]
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{order['tmp']}"
    from failurelab.preflight import run

    run.main(spec | order)


def _wait(pid: int, status: pathlib.Path) -> None:
    """Wait until a run has ended and tell how; end it where nobody is there any more who asked for it.

    The input is not read meanwhile: the next order may have come.
    """
    orders = select.poll()
    orders.register(sys.stdin, 0)  # which tells of its end alone
    while True:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if orders.poll(_PAUSE):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    part = status.with_suffix(".part")
    part.write_text(str(os.waitstatus_to_exitcode(code)))
    part.rename(status)


def _end_with_parent(parent: int) -> None:
    """End this process and all that it started when the one that asked for it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, 9)


if __name__ == "__main__":
    main()
