"""The command line: run notebooks, prove labs, make eras, look at a machine.

Modules are imported inside the commands, for some cost seconds. A known error is one line on stderr; the exit status is
0 only if all held, 1 if something failed, 2 for a wrong call, 3 if the environment broke before the question was asked.
"""

import errno
import json
import pathlib
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from failurelab.errors import FailureLabError
from failurelab_course import eras
from failurelab_course.labs import cli as lab_cli

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="The GRPO Failure Lab.", pretty_exceptions_enable=False
)
eras_app = typer.Typer(no_args_is_help=True, help="The pinned library stacks.")
app.add_typer(lab_cli.app, name="lab")
app.add_typer(eras_app, name="eras")
console = Console()

# What the machine refuses: a full disk, a folder that nobody may write, a limit on memory, files or processes.
_REFUSED = {
    getattr(errno, name): step
    for names, step in (
        ("ENOSPC EDQUOT EFBIG", "free some room"),
        ("EROFS EACCES EPERM", "use a clone that you may write"),
        ("EMFILE ENFILE ENOMEM EAGAIN", "close other programs, or ask for a higher limit (ulimit -a)"),
    )
    for name in names.split()
}
Names = Annotated[list[str] | None, typer.Argument(help="Numbers or names; all when none is given.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("run")
def run_notebooks(
    names: Names = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or cuda:N.")] = "cpu",
    model: Annotated[str, typer.Option(help="tiny, random-0.5b, a hub name or a folder.")] = "tiny",
    seed: Annotated[int, typer.Option(help="The seed of the runs.")] = 0,
    jobs: Annotated[int, typer.Option(help="How many notebooks at once.")] = 2,
    time_limit: Annotated[int, typer.Option(help="Seconds for one notebook.")] = 600,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Where copies, HTML, results.json and junit.xml go; else a new folder in .course/runs."),
    ] = None,
) -> None:
    """Run notebooks through papermill, all when none is named; keep copies, HTML, evidence, JSON and JUnit XML."""
    from failurelab_course import outcomes
    from failurelab_course.notebook_runs import runs

    results = runs.run(names or [], device=device, model=model, seed=seed, jobs=jobs, time_limit=time_limit, out=out)
    raise typer.Exit(outcomes.exit_status(result.status for result in results))


@app.command("notebooks")
def copy_notebooks(
    open_them: Annotated[bool, typer.Option("--open", help="Then open JupyterLab on the first.")] = False,
) -> None:
    """Copy the notebooks, without their outputs, to my_notebooks/ for you to run and edit; what you changed stays."""
    from failurelab_course.notebook_runs import copies

    for line in copies.refresh():
        _say(line)
    if open_them:
        copies.open_lab()


@app.command()
def verify(
    names: Names = None,
    device: lab_cli.Device = "cpu",
    as_json: Json = False,
    junit_xml: Annotated[pathlib.Path | None, typer.Option("--junit", help="Also write JUnit XML here.")] = None,
    write: Annotated[
        bool, typer.Option("--write", hidden=True, help="Keep in labs/verified.json which labs passed.")
    ] = False,
) -> None:
    """Prove labs in three states: broken fails, wrong fixes still fail, the right fix heals."""
    from failurelab._outputs import check_output, make_folder
    from failurelab_course import outcomes
    from failurelab_course.labs import verify as labs
    from failurelab_course.labs.verified import LabHashes

    if write and device != "cpu":
        raise typer.BadParameter("what is kept is the proof on the CPU", param_hint="--write")
    if junit_xml:
        make_folder(junit_xml.parent, "--junit")
        check_output(junit_xml, "--junit")
    hashes = LabHashes()
    before = {lab.name: hashes.of(lab) for lab in labs.find(names or None)} if write else {}
    matrix = labs.verify(names or None, done=_verified, device=device)
    if write:
        hashes.write(before, matrix, labs.known())
    if junit_xml:
        outcomes.write_junit(junit_xml, labs.cases(matrix), "GRPO Failure Lab: labs")
    print(json.dumps(labs.to_json(matrix), indent=1)) if as_json else console.print(labs.render(matrix))
    raise typer.Exit(outcomes.exit_status(row.result for row in matrix))


@app.command()
def doctor(
    python: Annotated[
        pathlib.Path | None, typer.Option(help="Look at this Python's libraries instead of the course.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at this machine, or at another Python's libraries: which failures would it meet?"""
    from failurelab import checks
    from failurelab.failures import versions
    from failurelab_course.doctor import check_course

    results = versions.check_python(python) if python else check_course()
    print(json.dumps(checks.to_json(results), indent=1) if as_json else checks.text(results))
    raise typer.Exit(checks.exit_status(results))


@app.command("symptoms")
def find_symptoms(
    log: Annotated[pathlib.Path | None, typer.Argument(help="A log; without one it is read from the input.")] = None,
    write: Annotated[
        bool, typer.Option("--write", hidden=True, help="Write docs/symptoms.md, and the Chinese one.")
    ] = False,
) -> None:
    """Say which failures a log's lines belong to, and where each is explained and repaired."""
    from failurelab.failures import symptoms

    if write:
        from failurelab_course import symptoms_page

        for name, text in (
            (symptoms.PAGE, symptoms_page.page()),
            ("docs/zh/symptoms.md", symptoms_page.chinese_page()),
        ):
            (eras.root() / name).write_text(text, encoding="utf-8")
            _say(f"{name} written")
        return
    said, status = symptoms.look_up(symptoms.read_log(log) if log else sys.stdin)
    _say(said)
    raise typer.Exit(status)


@app.command("card")
def print_card(
    language: Annotated[str, typer.Option("--lang", help="en or zh.")] = "en",
    write: Annotated[bool, typer.Option("--write", hidden=True, help="Write the course's own copies.")] = False,
) -> None:
    """Print the card: the loop, each silent failure on its arrow, and its figure; as SVG, for one page of A4."""
    from failurelab_course import card

    if write:
        for path in card.write(eras.root()):
            _say(f"{path.relative_to(eras.root())} written")
        return
    if language not in card.PAGES:
        raise typer.BadParameter(f"{language!r}: the card is in {' and '.join(card.PAGES)}", param_hint="--lang")
    sys.stdout.write(card.draw(language))


@app.command("upgrade")
def compare_releases(
    before: Annotated[str, typer.Argument(help="The release of trl that you have, such as 0.19.1.")],
    after: Annotated[str, typer.Argument(help="The release that you think of, such as 1.16.0.")],
) -> None:
    """Say what changes from one release of trl to another, as it was measured: failures, and defaults."""
    from failurelab.failures import atlas

    _say(atlas.describe_upgrade(before, after))


@app.command(
    "preflight",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def judge_script(context: typer.Context) -> None:  # what follows is the script's
    """Judge a training script as it is, with a small model, before the GPU hours are spent (--help for more)."""
    from failurelab_preflight import cli

    raise typer.Exit(cli.main(context.args))


@app.command(
    "diagnose", add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def diagnose_run(context: typer.Context) -> None:
    """Say what is wrong with a run, by the files that it left: figures, logs, versions (--help for more)."""
    from failurelab_preflight.diagnose import cli

    raise typer.Exit(cli.main(context.args))


@app.command(
    "gradients", add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def check_gradients(context: typer.Context) -> None:
    """Hold an implementation of GRPO's loss against known gradients (--help for more)."""
    from failurelab.known_gradients import check

    raise typer.Exit(check.main(context.args))


@eras_app.command("list")
def eras_list() -> None:
    """List the eras, and whether each is ready."""
    table = Table("era", "title", "status", "ZeRO-3 on a CPU")
    for era in eras.known():
        table.add_row(era.name, era.title, era.status, "yes" if era.has_zero3 else "NOT RUN")
    console.print(table)


@eras_app.command("create")
def eras_create(names: Names = None) -> None:
    """Make eras that are missing, half-made or of another lock."""
    from failurelab_course.eras import install

    install.create(names or [era.name for era in eras.known() if era.name != eras.TODAY], say=_say)


@eras_app.command("remove")
def eras_remove(names: Annotated[list[str], typer.Argument(help="The eras to delete.")]) -> None:
    """Delete eras and their kernelspecs."""
    from failurelab_course.eras import install

    for name in names:
        install.remove(name, say=_say)


def _verified(row) -> None:
    """Say each outcome as it comes: the whole proof takes a minute or more."""
    print(f"{row.result:<12} {row.lab} {row.script}", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(text, flush=True)


def _leave_to_verbs(words: list[str]) -> list[str]:
    """Put a -- behind a verb that reads its own options: click takes that one away, and leaves the script's own."""
    return [words[0], "--", *words[1:]] if words[:1] in (["preflight"], ["diagnose"], ["gradients"]) else words


def run() -> int:
    """Run the command line; return the exit status."""
    # A seat that is ended, or a CI's time limit: what was started is ended, and temporary folders go, as by Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(_leave_to_verbs(sys.argv[1:]))
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C, which says nothing by itself
            print("interrupted: what was started is ended; the same command begins again", file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except FailureLabError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        where = f": {error.filename}" if error.filename else ""
        step = f"Next: {_REFUSED[error.errno]}, then the same command again"
        print(f"ERROR {error.strerror}{where}. {step}", file=sys.stderr)
        return 3
    return 0
