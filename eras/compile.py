#!/usr/bin/env python3
"""Compile eras/NAME.in into eras/NAME.txt: one lock for Python 3.11 to 3.13, on every platform.

    python eras/compile.py [NAME ...]

torch, and what only torch brings (its CUDA libraries, triton), stay out of the locks: torch is installed first, in a
step of its own, from eras/torch.txt. So a machine without a GPU never downloads CUDA, and a lock names no local build.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TORCH = next(line.strip() for line in (HERE / "torch.txt").read_text().splitlines() if line.startswith("torch=="))
FROM_TORCH = re.compile(r"^(torch|triton|cuda-[a-z0-9-]+|nvidia-(?:cu|nc|nv)[a-z0-9-]*)==", re.MULTILINE)


def resolve(name: str, *options: str) -> str:
    """Return the text that uv resolves eras/NAME.in to, without comments on where each package comes from."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        constraint.write(TORCH.split("+")[0] + "\n")
        constraint.flush()
        command = [
            os.environ.get("UV", "uv"),
            "pip",
            "compile",
            str(HERE / f"{name}.in"),
            "-c",
            constraint.name,
            "--universal",
            "--python-version",
            "3.11",
            "--no-header",
            "--no-annotate",
            "-q",
            *options,
        ]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def main() -> None:
    """Compile the eras named on the command line, or all."""
    for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.in")):
        skipped = sorted(set(FROM_TORCH.findall(resolve(name))))
        text = resolve(name, *(option for package in skipped for option in ("--no-emit-package", package)))
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        head = f"# Made by eras/compile.py from eras/{name}.in. {TORCH} comes first, from eras/torch.txt."
        (HERE / f"{name}.txt").write_text("\n".join([head, *lines, ""]))
        print(f"{name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
