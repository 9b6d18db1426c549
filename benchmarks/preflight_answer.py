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
LINES = 20


def table_preflight_answer(folder: pathlib.Path) -> str:
    """What a terminal shows: the sheet, of which the last lines are left out where it is long."""
    ((answer,),) = frames.read_runs(folder, "preflight_answer")[["answer"]].to_numpy()
    shown = max(place for place, line in enumerate(answer[:LINES]) if not line)  # whole blocks
    rest = f"[... {len(answer) - shown} lines: what else is named, each instrument, what was not looked at ...]"
    return "\n".join(["```text", "$ failurelab preflight train.py", *answer[:shown], rest, "```"])


def main() -> None:
    """Record."""
    recording.begin(__doc__)
    with tempfile.TemporaryDirectory(prefix="corpus-") as name:
        folder = pathlib.Path(name)
        preflight_corpus.make_folder(folder)
        shutil.copy(folder / SCRIPT, folder / "train.py")
        words = [
            sys.executable,
            "-m",
            "failurelab_preflight",
            "--python",
            str(eras.find(STACK).python),
            "train.py",
        ]
        variables = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
        done = subprocess.run(words, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    text = done.stdout.replace(f"{folder}/", "").rstrip()
    figures = {"status": done.returncode, "answer": text.splitlines()}
    observe.record("F2", "broken", figures, case="preflight: like the quick start")


if __name__ == "__main__":
    main()
