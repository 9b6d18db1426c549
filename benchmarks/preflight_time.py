#!/usr/bin/env python3
"""How long `failurelab preflight` takes, how much memory, and whether its findings depend on the seed.

    python benchmarks/preflight_time.py [--rounds 5] [--stack trl-0.14]

A LoRA script with a model of Qwen2-0.5B's sizes, vocabulary included, as whole processes: wall-clock seconds from the
command to its answer, the peak memory of the largest process, and the seconds that the stack's imports alone take. Then
the same script with five seeds.

Eras: today.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import frames
import preflight_corpus
import recording

from failurelab_course import eras
from failurelab_course.experiments import observe

SCRIPT = "first/lora_hub_name.py"
IMPORTS = "from datasets import load_dataset; from peft import LoraConfig; from trl import GRPOConfig, GRPOTrainer"


def run(folder: pathlib.Path, *words: str) -> tuple[float, float, str]:
    """Return the seconds of a command, the peak memory in MiB of its largest process, and its last line."""
    variables = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, cwd=folder, env=variables, stdout=output, stderr=subprocess.DEVNULL)
        _, _, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        output.seek(0)
        lines = output.read().splitlines()
    return seconds, used.ru_maxrss / 1024, lines[-1] if lines else ""


def table_preflight_time(folder: pathlib.Path) -> str:
    """What one run of preflight costs as a whole process, beside the imports that the script itself needs, by stack.

    Medians of five runs.
    """
    runs = frames.read_runs(folder, "preflight_time").to_dict("records")
    form = (
        "- {stack}: one run {seconds_of_one_run:g} seconds and {peak_mib_of_one_run} MiB, with its repairs {seconds:g} "
        "and {peak_mib} (imports: {seconds_of_imports_alone:g} seconds)"
    )
    return "\n".join(form.format(**run) for run in runs)


def main() -> None:
    """Measure and record."""
    options = recording.begin(__doc__, rounds=5)
    for stack in ("trl-0.14", "today"):
        python = str(eras.find(stack).python)
        with tempfile.TemporaryDirectory(prefix="corpus-") as name:
            folder = pathlib.Path(name)
            preflight_corpus.make_folder(folder)
            command = [sys.executable, "-m", "failurelab_preflight", "--python", python, SCRIPT]
            once = [run(folder, *command[:3], "--no-try", *command[3:]) for _ in range(options.rounds)]
            runs = [run(folder, *command) for _ in range(options.rounds)]
            imports = [run(folder, python, "-c", IMPORTS)[0] for _ in range(options.rounds)]
            text = (folder / SCRIPT).read_text()
            answers = []
            for seed in range(5):
                (folder / SCRIPT).write_text(text.replace("bf16=True,", f"bf16=True, seed={seed},"))
                answers.append(run(folder, *command)[2])
        seconds = statistics.median(each[0] for each in runs)
        metrics = {
            "seconds_of_one_run": round(statistics.median(each[0] for each in once), 1),
            "peak_mib_of_one_run": round(max(each[1] for each in once)),
            "seconds": round(seconds, 1),
            "seconds_of_each": [round(each[0], 1) for each in runs],
            "seconds_of_imports_alone": round(statistics.median(imports), 1),
            "peak_mib": round(max(each[1] for each in runs)),
            "answers_of_five_seeds": sorted(set(answers)),
            "stack": stack,
        }
        observe.record("ground", "measured", metrics, case=f"preflight, whole: {stack}")
        print(metrics, flush=True)


if __name__ == "__main__":
    main()
