"""What stays after thousands of checks, kernels and cells: processes, open files, memory, temporary files.

    python benchmarks/endurance.py [--checks 10000] [--kernels 200] [--cells 500] [--minutes 60] [--seed 0]

`make endurance`. Checks of a trivial script go through one check server, as `failurelab lab watch` sends them; notebook
kernels start, run a cell and end; `%%era` cells run in an era's kernel, which some of them kill, chosen by seed. Each
part ends with its number or with its share of the minutes, and says which. What is there is counted after a first few,
when all libraries are loaded, and at the end. Part of no `evidence record`: it takes an hour. Exit status 1 where
anything grew.
"""

import argparse
import contextlib
import gc
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import psutil

from failurelab_course import eras
from failurelab_course.experiments import observe
from failurelab_course.labs.checker import client

SOURCE = "benchmarks/endurance.py"
# Shares of the minutes, and how many of each come before the first count.
PARTS = {"checks": (0.6, 20), "kernels": (0.2, 3), "cells": (0.2, 20)}
GROWTH = 32  # MiB in all that an allocator may keep
SCRIPT = """
def log_probs(model, input_ids, attention_mask, completion_length):
    rows = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -completion_length - 1 : -1]
    return rows.log_softmax(-1).gather(-1, input_ids[:, -completion_length:, None])[..., 0]
"""
LIMIT = 120.0  # seconds for one check


def count(temporary: pathlib.Path) -> dict[str, float]:
    """Return what this process and all below it hold: processes, open files, MiB, and entries of the folder."""
    gc.collect()
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    held = {"processes": len(family), "files": 0, "mib": 0.0, "temporary": len(list(temporary.rglob("*")))}
    for process in family:
        with contextlib.suppress(psutil.Error):
            held["files"] += process.num_fds()
            held["mib"] += process.memory_full_info().pss / 2**20  # what two share counts once
    return held


def check(folder: pathlib.Path, seed: int):
    """Yield once for each check that was answered; raise where one was not measured right."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with client.start("today", ["transformers.Qwen2ForCausalLM"], jobs=2) as server:
        model = eras.root() / "models" / "tiny-qwen2"
        for number in range(sys.maxsize):
            server.check(number, script, model, "log_probs", LIMIT, kind="log_probs")
            if number:  # two are always on their way
                answer = server.answer(2 * LIMIT)
                if answer.get("measured", {"metrics": {}})["metrics"].get("log_prob_error", 1) > 1e-3:
                    raise SystemExit(f"check {answer['id']}: {answer}")
                yield


def start_kernel(folder: pathlib.Path, seed: int):
    """Yield once for each notebook kernel that has started, run a cell and ended."""
    from jupyter_client.manager import start_new_kernel

    while True:
        manager, kernel = start_new_kernel(kernel_name="python3", stderr=subprocess.DEVNULL)
        reply = kernel.execute_interactive("assert 6 * 7 == 42", timeout=LIMIT)
        kernel.stop_channels()
        manager.shutdown_kernel()
        manager.context.destroy()
        if reply["content"]["status"] != "ok":
            raise SystemExit(f"a kernel answered {reply['content']}")
        yield


def run_cell(folder: pathlib.Path, seed: int):
    """Yield once for each cell of an era's kernel; one of ten kills it, which must be told."""
    from failurelab_course.notebook.kernel import EraKernel
    from failurelab_course.notebook.kernel_output import EraKernelDied

    chance, kernel = random.Random(seed), EraKernel("today")
    try:
        while True:
            if chance.random() < 0.1:
                with contextlib.suppress(EraKernelDied):
                    kernel.run("import os; os.kill(os.getpid(), 9)")
                    raise SystemExit("a kernel was killed, and nobody was told")
            elif kernel.run("answer = 6 * 7", fetch=["answer"]) != {"answer": 42}:
                raise SystemExit("a cell's value did not come back")
            yield
    finally:
        kernel.stop()


STEPS = {"checks": check, "kernels": start_kernel, "cells": run_cell}


def measure(part: str, number: int, minutes: float, seed: int) -> dict:
    """Do one part, and return how many were done, in which time, and what was there before and after."""
    share, first = PARTS[part]
    with tempfile.TemporaryDirectory(prefix="endurance-", dir="/tmp") as name:
        folder = pathlib.Path(name)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
        (folder / "tmp").mkdir()
        nothing = count(folder / "tmp")
        steps, before, done, began = STEPS[part](folder, seed), None, 0, time.monotonic()
        with contextlib.closing(steps):
            while done < number and (time.monotonic() - began < share * minutes * 60 or done < first + 2):
                next(steps)
                done += 1
                if done == min(first, number - 1):
                    before = count(folder / "tmp")
            seconds, after = time.monotonic() - began, count(folder / "tmp")
        ended = count(folder / "tmp")
        tempfile.tempdir = None
        del os.environ["TMPDIR"]
    figures = {"done": done, "asked": number, "minutes": seconds / 60}
    for when, held in (("before", before), ("after", after)):
        figures |= {f"{name}_{when}": value for name, value in held.items()}
    figures |= {f"{name}_left": ended[name] - nothing[name] for name in ("processes", "files", "temporary")}
    return figures


def grew(figures: dict) -> list[str]:
    """Return what a part has more of at its end; a check that was on its way may have a few."""
    moving = {"processes": 6, "files": 60, "temporary": 60, "mib": GROWTH}
    more = [name for name, few in moving.items() if figures[f"{name}_after"] > figures[f"{name}_before"] + few]
    return more + [f"{name} left" for name in ("processes", "files", "temporary") if figures[f"{name}_left"] > 3]


def main() -> None:
    """Measure each part, print and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", type=int, default=10_000)
    parser.add_argument("--kernels", type=int, default=200)
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument(
        "--minutes", type=float, default=60, help="for all parts; what does not fit is not done, and said"
    )
    parser.add_argument("--seed", type=int, default=0, help="which cells kill their kernel")
    options = parser.parse_args()
    os.environ["FAILURELAB_SOURCE"] = SOURCE
    status = 0
    for part in PARTS:
        if not (number := getattr(options, part)):
            continue
        figures = measure(part, number, options.minutes, options.seed)
        observe.record("ground", "measured", figures, case=f"endurance: {part}", seed=options.seed)
        more = grew(figures)
        status |= bool(more)
        held = ", ".join(
            f"{name} {figures[f'{name}_before']:.0f} -> {figures[f'{name}_after']:.0f}"
            for name in ("processes", "files", "mib", "temporary")
        )
        left = ", ".join(f"{figures[f'{name}_left']} {name}" for name in ("processes", "files", "temporary"))
        verdict = f"GREW: {', '.join(more)}" if more else "no growth"
        print(
            f"{part}: {figures['done']} of {number} in {figures['minutes']:.1f} minutes; {held}; left {left}; {verdict}"
        )
    sys.exit(status)


if __name__ == "__main__":
    main()
