"""`failurelab preflight`: runs the script in the Python that trains, tries repairs, and tells what was found."""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

from failurelab._outputs import OutputError, check_output, write_output
from failurelab.errors import FailureLabError
from failurelab.failures import versions
from failurelab.preflight import launcher_line
from failurelab.preflight.answer import COMMAND_LINE, Answer, Change, Effect, Finding
from failurelab.preflight.report import issue, terminal, words
from failurelab.preflight.script_text import encode_source, make_patch, read_source
from failurelab.preflight.session import Session, TimeIsOver
from failurelab.preflight.stage.effects import cache_folders
from failurelab.preflight.trials import ROUNDS_OVER, Rounds, Trial


class PreflightError(FailureLabError):
    """A script cannot be judged; the message says why and the next step."""

    exit_status = 3


def parser(prog: str = "failurelab preflight") -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog,
        description="Judge a training script, as it is, before the GPU hours are spent. It runs the script, with a "
        "small model, up to the end of a cut training.",
        epilog="exit status: 0 nothing found, 1 found, 2 a wrong call, 3 the script could not be asked. "
        "A launcher's line works too: failurelab preflight -- accelerate launch train.py",
    )
    parser.add_argument("--python", help="the Python that you train with; else this one")
    parser.add_argument("--steps", type=_positive, default=3, help="training steps (3)")
    parser.add_argument("--real-model", action="store_true", help="load the real weights")
    parser.add_argument("--world-size", type=_positive, metavar="N", help="processes of the run; else as launched")
    parser.add_argument("--time-limit", type=_positive, default=600, metavar="S", help="seconds in all (600)")
    tries = parser.add_mutually_exclusive_group()
    tries.add_argument("--no-try", action="store_false", dest="again", help="one run: nothing is named")
    what = "try repairs whatever the script does beside training"
    tries.add_argument("--try", action="store_true", dest="again", help=what)
    parser.set_defaults(again=None)
    parser.add_argument("--diff", type=pathlib.Path, metavar="FILE", help="write the patch that was tried, a new FILE")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the answer as JSON too")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", help="write it for an issue, a new FILE")
    parser.add_argument("--lang", choices=sorted(words.LANGUAGES), default="en", help="of headings and verdicts (en)")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE [ARGS...]", help="as python -m")
    parser.add_argument("line", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _misplaced(line: list[str]) -> str:
    """Return the options of preflight's among the script's arguments that its text does not know."""
    script = pathlib.Path(line[0])
    text = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""
    own = ("--diff", "--json", "--report", "--lang", "--no-try", "--try", "--python", "--real-model", "--time-limit")
    return ", ".join(word for word in line[1:] if word in own and word not in text)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    line = options.line[1:] if options.line[:1] == ["--"] else options.line
    if options.module:
        line = [sys.executable, "-m", *options.module]
    if not line:
        print("ERROR preflight needs a script. Next: failurelab preflight train.py", file=sys.stderr)
        return 3
    if options.line[:1] != ["--"] and (misplaced := _misplaced(line)):
        note = f"Note: {misplaced} behind the script is the script's. Preflight's options stand before it"
        print(note, file=sys.stderr)
    try:
        for name in _FILES:
            check_output(getattr(options, name), f"--{name}", new=name in ("diff", "report"))
    except OutputError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return error.exit_status
    try:
        names = ("python", "steps", "real_model", "world_size", "time_limit", "again")
        answer = ask(
            launcher_line.read_line(line, options.python),
            **{name: getattr(options, name) for name in names},
            say=lambda stage: print(f"preflight: {stage} …", file=sys.stderr, flush=True),
        )
    except FailureLabError as error:
        answer = Answer((options.module or line)[0], error=str(error))
    except KeyboardInterrupt:
        print("\npreflight was interrupted: the script's processes are ended, nothing is left", file=sys.stderr)
        return 130
    print(terminal.text(answer, options.lang))
    try:
        _write(answer, options)
    except OutputError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return error.exit_status
    return answer.exit_status


_FILES = ("diff", "json", "report")  # options that name a file to write


def _write(answer: Answer, options: argparse.Namespace) -> None:
    """Write the files that were asked for."""
    if options.diff and answer.patch:
        write_output(options.diff, answer.patch)
        apply = f"in {answer.patch_folder}: git apply {options.diff.resolve()}"
        if answer.script.endswith(".ipynb"):
            apply = "make its changes in the notebook's cells"
        left = ", ".join(f"{finding.failure} ({finding.verdict.value.lower()})" for finding in answer.left_by_patch)
        left = f"it leaves {left}" if left else "with it nothing is found"
        print(f"{options.diff}: the patch that was tried, as a whole: {left}. Next, {apply}")
    elif options.diff:
        print(f"{options.diff}: not written, for no edit of the script was tried that heals")
    if options.json:
        write_output(options.json, json.dumps(answer.to_json(), indent=1) + "\n")
    if options.report:
        write_output(options.report, issue.markdown(answer))


def ask(
    started: launcher_line.Launch,
    *,
    python: str | None = None,
    steps: int = 3,
    real_model: bool = False,
    world_size: int | None = None,
    time_limit: float = 600,
    again: bool | None = None,
    preload: bool = True,
    say: Any = lambda stage: None,
) -> Answer:
    """Run a script in its Python and return what was found.

    Args:
        started: the script, its arguments and its launch.
        python: the Python to run it in; by default the line's own, or this one.
        steps: of training.
        real_model: whether to load the real weights.
        world_size: processes of the run; by default as launched.
        time_limit: seconds, for all runs of the script.
        again: whether the script may be run more than once, to try repairs; None: if its first run has done nothing
            beside its training (see `stage.effects`).
        preload: whether the libraries are imported once for all runs of the script; else by each of them.
        say: called with each stage.

    Raises:
        PreflightError: no such script, or no such Python.
        VersionsError: the Python does not tell its libraries.
    """
    named = python or started.python or sys.executable
    python = shutil.which(named)
    if python is None:
        raise PreflightError(f"{named} is no command here. Next: --python with the path of your Python")
    script = launcher_line.find_module(started.module, python) if started.module else pathlib.Path(started.script)
    if not script.is_file():
        raise PreflightError(f"{script} is not there (from {pathlib.Path.cwd()}). Next: the path of a Python script")
    say(f"asking {python} for its libraries")
    libraries = versions.ask_versions(python)
    for needed in ("torch", "transformers"):
        if needed not in libraries:
            raise PreflightError(
                f"{needed} is not installed for {python}, so no Trainer can run there. "
                "Next: --python with the Python that you train with"
            )
    answer = Answer(str(script), libraries, script_sha256=hashlib.sha256(script.read_bytes()).hexdigest())
    spec = {
        "script": str(script),
        "folder": os.getcwd() if started.module else str(script.resolve().parent),
        "module": started.module,
        "arguments": list(started.arguments),
        "steps": steps,
        "real_model": real_model,
        "world_size": world_size or started.world_size,
        "zero_stage": started.zero_stage,
        "deepspeed": started.deepspeed,
        "left_out": started.left_out,
        "visible": (os.environ | dict(started.environment)).get("CUDA_VISIBLE_DEVICES", ""),
        "preload": preload,
    }
    with tempfile.TemporaryDirectory(prefix="failurelab-preflight-", ignore_cleanup_errors=True) as folder:
        variables = dict(started.environment)
        with Session(pathlib.Path(folder), python, variables, spec, time_limit, say).open() as session:
            _judge(answer, session, script, again)
    return answer


def _judge(answer: Answer, session: Session, script: pathlib.Path, again: bool | None) -> None:
    """Run the script, and again with the repairs of what was found; write into `told` what came of it."""
    folders = {script.resolve().parent, pathlib.Path.cwd()}
    before = {folder: _list_files(folder) for folder in folders}
    try:
        first = session.run(Change())
    except TimeIsOver as error:
        answer.error = str(error)
        return
    for count in _GPUS if first.demands_gpu and again is not False and (again or not first.effects) else ():
        session.gpus = max(count, session.count)
        try:
            told = session.run(Change())
        except TimeIsOver:
            break
        if not told.demands_gpu:
            note = f"the script demands a GPU: it was told of {session.gpus}, and what it puts there is put on the CPU"
            first = dataclasses.replace(told, notes=[*told.notes, note], effects=[*first.effects, *told.effects])
            break
    if first.demands_gpu and again is None and first.effects:
        first.error += f". Or --try: the script {first.effects[0]}, so it is not run again unasked, and told of a GPU"
    effects = list(first.effects)
    heard = {os.path.realpath(effect.what) for effect in effects}
    for folder in folders:
        new = {path for path, _ in _list_files(folder).items() - before[folder].items()}
        if new:  # of the script's processes none is left, so what is still being written is another one's
            new -= _written_by_others()
        effects += [Effect("writes", path) for path in sorted(new) if os.path.realpath(path) not in heard]
    outcome, left = Rounds(session.run, first, session.say), ROUNDS_OVER
    if again is False:
        left = "the script was not run with a repair (--no-try)"
    elif again is None and effects and first.found:
        left = f"the script was not run again, for it {effects[0]}"
        outcome.notes.append(
            f"beside its training the script {'; '.join(map(str, effects))}. It was not run again, so nothing is "
            "named. Next: --try, if it may do all that once more for each repair"
        )
    else:
        try:
            outcome.try_all()
        except TimeIsOver as error:
            left = "not tried: the time was over"
            outcome.notes.append(f"not every repair was tried: {error}")
    answer.error, answer.cut, answer.effects = outcome.last.error, outcome.last.cut, effects
    answer.notes, answer.ended_first = [*first.notes, *outcome.notes], first.error
    answer.rewards = first.rewards or outcome.last.rewards
    # the repairs as diffs, each on top of those before it, and all that healed as one patch
    trials = [*outcome.named, *outcome.suspected(left)]
    tried = [_with_diff(trial, session.line) for trial in trials]
    answer.settle([*tried, *(finding for finding in outcome.last.findings if not finding.accuses)])
    answer.patch, answer.patch_folder = _patch(Change(), outcome.change, context=3)


def _with_diff(trial: Trial, line: str) -> Finding:
    """Return what came of a failure with its repair as a diff, and without the whole files of the runs.

    Args:
        trial: what came of it.
        line: the script's command line, as it was given.
    """
    diff = _patch(trial.base, trial.change, context=1)[0].decode(errors="replace") if trial.change else ""
    old, new = (
        files.files.get(COMMAND_LINE, line) if files else line for files in (trial.base, trial.change or trial.base)
    )
    diff += f"--- {COMMAND_LINE}\n+++ {COMMAND_LINE}\n-{old}\n+{new}\n" if new != old else ""
    return dataclasses.replace(trial.finding, changes=(), diff=diff)


def _patch(before: Change, after: Change, context: int) -> tuple[bytes, str]:
    """Return the patch from one change's files to another's, and the folder in which it applies."""
    changed = {path: text for path, text in after.files.items() if before.files.get(path) != text}
    changed.pop(COMMAND_LINE, None)  # which is no file that a patch can change
    if not changed:
        return b"", ""
    here = os.path.realpath(os.getcwd())
    inside = all(path.startswith(here + os.sep) for path in changed)
    folder = here if inside else os.path.commonpath([os.path.dirname(path) for path in changed])
    old = {path: _contents(path, before.files.get(path)) for path in changed}
    new = {path: _contents(path, text) for path, text in changed.items()}
    return make_patch(old, new, {path: os.path.relpath(path, folder) for path in changed}, context), folder


def _contents(path: str, text: str | None) -> bytes:
    """Return what a file holds, or would hold with this text; of a notebook, the text of its code cells."""
    if path.endswith(".ipynb"):
        return (read_source(path) if text is None else text).encode()
    return pathlib.Path(path).read_bytes() if text is None else encode_source(path, text)


def _written_by_others() -> set[str]:
    """Return the files that a process holds open for writing, as the shell and `tee` do with this command's output.

    None where there is no /proc.
    """
    files = set()
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError, ValueError):  # of another user, or gone
            flags = re.search(r"flags:\s*(\d+)", link.parents[1].joinpath("fdinfo", link.name).read_text())
            if flags and int(flags[1], 8) & (os.O_WRONLY | os.O_RDWR):
                files.add(os.readlink(link))
    return files


_GPUS = (1, 8)  # that a script is told of which demands some
_MOST_FILES, _DEPTH = 5000, 3


def _list_files(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Return the files of a folder, hidden ones and caches left out, with their times and sizes."""
    files: dict[str, tuple[int, int]] = {}
    caches = cache_folders()
    folders = [(str(folder), 0)]
    while folders and len(files) < _MOST_FILES:
        name, depth = folders.pop()
        try:
            entries = list(os.scandir(name))
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith((".", "__pycache__")) or os.path.realpath(entry.path) + os.sep in caches:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders += [(entry.path, depth + 1)] * (depth < _DEPTH)
            elif entry.is_file(follow_symlinks=False):
                status = entry.stat()
                files[entry.path] = (status.st_mtime_ns, status.st_size)
    return files
