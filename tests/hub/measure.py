"""Hold classes of several sizes, and keep what a seat takes in evidence/cpu.json: `make class-evidence`.

    python tests/hub/measure.py [--seats 1,2,4] [--notebooks 01,...]

All seats of a class begin the notebook at once, which is the worst that a room can do. Memory is that of all processes
of a seat (its server, the notebook's kernel, the eras' kernels); processor seconds do not depend on what else the
machine does, seconds do, so the share of the processors that others took meanwhile stands beside them.
"""

import argparse
import concurrent.futures
import os
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ |= {"OMP_NUM_THREADS": "1", "FAILURELAB_SOURCE": "class"}
import hub
import seat

from failurelab_course.experiments import observe
from failurelab_course.ledger import records as evidence
from failurelab_course.teaching import seats

LEDGER = hub.ROOT / "evidence" / "cpu.json"


def hold(number: int, path: str) -> dict:
    """Hold one class; return its figures.

    Raises:
        AssertionError: a seat's notebook failed, or put out something else than the notebook stores.
    """
    with tempfile.TemporaryDirectory(prefix="class-", ignore_cleanup_errors=True) as room:
        with hub.Hub(pathlib.Path(room), number) as class_:
            learners = [seat.Seat(class_.url, name, password) for name, password in class_.users.items()]
            with concurrent.futures.ThreadPoolExecutor(number) as pool:
                list(pool.map(seat.Seat.open, learners))
                before = observe.machine_seconds()
                with hub.Meter(class_, list(class_.users)) as meter:
                    done = list(pool.map(lambda each: each.run(path), learners))
                worked, could = (after - start for after, start in zip(observe.machine_seconds(), before, strict=True))
        assert class_.left == [], "a seat outlived its hub"
    for cells in done:
        errors = [each for cell in cells for each in cell["outputs"] if each["output_type"] == "error"]
        assert not errors, seat.text_of(errors)
        stored = hub.expected(hub.ROOT / path)
        differs = [c["id"] for c in cells if hub.compared(c) and hub.said(c["outputs"]) != stored[c["id"]]]
        assert not differs, f"cells {differs} put out something else than {path} stores"
    own = max(meter.own.values()) / hub.MIB
    return {
        "seats": number,
        "cores": os.cpu_count(),
        "notebook": pathlib.Path(path).name[:2],
        "own_mib": own,
        "shared_mib": max(meter.together / hub.MIB - number * own, 0.0),
        "together_mib": meter.together / hub.MIB,
        "largest_data_mib": meter.data / hub.MIB,
        "cpu_seconds": statistics.median(meter.cpu.values()),
        "seconds": statistics.median(each.seconds for each in learners),
        "slowest_seconds": max(each.seconds for each in learners),
        "others_share": max(worked - sum(meter.cpu.values()), 0.0) / could,
        "verdicts": len(stored),
    }


def main() -> int:
    """Hold the classes that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure classes on one server.")
    parser.add_argument("--seats", default="1,2,4", help="sizes of the class")
    parser.add_argument("--notebooks", default="01", help="their numbers")
    asked = parser.parse_args()
    if why := hub.missing():
        print(f"NOT RUN: {why}", file=sys.stderr)
        return 3
    for number in asked.notebooks.split(","):
        (found,) = (hub.ROOT / "notebooks").glob(f"{number}_*.ipynb")
        for size in map(int, asked.seats.split(",")):
            figures = hold(size, str(found.relative_to(hub.ROOT)))
            made = observe.record("ground", "measured", figures, case=f"class: notebook {number}, {size} seats")
            old = evidence.read_ledger(LEDGER) if LEDGER.exists() else []
            kept = [each for each in old if evidence.key(each) != evidence.key(made)]
            evidence.write_ledger(LEDGER, [*kept, made])
            print({name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()})
    print(f"{LEDGER.name}: of the most demanding notebook {seats.told(seats.measured(ledger=LEDGER))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
