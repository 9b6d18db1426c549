#!/usr/bin/env python3
"""What `failurelab preflight` answers, as a terminal shows it: a script of the corpus that is like TRL's quick start.

LoRA with gradient checkpointing in trl 0.14, which ends in "element 0 of tensors does not require grad".

Eras: today.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import frames
import preflight_corpus
import recording

from failurelab_course import eras
from failurelab_course.experiments import observe

SCRIPT, STACK = "first/lora_hub_name.py", "trl-0.14"


def table_preflight_answer(folder: pathlib.Path) -> str:
    """What a terminal shows: the first accusation whole, and the last line; the rest is left out."""
    ((answer,),) = frames.read_runs(folder, "preflight_answer")[["answer"]].to_numpy()
    told = [number for number, line in enumerate(answer) if line.startswith(("NAMED", "SUSPECTED", "HELD"))]
    shown = answer[: told[1] + 1]
    rest = f"[... {len(answer) - len(shown) - 1} lines: its figure and repair, what held, what was not checked ...]"
    return "\n".join(["```text", "$ failurelab preflight train.py", *shown, rest, answer[-1], "```"])


def main() -> None:
    """Ask and record."""
    recording.begin(__doc__)
    with tempfile.TemporaryDirectory(prefix="corpus-") as name:
        folder = pathlib.Path(name)
        preflight_corpus.make_folder(folder)
        shutil.copy(folder / SCRIPT, folder / "train.py")
        words = [
            sys.executable,
            "-m",
            "failurelab.preflight",
            "--python",
            str(eras.find(STACK).python),
            "train.py",
        ]
        variables = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
        done = subprocess.run(words, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    text = done.stdout.replace(f"{folder}/", "").rstrip()
    figures = {"stack": STACK, "status": done.returncode, "answer": text.splitlines()}
    observe.record("F2", "broken", figures, case="preflight: like the quick start")
    print(text)


if __name__ == "__main__":
    main()
