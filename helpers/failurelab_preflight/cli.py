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
from failurelab_preflight import launcher_line
from failurelab_preflight.answer import Answer, Differences, Effect, SchemaError
from failurelab_preflight.finding import Change, Finding
from failurelab_preflight.patch import PatchError, apply_patch
from failurelab_preflight.report import terminal, words
from failurelab_preflight.script_text import encode_source, make_patch, read_source
from failurelab_preflight.session import Session, TimeIsOver
from failurelab_preflight.stage.own_code import OwnCode
from failurelab_preflight.trials import ROUNDS_OVER, Rounds, Trial, compare


class PreflightError(FailureLabError):
    """A script cannot be judged; the message says why and the next step."""

    exit_status = 3


def parser(prog: str = "failurelab preflight") -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog,
        description="Judge a training script, as it is, before the GPU hours are spent. It runs the script, with a "
        "small model, up to the end of a cut training.",
        epilog="exit status: 0 nothing found, 1 found, 2 a wrong call, 3 the script could not be asked, 4 the edit was "
        "not tried: it does not apply, or breaks the script. "
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
    beside = parser.add_mutually_exclusive_group()
    edit = "try this unified diff (-: standard input): what changes, and what it heals; no file is changed"
    beside.add_argument("--edit", metavar="PATCH", help=edit)
    against = "another script, or what --json wrote: what is otherwise than there"
    beside.add_argument("--against", type=pathlib.Path, metavar="OTHER", help=against)
    parser.add_argument("--all", action="store_true", help="the whole answer; in JSON texts of the script too")
    parser.add_argument("--diff", type=pathlib.Path, metavar="FILE", help="write the patch that was tried, a new FILE")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write JSON too; -: print it alone")
    parser.add_argument("--lang", choices=sorted(words.LANGUAGES), default="en", help="of headings and verdicts (en)")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE [ARGS...]", help="as python -m")
    parser.add_argument("line", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    before = arguments[: len(arguments) - len(options.line)]
    if options.line and options.line[0] != "--" and (own := _behind(options.line)):
        options = parser().parse_args([*before, *own, *options.line])
    line = options.line[1:] if options.line[:1] == ["--"] else options.line
    if options.module:
        line = [sys.executable, "-m", *options.module]
    if not line:
        print("ERROR preflight needs a script. Next: failurelab preflight train.py", file=sys.stderr)
        return 3
    on_screen = str(options.json) == "-"
    try:
        for name in _FILES:
            if name != "json" or not on_screen:
                check_output(getattr(options, name), f"--{name}", new=name == "diff")
        beside = _read_beside(options)
    except FailureLabError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return error.exit_status
    try:
        names = ("python", "steps", "real_model", "world_size", "time_limit", "again")
        answer = ask(
            launcher_line.read_line(line, options.python),
            **{name: getattr(options, name) for name in names},
            beside=beside,
            say=lambda stage: print(f"preflight: {stage} …", file=sys.stderr, flush=True),
        )
    except FailureLabError as error:
        answer = Answer((options.module or line)[0], error=str(error))
    except KeyboardInterrupt:
        print("\npreflight was interrupted: the script's processes are ended, nothing is left", file=sys.stderr)
        return 130
    if on_screen:
        print(json.dumps(answer.to_json(options.all), indent=1))
    else:
        print(terminal.text(answer, options.lang, options.all))
    try:
        _write(answer, options)
    except OutputError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return error.exit_status
    return answer.exit_status


_FILES = ("diff", "json")  # options that name a file to write
_BEHIND = ("--edit", "--against", "--json", "--all")  # options that may stand behind the script


def _behind(line: list[str]) -> list[str]:
    """Take those options that may stand behind the script, and that it does not have itself, out of its line.

    A script has an option where its text does, or a field of that name, of which an argument parser makes options.
    """
    script = pathlib.Path(line[0])
    text = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""
    of_preflight = [name for name in _BEHIND if not re.search(rf"{name}\b|^\s+{name[2:]}\s*:", text, re.MULTILINE)]
    own: list[str] = []
    words, line[1:] = line[1:], []
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if word == "--":
            line += [word, *words]
            break
        if name not in of_preflight:
            line.append(word)
            continue
        own.append(word)
        own += [words.pop(0)] if words and not equals and name != "--all" else []
    return own


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a measurement is put beside: a patch of the script, another script, or a saved measurement."""

    what: str
    patch: str | None = None
    script: str = ""
    saved: Answer | None = None


def _read_beside(options: argparse.Namespace) -> Beside | None:
    """Return what the script is measured beside; None where nothing was asked for.

    Raises:
        FailureLabError: it cannot be read.
    """
    named = str(options.edit or options.against or "")
    what = "the edit on standard input" if named == "-" else named
    try:
        if options.edit:
            return Beside(what, sys.stdin.read() if named == "-" else pathlib.Path(named).read_bytes().decode())
        if named.endswith(launcher_line.SCRIPTS):
            pathlib.Path(named).open().close()
            return Beside(what, script=named)
        return Beside(what, saved=Answer.from_json(json.loads(pathlib.Path(named).read_text()))) if named else None
    except SchemaError as error:
        raise SchemaError(f"{what}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = getattr(error, "strerror", None) or "it is neither a script nor what --json wrote"
        raise SchemaError(f"{what} cannot be read ({why}). Next: the path of a patch, a script or an answer") from None


def _write(answer: Answer, options: argparse.Namespace) -> None:
    """Write the files that were asked for."""
    if options.diff and answer.patch:
        write_output(options.diff, answer.patch)
        apply = f"in {answer.patch_folder}: git apply {options.diff.resolve()}"
        if answer.script.endswith(".ipynb"):
            apply = "make its changes in the notebook's cells"
        left = ", ".join(f"{finding.failure} ({finding.verdict.value.lower()})" for finding in answer.left_by_patch)
        left = f"it leaves {left}" if left else "with it nothing is found"
        said = f"the patch that was tried, as a whole: {left}. Next, {apply}"
    else:
        said = "not written, for no edit of the script was tried that heals"
    on_screen = str(options.json) == "-"  # JSON alone
    if options.diff:
        print(f"{options.diff}: {said}", file=sys.stderr if on_screen else sys.stdout)
    if options.json and not on_screen:
        write_output(options.json, json.dumps(answer.to_json(options.all), indent=1) + "\n")


def ask(
    started: launcher_line.Launch,
    *,
    python: str | None = None,
    steps: int = 3,
    real_model: bool = False,
    world_size: int | None = None,
    time_limit: float = 600,
    again: bool | None = None,
    beside: Beside | None = None,
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
        beside: what it is measured beside; then no repair of preflight's own is tried.
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
        "zero_config": started.zero_config,
        "left_out": started.left_out,
        "visible": (os.environ | dict(started.environment)).get("CUDA_VISIBLE_DEVICES", ""),
    }
    with tempfile.TemporaryDirectory(prefix="failurelab-preflight-", ignore_cleanup_errors=True) as folder:
        variables = dict(started.environment)
        with Session(pathlib.Path(folder), python, variables, spec, time_limit, say).open() as session:
            if beside is None:
                _judge(answer, session, script, again)
            elif beside.patch is not None:
                _judge_edit(answer, session, script, again, beside)
            else:
                _judge(answer, session, script, False, _BESIDE)
    if beside is not None and beside.patch is None:
        other = dataclasses.replace(started, script=beside.script, module="")
        options = {"steps": steps, "real_model": real_model, "world_size": world_size, "time_limit": time_limit}
        before = beside.saved or ask(other, python=python, **options, again=False, say=say)  # type: ignore[arg-type]
        answer.compared = compare(before, answer, what=f"beside {beside.what}")
        if answer.compared.error:  # the script could not be asked: that stands in its own answer
            answer.compared = None
    return answer


_BESIDE = "no repair is tried beside an edit or another script"


def _judge_edit(answer: Answer, session: Session, script: pathlib.Path, again: bool | None, beside: Beside) -> None:
    """Run the script without the edit and with it; write into the answer what is otherwise, and what stands."""
    first, effects, known = _first_run(session, again)
    outcome = Rounds(session.run, first, session.say)
    measured, compared = first, Differences(beside.what)
    own = OwnCode(script)
    yaml = {os.path.realpath(word.rpartition("=")[2]) for word in session.spec["arguments"] if ".y" in word}
    try:
        change = apply_patch(
            beside.patch or "", read_source, [pathlib.Path.cwd(), script.resolve().parent], session.line,
            lambda path: path in yaml or (path.endswith(launcher_line.SCRIPTS) and own.may_edit(path)),
        )  # fmt: skip
        second = outcome.run_again() if again is not False and (again or not effects) and known else None
        session.say(f"running with {beside.what}")
        after = session.run(change)
        compared = compare(first, after, second, beside.what)
        measured = first if compared.error else after
    except (PatchError, SyntaxError, ValueError, TimeIsOver) as error:
        compared = dataclasses.replace(compared, error=f"{'' if known else 'the time was over: '}{error}")
    rounds = Rounds(session.run, measured)
    _settle(answer, session, rounds, measured, effects, _BESIDE)
    answer.notes += outcome.notes
    answer.compared = compared


def _judge(
    answer: Answer, session: Session, script: pathlib.Path, again: bool | None, left: str = "--no-try was asked for"
) -> None:
    """Run the script, and again with the repairs of what was found; write into the answer what came of it."""
    first, effects, known = _first_run(session, again)
    outcome = Rounds(session.run, first, session.say)
    if not known:
        left = "not tried: the time was over"
    elif again is None and effects and first.found:
        left = f"the script was not run again, for it {effects[0]}"
        outcome.notes.append(
            f"beside its training the script {'; '.join(map(str, effects))}. It was not run again, so nothing is "
            "named. Next: --try, if it may do all that once more for each repair"
        )
    elif again is not False:
        left = ROUNDS_OVER
        try:
            outcome.try_all()
        except TimeIsOver as error:
            left = "not tried: the time was over"
            outcome.notes.append(f"not every repair was tried: {error}")
    _settle(answer, session, outcome, first, effects, left)


def _first_run(session: Session, again: bool | None) -> tuple[Answer, list[Effect], bool]:
    """Return the run without any change, what it did beside its training, and whether it came to its end in time.

    A script that ends by itself for want of a GPU is run again, and told of some, and so is one whose trainer refuses
    the numbers that were cut.
    """
    try:
        first = session.run(Change())
    except TimeIsOver as error:
        return dataclasses.replace(error.known, error=str(error)), error.known.effects, False
    if first.demands_gpu and again is not False and (again or not first.effects):
        session.gpus = _GPUS
        with contextlib.suppress(TimeIsOver):
            told = session.run(Change())
            if not told.demands_gpu:
                note = f"the script demands a GPU: it was told of {_GPUS}, and what it puts there is put on the CPU"
                first = dataclasses.replace(told, notes=[*told.notes, note], effects=[*first.effects, *told.effects])
    if first.demands_gpu and again is None and first.effects:
        first.error += f". Or --try: the script {first.effects[0]}, so it is not run again unasked, and told of a GPU"
    first = _with_numbers_as_given(session, first, again)
    return first, first.effects, True


def _settle(answer: Answer, session: Session, outcome: Rounds, first: Answer, effects: list[Effect], left: str) -> None:
    """Write into the answer what came of all runs: the repairs as diffs, and all that healed as one patch."""
    last = outcome.last
    answer.error, answer.cut, answer.effects = last.error, last.cut, effects
    answer.in_force, answer.measured = first.in_force or last.in_force, first.measured or last.measured
    answer.notes = [*first.notes, *outcome.notes]
    answer.rewards = first.rewards or last.rewards
    tried = [_with_diff(trial) for trial in (*outcome.named, *outcome.suspected(left))]
    answer.settle([*tried, *(finding for finding in last.findings if not finding.accuses)])
    answer.patch, answer.patch_folder = _patch(Change(), outcome.change, context=3)


def _with_numbers_as_given(session: Session, first: Answer, again: bool | None) -> Answer:
    """Return the first run, or, where the making of a trainer refuses what was cut, one with the numbers as given.

    A class of the script's may compare `num_generations` with a number of its own: it is right, and the cut is not.
    """
    cut = first.refuses_cut
    if cut and again is not False and (again or not first.effects):
        session.whole = True
        session.say("making the trainer again with its numbers as given")
        with contextlib.suppress(TimeIsOver):
            told = session.run(Change())
            first = dataclasses.replace(told, effects=[*first.effects, *told.effects])
    if first.refuses_cut:
        first.error += (
            f". Cut was {', '.join(first.refuses_cut)}: with --try it is made again with the numbers as given"
        )
    elif cut and not first.error:
        first.notes.append(f"the trainer was made with its numbers as given: its making refuses {', '.join(cut)}")
    return first


def _with_diff(trial: Trial) -> Finding:
    """Return what came of a failure with its repair as a diff, and without the whole files of the runs."""
    diff = _patch(trial.base, trial.change, context=1)[0].decode(errors="replace") if trial.change else ""
    return dataclasses.replace(trial.finding, changes=(), diff=diff)


def _patch(before: Change, after: Change, context: int) -> tuple[bytes, str]:
    """Return the patch from one change's files to another's, and the folder in which it applies."""
    changed = {path: text for path, text in after.files.items() if before.files.get(path) != text}
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


_GPUS = 8  # that a script is told of which demands some
