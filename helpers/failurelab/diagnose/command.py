"""`failurelab diagnose RUN…`: from what a run left behind to its cause.

Nothing is run, and nothing is fetched, but with `--preflight`, which runs the run's script, cut down.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from failurelab.diagnose import answer, page, rules
from failurelab.diagnose.evidence import Evidence, RunError, collect
from failurelab.errors import FailureLabError
from failurelab.failures import versions


def parser(prog: str = "failurelab diagnose") -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog,
        description="Say what is wrong with a GRPO run, from the files that it left: trainer_state.json, logs, logged "
        "completions, two checkpoints, preflight's answer, versions. Each is optional.",
        epilog="exit status: 0 nothing found, 1 a cause is named, 3 the files do not tell, or cannot be read",
    )
    parser.add_argument("--python", help="the Python that trained, asked for its versions")
    parser.add_argument(
        "--preflight", action="store_true", help="run each run's script too, cut to seconds (see failurelab preflight)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write a page with the curves too")
    parser.add_argument("--explain", action="store_true", help="print the rules")
    parser.add_argument("runs", nargs="*", metavar="RUN", type=pathlib.Path, help="a folder; or the files of one run")
    return parser


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    if options.explain:
        print(rules.explain())
        return 0
    if not options.runs:
        print("ERROR diagnose needs a run. Next: failurelab diagnose FOLDER", file=sys.stderr)
        return 3
    installed: dict[str, str] = {}
    if options.python:
        try:
            installed = versions.ask_versions(options.python)
        except FailureLabError as error:
            print(f"ERROR {error}", file=sys.stderr)
            return 3
    answers: list[answer.Answer] = []
    errors: list[tuple[str, str]] = []
    for name, paths in split(options.runs):
        try:
            with tempfile.TemporaryDirectory(prefix="failurelab-diagnose-") as folder:
                seen = preflight(paths, options.python, pathlib.Path(folder)) if options.preflight else []
                answers.append(ask(name, [*paths, *seen], installed))
        except (RunError, OSError) as error:
            errors.append((name, str(error)))
    if options.json:
        told = [answer.to_json(each) for each in answers]
        told += [
            {"causes": [], "healthy": False, "abstained": True, "run": name, "error": error} for name, error in errors
        ]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=1))
    else:
        for each in answers:
            print(answer.text(each))
            print() if len(answers) > 1 else None
    for _, error in errors:
        print(f"ERROR {error}", file=sys.stderr)
    if options.html and answers:
        try:
            options.html.write_text(page.html(answers), encoding="utf-8")
        except OSError as error:
            print(f"ERROR {options.html} cannot be written ({error.strerror})", file=sys.stderr)
            return 3
    statuses = [each.exit_status for each in answers] + [3] * len(errors)
    return 1 if 1 in statuses else max(statuses)


def ask(name: str, paths: list[pathlib.Path], installed: dict[str, str] | None = None) -> answer.Answer:
    """Judge one run by its files.

    Args:
        name: of the run.
        paths: its folder, or its files.
        installed: package to version, where they are known otherwise.

    Raises:
        RunError: there is no such file, or nothing in them can be read.
    """
    evidence: Evidence = collect(name, paths, installed)
    return answer.decide(evidence)


def preflight(paths: list[pathlib.Path], python: str | None, folder: pathlib.Path) -> list[pathlib.Path]:
    """Run preflight on the script of a run, in the script's own folder; return the file with its answer.

    Args:
        paths: the run's folder, or its files.
        python: the Python that trained; this one if None.
        folder: where the answer is written.

    Raises:
        RunError: there is no script, or several.
    """
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    scripts = [file for file in files if file.suffix == ".py"]
    if len(scripts) != 1:
        found = ", ".join(script.name for script in scripts) or "none"
        raise RunError(f"--preflight needs the run's script, one *.py; here: {found}. Next: name it among the files")
    answer, script = folder / "preflight.json", scripts[0].resolve()
    command = [sys.executable, "-m", "failurelab.preflight", "--json", str(answer)]
    command += ["--python", python] if python else []
    asked = subprocess.run([*command, script.name], cwd=script.parent, stdout=subprocess.DEVNULL)
    if not answer.is_file():
        raise RunError(f"{script.name}: preflight ended with status {asked.returncode} and no answer, see above")
    return [answer]


def split(paths: list[pathlib.Path]) -> list[tuple[str, list[pathlib.Path]]]:
    """Return the runs: each folder is one, and all single files together, or one for each trainer_state.json."""
    runs = [(str(path), [path]) for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    states = [path for path in files if "trainer_state" in path.name]
    if len(files) > 1 and len(states) == len(files):
        return runs + [(str(path), [path]) for path in files]
    weights = [path for path, _ in ((path, 0) for path in paths) if path.is_dir() and _is_checkpoint(path)]
    if len(weights) == 2 and len(runs) == 2:  # two checkpoints are one run, and no two
        return [(str(weights[-1]), [*files, *weights])]
    return runs + ([(str((states or files)[0]), files)] if files else [])


def _is_checkpoint(path: pathlib.Path) -> bool:
    return any(path.glob("model*.safetensors")) or any(path.glob("adapter_model*.safetensors"))
