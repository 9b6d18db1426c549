"""`failurelab diagnose RUN…`: from what a run left behind to its cause. Nothing is run."""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping

from failurelab.failures.predicates import Value
from failurelab_preflight.diagnose import answer, checkpoints, evidence
from failurelab_preflight.diagnose.evidence import RunError


def parser(prog: str = "failurelab diagnose") -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog,
        description="Say what is wrong with a GRPO run, from the files that it left: trainer_state.json, logs, a CSV "
        "of its figures, two checkpoints, what guards measured, preflight's answer. Each is optional.",
        epilog="exit status: 0 nothing found, 1 a cause is named, 2 a wrong call, 3 the files do not tell, or cannot "
        "be read",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("runs", nargs="*", metavar="RUN", type=pathlib.Path, help="a folder; or the files of one run")
    return parser


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    if not options.runs:
        print("ERROR diagnose needs a run. Next: failurelab diagnose FOLDER", file=sys.stderr)
        return 3
    answers: list[answer.Diagnosis] = []
    errors: list[tuple[str, str]] = []
    for name, paths in split(options.runs):
        try:
            answers.append(ask(name, paths))
        except (RunError, OSError) as error:
            errors.append((name, str(error)))
    if options.json:
        told = [answer.to_json(judged) for judged in answers]
        told += [
            {"causes": [], "healthy": False, "abstained": True, "run": name, "error": error} for name, error in errors
        ]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=1))
    else:
        for judged in answers:
            print(answer.text(judged))
            print() if len(answers) > 1 else None
    for _, said in errors:
        print(f"ERROR {said}", file=sys.stderr)
    statuses = [judged.exit_status for judged in answers] + [3] * len(errors)
    return 1 if 1 in statuses else max(statuses)


def ask(
    name: str,
    paths: list[pathlib.Path],
    compared: Mapping[str, Value] | None = None,
) -> answer.Diagnosis:
    """Judge one run by its folder or its files.

    Args:
        name: of the run, for the answer.
        paths: its folder, or its files.
        compared: what `checkpoints.compare` said of two checkpoints, where it was asked before.

    Raises:
        RunError: there is no such file, or nothing in them can be read.
    """
    return answer.decide(evidence.collect(name, paths, compared))


def split(paths: list[pathlib.Path]) -> list[tuple[str, list[pathlib.Path]]]:
    """Split the paths into runs. A folder is one run, or holds one run for each folder that a run left in it.

    All single files together are one run; beside one folder they belong to it. Two checkpoints are one run, and several
    `trainer_state.json` are several.
    """
    files = [path for path in paths if not path.is_dir()]
    states = [path for path in files if "trainer_state" in path.name]
    if len(files) > 1 and len(states) == len(files):
        return [(str(path), [path]) for path in paths]
    folders = [run for path in paths if path.is_dir() for run in _runs_in(path)]
    if len(folders) == 1 or (len(folders) == 2 and all(map(checkpoints.weights_in, folders))):
        return [(str(folders[-1]), [*files, *folders])]
    return [(str(path), [path]) for path in folders] + ([(str((states or files)[0]), files)] if files else [])


def _runs_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return a folder that a run left, or else those one step down that a run left."""
    if _is_run(folder):
        return [folder]
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return [path for path in below if _is_run(path)] or [folder]


def _is_run(folder: pathlib.Path) -> bool:
    left = ("trainer_state.json", "checkpoint-*", "*.safetensors", "*.log", "log*.txt", "*.jsonl", "failurelab.json")
    return any(any(folder.glob(pattern)) for pattern in left)
