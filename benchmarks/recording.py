"""What the benchmarks share: their arguments, the eras that each is run in, and the file that each writes.

    python benchmarks/NAME.py                       in this environment; it prints, and keeps nothing
    python benchmarks/NAME.py --out evidence/cpu    in each of its eras; it writes evidence/cpu/NAME.json
    ... --out evidence/cpu --add                    what the file says of cases that are not measured now stays
    ... --out evidence/cpu --eras today             in these alone; what the file says of the others stays

A benchmark's docstring names its eras (`Eras: today, trl-0.14.`), and what it needs (`Needs: zero3.`). An era that is
not made here, or lacks what is needed, is NOT RUN, with the reason in the file. Where one fails nothing is written.

A file says of each era what it ran on, and has one record a line, so that two cards are compared by `git diff
--no-index`. A record that ran on something else (a simulated device) says so itself.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from failurelab_course import eras
from failurelab_course.experiments import devices, observe

STATUS_NOT_RUN = 4
_NOT_RUN = "NOT RUN: "
_COMMON = ("device", "processor", "tier", "versions")
# An import or a build that this machine cannot do, as the last line of a run.
_LACKS = re.compile(
    r"No module named '?(deepspeed|bitsandbytes|liger_kernel)|MissingCUDAException|CUDA_HOME does not exist|"
    r"CUDAMismatchException|Ninja is required|libbitsandbytes"
)
Record = dict[str, Any]


class BenchmarkError(Exception):
    """A benchmark failed in an era, or recorded nothing."""


class CannotRun(Exception):
    """This machine lacks what a benchmark needs in an era; the message is the reason."""


def begin(docstring: str, **options: Any) -> argparse.Namespace:
    """Read a benchmark's arguments; with `--out`, run it in each of its eras, write its file, and end.

    Args:
        docstring: of the benchmark.
        options: its own options by name: the default, or what `add_argument` takes.

    Returns:
        The arguments, `device` among them.
    """
    outer = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    outer.add_argument(
        "--out", type=pathlib.Path, metavar="FOLDER", help="run in every era, and write FOLDER/NAME.json"
    )
    outer.add_argument(
        "--eras", nargs="+", metavar="ERA", help="run in these alone; the file keeps the others' records"
    )
    outer.add_argument("--add", action="store_true", help="the file keeps the records of cases that are not run now")
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0], parents=[outer], allow_abbrev=False)
    parser.add_argument("--device", type=devices.argument, default="cpu", help="auto, cpu, cuda or cuda:N")
    for name, option in options.items():
        keywords = option if isinstance(option, dict) else {"type": type(option), "default": option}
        parser.add_argument(f"--{name}", **keywords)
    arguments = parser.parse_args()
    if arguments.out:
        _, words = outer.parse_known_args()
        place = (arguments.out, arguments.eras, arguments.add)
        sys.exit(record_in_eras(pathlib.Path(sys.argv[0]), docstring, words, arguments.device, *place))
    observe.quiet()
    return arguments


def record_cases(cases: Iterable[tuple[str, str, str, Callable[[int], Record]]], seeds: int, device: str) -> None:
    """Run each case with each seed, record its figures, and print them.

    Args:
        cases: failure, state and name of each, and what runs it with a seed.
        seeds: how many.
        device: as it is recorded.
    """
    for failure, state, case, run in cases:
        for seed in range(seeds):
            figures = run(seed)
            observe.record(failure, state, figures, case=case, seed=seed, device=device)
            print(observe.era(), case, seed, figures, flush=True)


def name_commit() -> str:
    """Return the commit that is checked out: of what the rules that are graded are."""
    words = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def end_not_run(reason: str) -> NoReturn:
    """End a benchmark that this machine cannot run, so that `--out` is told."""
    print(f"{_NOT_RUN}{reason}", flush=True)
    sys.exit(STATUS_NOT_RUN)


def record_in_eras(
    script: pathlib.Path,
    docstring: str,
    words: list[str],
    device: str,
    out: pathlib.Path,
    chosen: list[str] | None = None,
    add: bool = False,
) -> int:
    """Run a benchmark in each of its eras, or in those chosen, and write its file; return the exit status.

    With `add` the file keeps its records of other cases.
    """
    records: list[Record] = []
    not_run: list[dict[str, str]] = []
    names = list_field("Eras", docstring)
    for era in [name for name in names if chosen is None or name in chosen]:
        try:
            records += run_in_era(script, era, list_field("Needs", docstring), words, device)
        except CannotRun as reason:
            not_run.append({"era": era, "reason": str(reason)})
            print(f"NOT RUN {script.stem} in era {era}: {reason}", flush=True)
        except BenchmarkError as error:
            print(f"{script.name}: {error}", file=sys.stderr)
            return 1
    if not records:
        return STATUS_NOT_RUN
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{script.stem}.json"
    if (chosen or add) and path.exists():
        now = {(record["era"], record["case"]) for record in records}
        records += [
            record
            for record in read_file(path)
            if (chosen and record["era"] not in chosen) or (add and (record["era"], record["case"]) not in now)
        ]
        records.sort(key=lambda record: names.index(record["era"]))
    write_file(path, records, not_run)
    print(f"{path}: {len(records)} records", flush=True)
    return 0


def list_field(field: str, docstring: str) -> list[str]:
    """Return what a line of a docstring lists, such as `Eras: today, trl-0.14.`."""
    line = re.search(rf"^{field}: (.+?)\.?$", docstring, re.MULTILINE)
    return [name.strip() for name in line.group(1).split(",")] if line else []


def run_in_era(script: pathlib.Path, name: str, needs: list[str], words: list[str], device: str) -> list[Record]:
    """Run a benchmark in one era and return what it recorded.

    Raises:
        CannotRun: the era is not made here, or this machine lacks what is needed.
        BenchmarkError: it failed, or recorded nothing.
    """
    era = eras.find(name, ready=False)
    if era.status == "missing":
        raise CannotRun(f"era {name} is not made here. Next, if it is wanted: failurelab eras create {name}")
    if "zero3" in needs and device == "cpu" and not era.has_zero3:
        raise CannotRun(f"DeepSpeed is not installed in era {name}")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        # one thread: as fast for small models, and the same sums on every machine
        variables = {"FAILURELAB_EVIDENCE": folder, "OMP_NUM_THREADS": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = eras.run(era, [str(script), *words], env=variables, **streams)
        if done.returncode:
            if reason := explain_not_run(done.stdout, done.returncode):
                raise CannotRun(reason)
            tail = "\n".join(done.stdout.strip().splitlines()[-5:])
            raise BenchmarkError(f"it failed in era {name} (exit status {done.returncode}):\n{tail}")
        paths = sorted(pathlib.Path(folder).glob("*.jsonl"))
        records = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    if not records:
        raise BenchmarkError(f"it ended well in era {name} and recorded nothing")
    return records


def explain_not_run(output: str, status: int) -> str:
    """Return what the machine lacked for a benchmark that ended with `status`; empty if it failed."""
    last = (output.strip().splitlines() or [""])[-1].strip()
    if status == STATUS_NOT_RUN and last.startswith(_NOT_RUN):
        return last.removeprefix(_NOT_RUN)
    return last[:200] if _LACKS.search(last) else ""


def write_file(path: pathlib.Path, records: list[Record], not_run: list[dict[str, str]] | None = None) -> None:
    """Write the file of a benchmark, whole or not at all.

    Args:
        path: of the file.
        records: as `observe.record` makes them.
        not_run: eras with the reason why it was not run there.
    """
    ran_on: dict[str, Record] = {}
    lines = []
    for record in records:
        common = ran_on.setdefault(record["era"], {key: record[key] for key in _COMMON if key in record})
        own = {key: value for key, value in record.items() if key not in ("schema", "source", "processor")}
        lines.append({key: value for key, value in own.items() if common.get(key) != value})
    parts = {"benchmark": json.dumps(path.stem), "eras": _join_eras(ran_on), "records": _join(lines)}
    if not_run:
        parts["not_run"] = _join(not_run)
    text = ", ".join(f"{json.dumps(key)}: {value}" for key, value in parts.items())
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(f"{{{text}}}\n", encoding="utf-8")
    temporary.replace(path)


def _join_eras(table: dict[str, Record]) -> str:
    return (
        "{\n"
        + ",\n".join(f"{json.dumps(era)}: {json.dumps(common, sort_keys=True)}" for era, common in table.items())
        + "\n}"
    )


def _join(lines: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(line, ensure_ascii=False, sort_keys=True) for line in lines) + "\n]"


def checkpointing(kind: str) -> dict[str, Any]:
    """Return a trainer's options for checkpointing that is `off`, `reentrant` or `non-reentrant`."""
    if kind == "off":
        return {"gradient_checkpointing": False}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": kind == "reentrant"}}


class EvidenceError(Exception):
    """A benchmark's file cannot be read."""


def read_file(path: pathlib.Path) -> list[Record]:
    """Return the records of a benchmark's file, each with what its era ran on.

    Raises:
        EvidenceError: the file is missing, cut short, or no benchmark's.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [content["eras"][record["era"]] | record for record in content["records"]]
    except FileNotFoundError as error:
        next_step = f"python benchmarks/{path.stem}.py --out {path.parent}"
        raise EvidenceError(f"{path} is not there. Next: {next_step}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"{path} is no benchmark's file ({error!r}). Next: git checkout it, or measure again"
        ) from error
