"""Checks of many scripts in one era, for one import of its libraries: a process that imports once and forks for each.

    python -m failurelab_course.labs.checker.server          orders on stdin, answers on stdout, one JSON object a line

The first order names what the labs need: `{"imports": ["trl.GRPOTrainer"]}`; the answer says what does not import.
Each further order is a check: `{"id", "script", "model", "folder", "kind", "trainer", "device", ...}` (`Server.check`).
It runs in a forked child with its own folder as HOME, working and temporary directory; the answer holds what
`measure.run` measured, or how the child ended. No child outlives its limits, or this process: at the end of stdin all
are ended.

Forking is safe here because this process computes nothing: it has one thread, and no parallel region of torch ever ran.
It sees no GPU either. CUDA cannot be used in the fork of a process that has so much as counted GPUs, and libraries
count them when they are imported: so a check on a GPU is a fresh Python, which pays for its imports,

    python -m failurelab_course.labs.checker.server --one          the order on stdin
"""

import collections
import ctypes
import dataclasses
import importlib
import json
import os
import pathlib
import secrets
import selectors
import shutil
import signal
import sys
import threading
import time
from typing import Any

from failurelab_course.labs.checker.process import Child, adopt, end_orphans, kill_group

_PR_SET_PDEATHSIG = 1
_POLL = 0.05  # seconds


def import_needs(needs: list[str]) -> dict[str, str]:
    """Import each `module.Name` or `module`; return those that fail, with the reason."""
    broken = {}
    for need in needs:
        try:
            try:
                importlib.import_module(need)
            except ModuleNotFoundError:
                module, _, name = need.rpartition(".")
                if not module:
                    raise
                getattr(importlib.import_module(module), name)
        except Exception as error:  # an import of a stack that does not fit fails in every way
            first = next(iter(str(error).strip().splitlines()), "")
            broken[need] = f"{type(error).__name__}: {first}"
    return broken


def serve(jobs: int, orders: int, answers: int) -> None:
    """Read orders from the descriptor `orders` and write answers to `answers`, until the end of the orders."""
    from failurelab_course.labs.checker import measure  # noqa: F401  torch and transformers, before the first fork

    adopt()
    waiting: collections.deque[dict[str, Any]] = collections.deque()
    running: list[Child] = []
    rest, is_open = b"", True
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        try:
            while is_open:
                if selector.select(timeout=_POLL if running or waiting else None):
                    data = os.read(orders, 65536)
                    is_open = bool(data)
                    *lines, rest = (rest + data).split(b"\n")
                    for order in map(json.loads, lines):
                        if "imports" in order:
                            _answer(answers, {"broken": import_needs(order["imports"])})
                        else:
                            waiting.append(order)
                while waiting and len(running) < jobs:
                    running.append(_start(waiting.popleft(), (orders, answers)))
                for child in [each for each in running if _ended(each, answers)]:
                    running.remove(child)
                    end_orphans(running)
        finally:
            for child in running:
                child.end()
            end_orphans([])


def _start(order: dict[str, Any], private: tuple[int, ...]) -> Child:
    folder = pathlib.Path(order["folder"])
    order["answer"] = f"answer-{secrets.token_hex(8)}.json"  # a script cannot write it in our place
    work = folder / "work"
    for part in (work, folder / "home", folder / "tmp"):
        part.mkdir(parents=True)
    shutil.copyfile(order["script"], work / "train.py")
    shutil.copytree(order["model"], folder / "model")
    if threading.active_count() != 1:
        raise RuntimeError("a forked check could hang: this process has more than one thread")
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Child(order, pid)
    try:
        _settle(folder, parent, private)
        if order["device"] == "cpu":
            _check(order)
        else:
            _become_fresh(order)
    finally:
        _leave()


def _leave() -> None:
    """End this process with nothing of a script's own run at its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _check(order: dict[str, Any]) -> None:
    """Measure one script, and write the answer."""
    from failurelab_course.labs.checker import measure

    folder = pathlib.Path(order["folder"])
    made = measure.run(
        folder / "work" / "train.py",
        folder / "model",
        folder / "output",
        order["trainer"],
        order["kind"],
        device=order["device"],
        # A forked check has them already.
        prepare=None if order["device"] == "cpu" else lambda: import_needs(order["needs"]),
    )
    partial = folder / "answer.partial"
    partial.write_text(json.dumps(dataclasses.asdict(made) | {"records": _records(order, made)}))
    partial.rename(folder / order["answer"])


def _become_fresh(order: dict[str, Any]) -> None:
    """Go on as a new Python that sees the order's GPU; the order comes by a pipe, where no script finds it."""
    inside, outside = os.pipe()
    os.write(outside, json.dumps(order).encode())
    os.close(outside)
    os.dup2(inside, 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = order["visible"]
    # -P: the learner's folder is no place to import from
    os.execv(sys.executable, [sys.executable, "-P", "-m", "failurelab_course.labs.checker.server", "--one"])


def _one() -> None:
    """Do the check whose order is on stdin, in this process."""
    order = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        _check(order)
    finally:
        _leave()


def _settle(folder: pathlib.Path, parent: int, private: tuple[int, ...]) -> None:
    """Make the forked child a run of its own: session, descriptors, folders, and an end when the server ends."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in private:
        os.close(descriptor)
    os.environ |= {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    os.chdir(folder / "work")


def _records(order: dict[str, Any], made: Any) -> list[dict[str, Any]]:
    """Make the evidence records of the run, where the order asks for them: one for each tier that it measured on."""
    asked = order.get("record")
    if not asked or made.environment:
        return []
    from failurelab_course.experiments import observe
    from failurelab_course.labs import metrics as figures

    os.environ["FAILURELAB_SOURCE"] = asked["source"]
    device = order["device"]
    tier = "cpu" if device == "cpu" else "gpu"
    return [
        observe.record(asked["failure"], asked["state"], part, case=asked["case"], seed=0, device=device, tier=each)
        for each, part in figures.by_tier(order["kind"], made.figures, tier).items()
    ]


def _ended(child: Child, answers: int) -> bool:
    """Answer for a child that has ended, or is over its time; return whether it is gone."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if not pid and not child.watch():
        return False
    if pid:
        kill_group(child.pid)  # what it started and left behind
    else:
        child.end()
    folder = pathlib.Path(child.order["folder"])
    answer: dict[str, Any] = {"id": child.order["id"], "seconds": time.monotonic() - child.start}
    if not pid:
        answer["ended"] = child.over
    elif (folder / child.order["answer"]).is_file():
        answer["measured"] = json.loads((folder / child.order["answer"]).read_text())
    elif not (folder / "work").is_dir():
        answer["ended"] = "deleted the folder that it ran in (a copy: your own files are as they were)"
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        answer["environment"] = "the system killed the run (signal 9), as it does when memory runs out"
    elif os.WIFSIGNALED(status):
        answer["ended"] = f"ended by signal {os.WTERMSIG(status)} before it was measured"
    else:
        answer["ended"] = f"left by itself with status {os.waitstatus_to_exitcode(status)} before it was measured"
    log = folder / "output.txt"
    answer["output"] = log.read_text(errors="replace")[-4000:] if log.is_file() else ""
    shutil.rmtree(folder, ignore_errors=True)
    _answer(answers, answer)
    return True


def _answer(descriptor: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    """Serve on stdin and stdout; whatever libraries print goes to stderr. With `--one`: do a single check."""
    if sys.argv[1:] == ["--one"]:
        _one()
    orders, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    for descriptor in (orders, answers):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else 1, orders, answers)


if __name__ == "__main__":
    main()
