"""`failurelab diagnose RUN`: from what a run left behind to its cause. Nothing is run."""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

from failurelab.failures.predicates import Value
from failurelab_preflight.diagnose import answer, evidence
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
    parser.add_argument("run", nargs="*", metavar="RUN", type=pathlib.Path, help="a folder, and files of the same run")
    return parser


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    if not options.run:
        print("ERROR diagnose needs a run. Next: failurelab diagnose FOLDER", file=sys.stderr)
        return 3
    name = str(options.run[0])
    try:
        judged = ask(name, options.run)
    except (RunError, OSError) as error:
        if options.json:
            told = {"causes": [], "healthy": False, "abstained": True, "run": name, "error": str(error)}
            print(json.dumps(told, indent=1))
        print(f"ERROR {error}", file=sys.stderr)
        return 3
    print(json.dumps(answer.to_json(judged), indent=1) if options.json else answer.text(judged))
    return judged.exit_status


def ask(name: str, paths: Sequence[pathlib.Path], compared: Mapping[str, Value] | None = None) -> answer.Diagnosis:
    """Judge one run by its folder and its files.

    Args:
        name: of the run, for the answer.
        paths: its folder, or its files.
        compared: what `checkpoints.compare` said of two checkpoints, where it was asked before.

    Raises:
        RunError: there is no such file, or nothing in them can be read.
    """
    return answer.decide(evidence.collect(name, paths, compared))
