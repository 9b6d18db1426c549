"""The command `failurelab`; `python -m failurelab` is the same.

This package has six verbs: `symptoms`, which looks a log up, `doctor`, which looks at a Python's libraries, `upgrade`,
which tells what another release of trl changes, `gradients`, which holds an implementation of the loss against known
gradients, `preflight`, which measures a training script, and `diagnose`, which reads what a run left. The last two
belong to failurelab_preflight, and are found by the entry-point group `failurelab.verbs`. Where the course is installed
its command line takes over, which has these and its own: it is found by the group `failurelab.commands`. So this
package imports neither.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import sys

GROUP, VERBS = "failurelab.commands", "failurelab.verbs"


def main(arguments: "list[str] | None" = None) -> int:
    """Run the command line; return the exit status: 0, 1 if a failure was found, 2 for a wrong call."""
    # Written so that an old Python can read it: whoever starts the course with one is told, and sees no SyntaxError.
    if sys.version_info < (3, 10):  # noqa: UP036
        print(
            f"ERROR Python {sys.version.split()[0]} runs this: helpers need 3.10 or later, and the course needs 3.11 "
            "to 3.13. Next: install one of these, then make setup PYTHON=python3.11, and .venv/bin/failurelab doctor",
            file=sys.stderr,
        )
        return 2
    for command in importlib.metadata.entry_points(group=GROUP):
        status: int = command.load()()
        return status
    from failurelab.errors import FailureLabError

    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words[:1] in (["preflight"], ["diagnose"]):  # what comes after may be the script's, and look like an option
            for verb in importlib.metadata.entry_points(group=VERBS, name=words[0]):
                status = verb.load()(words[1:])
                return status
            raise FailureLabError(
                f"{words[0]} is not installed for {sys.executable}. Next: pip install --no-deps ./helpers in a clone"
            )
        if words[:1] == ["gradients"]:
            from failurelab.known_gradients.check import main as gradients

            return gradients(words[1:])
        options = _parser().parse_args(arguments)
        status = options.run(options)
        return status
    except FailureLabError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in ("packaging", "tomli"):
            raise
        print(
            f"ERROR {sys.executable} has no {missing}, which transformers brings. Next: install failurelab for the "
            f"Python that you train with, or pip install {missing} here and give --python",
            file=sys.stderr,
        )
        return 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "failurelab", description="Failures of GRPO and Online DPO training: is your run affected?"
    )
    verbs = parser.add_subparsers(required=True, metavar="preflight|diagnose|gradients|symptoms|doctor|upgrade")
    verbs.add_parser("preflight", help="judge a training script before the GPU hours are spent")
    verbs.add_parser("diagnose", help="what is wrong with a run, by the files that it left?")
    verbs.add_parser("gradients", help="does an implementation of the loss have the gradients that are known?")
    symptoms = verbs.add_parser("symptoms", help="which failures do a log's lines belong to, and what repairs them?")
    symptoms.add_argument("log", nargs="?", type=pathlib.Path, help="a log; without one it is read from the input")
    symptoms.set_defaults(run=_symptoms)
    doctor = verbs.add_parser("doctor", help="which failures do a Python's libraries have?")
    doctor.add_argument("--python", default=sys.executable, help="the Python that you train with; else this one")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)
    upgrade = verbs.add_parser("upgrade", help="what changes from one release of trl to another, as it was measured?")
    upgrade.add_argument("before", help="the release that you have, such as 0.19.1")
    upgrade.add_argument("after", help="the release that you think of, such as 1.16.0")
    upgrade.set_defaults(run=_upgrade)
    return parser


def _symptoms(options: argparse.Namespace) -> int:
    from failurelab.failures import symptoms

    said, status = symptoms.look_up(symptoms.read_log(options.log) if options.log else sys.stdin)
    print(said)
    return status


def _doctor(options: argparse.Namespace) -> int:
    from failurelab import checks
    from failurelab.failures import versions

    results = versions.check_python(options.python)
    print(json.dumps(checks.to_json(results), indent=1) if options.json else checks.text(results))
    return checks.exit_status(results)


def _upgrade(options: argparse.Namespace) -> int:
    from failurelab.failures import atlas

    print(atlas.describe_upgrade(options.before, options.after))
    return 0


if __name__ == "__main__":
    sys.exit(main())
