"""Where the seconds go until `from trl import GRPOTrainer` is done, with byte code compiled at set-up and without.

Eras: trl-0.14, today.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import time

from failurelab_course.experiments import devices, observe

CODE = "from trl import GRPOTrainer"


def seconds(*options: str, **environment: str) -> tuple[float, str]:
    """Return the wall-clock seconds of one import in a new process, and what it wrote on stderr."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *options, "-c", CODE], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return time.perf_counter() - start, done.stderr


def main() -> None:
    """Import four times, and record the totals and the packages that cost most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=devices.argument, default="cpu")
    parser.parse_args()
    seconds()  # the disk's cache is warm after this
    warm = min(seconds()[0] for _ in range(2))
    with tempfile.TemporaryDirectory() as empty:  # byte code is looked for here only, and nothing is there
        cold = seconds(PYTHONPYCACHEPREFIX=empty)[0]
    spent: dict[str, float] = collections.defaultdict(float)
    for line in seconds("-X", "importtime")[1].splitlines():
        match = re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s*(\w+)", line)
        if match:
            spent[match.group(2)] += int(match.group(1)) / 1e6
    most = sorted(spent.items(), key=lambda item: -item[1])[:4]
    metrics = {"seconds": round(warm, 1), "seconds_without_byte_code": round(cold, 1)}
    metrics |= {f"of which {name}": round(value, 1) for name, value in most}
    observe.record("ground", "measured", metrics, case="import GRPOTrainer")
    print(metrics)


if __name__ == "__main__":
    main()
