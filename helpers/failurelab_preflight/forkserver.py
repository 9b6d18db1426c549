"""Runs in the Python that trains: `PYTHON forkserver.py SPEC`. It takes both packages along, and no others.

It imports what scripts import, and then reads one order a line on its input: the processes of one run of the script.
Each is forked from it, so that libraries are imported once for all runs, and answers as a process of its own does.
`session` is what starts it and gives the orders.

That Python may have another failurelab, or none; what else stands in these packages' folder must not be found there.
"""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import re
import select
import signal
import sys
import tempfile
import threading
import time

PACKAGES = [pathlib.Path(__file__).parents[1] / name for name in ("failurelab", "failurelab_preflight")]
_PAUSE = 50  # milliseconds between two looks at a run
_BEFORE_ANY_SCRIPT = {  # what is imported once, and names in it: libraries' own are lazy
    "torch": (),
    "transformers": ("AutoTokenizer", "BitsAndBytesConfig", "PreTrainedTokenizerBase", "Trainer"),
    "datasets": ("Dataset",),
    "peft": ("PeftModel", "LoraConfig"),
    "trl": (),  # those that stand in the script
    **{f"failurelab_preflight.{name}": () for name in ("run", "stage.saving", "stage.rewards", "judges.order")},
}
# A script that sets one of these before it imports a library: what that import does is its own then.
_SETS_VARIABLES = re.compile(r"environ\s*(\[[^\]]+\]\s*=(?!=)|\.\s*(update|setdefault))|putenv|load_dotenv")


def main() -> None:
    """Take the packages along, import, and then run the script that SPEC names, once for each order."""
    _take_packages()
    spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
    sys.path[0] = spec["folder"]
    gc.disable()  # a quarter of the time of large imports, which leave little garbage
    preload(pathlib.Path(spec["script"]))
    gc.freeze()  # or the collector of each run would write into all pages that it shares with this process
    gc.enable()
    for line in iter(sys.stdin.readline, ""):
        orders = json.loads(line)
        left = {_fork(spec, order): pathlib.Path(order["status"]) for order in orders}
        _wait(left)


def _take_packages() -> None:
    for folder in PACKAGES:
        loader = importlib.util.spec_from_file_location(
            folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert loader is not None and loader.loader is not None  # there is a file
        package = importlib.util.module_from_spec(loader)
        for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
            del sys.modules[name]
        sys.modules[folder.name] = package
        loader.loader.exec_module(package)


def preload(script: pathlib.Path) -> None:
    """Import what most scripts and every run import; an error is left to the script."""
    text = ""
    with contextlib.suppress(OSError):
        text = script.read_text(encoding="utf-8", errors="replace")
    for module, names in _BEFORE_ANY_SCRIPT.items():
        if module in ("datasets", "peft", "trl") and _SETS_VARIABLES.search(text):
            continue
        if module == "trl":
            names = ("GRPOConfig", "GRPOTrainer", *re.findall(r"\b[A-Z]\w+(?:Config|Trainer)\b", text))
        with contextlib.suppress(Exception):
            loaded = importlib.import_module(module)
            for name in dict.fromkeys(names):
                getattr(loaded, name, None)
    sys.stdout.flush()


def _fork(spec: dict, order: dict) -> int:
    pid = os.fork()
    if not pid:
        os.setsid()
        _run(spec, order)
    pathlib.Path(order["pid"]).write_text(str(pid))
    return pid


def _run(spec: dict, order: dict) -> None:
    """Run the script once; this process ends with it."""
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    for target, name, flags in ((0, os.devnull, os.O_RDONLY), (1, order["log"], os.O_WRONLY | os.O_APPEND)):
        descriptor = os.open(name, flags)
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.dup2(1, 2)
    stack = os.open(order["stack"], os.O_WRONLY)
    faulthandler.enable(stack)  # where it died
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # where it hangs
    os.environ |= order["variables"]
    os.environ["TMPDIR"] = tempfile.tempdir = order["tmp"]
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{order['tmp']}"
    from failurelab_preflight import run

    run.main(spec | order)


def _wait(left: dict[int, pathlib.Path]) -> None:
    """Wait until all processes of a run have ended and tell how; end them where nobody is there any more who asked.

    The input is not read meanwhile: the next order may have come.
    """
    orders = select.poll()
    orders.register(sys.stdin, 0)  # which tells of its end alone
    while left:
        for pid, status in list(left.items()):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[pid]
                part = status.with_suffix(".part")
                part.write_text(str(os.waitstatus_to_exitcode(code)))
                part.rename(status)
        if left and orders.poll(_PAUSE):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def _end_with_parent(parent: int) -> None:
    """End this process and all that it started when the one that asked for it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, 9)


if __name__ == "__main__":
    main()
