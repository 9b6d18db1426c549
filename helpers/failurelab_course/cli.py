"""The command line: run notebooks, prove labs, make eras, record evidence, look at a machine.

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
evidence_app = typer.Typer(no_args_is_help=True, help="What runs measured.")
app.add_typer(lab_cli.app, name="lab")
app.add_typer(eras_app, name="eras")
app.add_typer(evidence_app, name="evidence")
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


def _device(name: str) -> str:
    from failurelab_course.experiments import machine

    if not machine.is_device(name):
        raise typer.BadParameter(f"{name!r} is no device. Next: give auto, cpu, cuda, or cuda:N for GPU number N")
    return name


@app.command("run")
def run_notebooks(
    names: Names = None,
    device: Annotated[str, typer.Option(callback=_device, help="auto, cpu, cuda, or cuda:N.")] = "cpu",
    model: Annotated[str, typer.Option(help="tiny, random-0.5b, a hub name or a folder.")] = "tiny",
    seed: Annotated[int, typer.Option(help="The seed of the runs.")] = 0,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", "--parameter", metavar="NAME VALUE", help="A further parameter.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="How many notebooks at once.")] = 2,
    time_limit: Annotated[int, typer.Option(help="Seconds for one notebook.")] = 600,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(help="Where copies, HTML, results.json and junit.xml go; else a new folder in .course/runs."),
    ] = None,
) -> None:
    """Run notebooks through papermill, all when none is named; keep copies, HTML, evidence, JSON and JUnit XML."""
    from failurelab_course.runs import notebooks as course

    given = dict(_name_value(text) for text in parameter or [])
    results = course.run(
        names or [],
        device=device,
        model=model,
        seed=seed,
        parameters=given,
        jobs=jobs,
        time_limit=time_limit,
        out=out,
    )
    raise typer.Exit(course.exit_status(results))


@app.command()
def outputs(names: Names = None) -> None:
    """Run notebooks on the CPU tier and store their outputs in notebooks/."""
    from failurelab_course.runs import notebooks as course

    raise typer.Exit(course.exit_status(course.regenerate(names or [])))


@app.command("notebooks")
def copy_notebooks(
    open_them: Annotated[bool, typer.Option("--open", help="Then open JupyterLab on the first.")] = False,
) -> None:
    """Copy the notebooks, without their outputs, to my_notebooks/ for you to run and edit; what you changed stays."""
    from failurelab_course.runs import copies

    for line in copies.refresh():
        _say(line)
    if open_them:
        copies.open_lab()


@app.command("contract")
def check_contract(names: Names = None) -> None:
    """Measure the form of notebooks without running them, and say what breaks their contract."""
    from failurelab_course.runs import lint
    from failurelab_course.runs import notebooks as course

    chosen = course.find(names or [])
    rows = [{"notebook": notebook.name[:2]} | lint.form(notebook.path) for notebook in chosen]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    broken = [f"{notebook.name}: {violation}" for notebook in chosen for violation in lint.check(notebook.path)]
    for line in broken:
        _say(line)
    raise typer.Exit(bool(broken))


@app.command("slides")
def make_slides(
    names: Names = None,
    out: Annotated[pathlib.Path | None, typer.Option(help="The folder to write to; .slides by default.")] = None,
) -> None:
    """Make slides from notebooks' stored outputs, one file each, that need no network."""
    from failurelab_course.teaching import slides

    slides.make(names or [], out, say=_say)


@app.command()
def verify(
    names: Names = None,
    device: lab_cli.Device = "cpu",
    as_json: Json = False,
    junit_xml: Annotated[pathlib.Path | None, typer.Option("--junit", help="Also write JUnit XML here.")] = None,
) -> None:
    """Prove labs in three states: broken fails, wrong fixes still fail, the right fix heals."""
    from failurelab_course import outcomes
    from failurelab_course.labs import verify as labs

    matrix = labs.verify(names or None, done=_verified, device=device)
    if junit_xml:
        outcomes.write_junit(junit_xml, labs.cases(matrix), "GRPO Failure Lab: labs")
    print(json.dumps(labs.to_json(matrix), indent=1)) if as_json else console.print(labs.render(matrix))
    raise typer.Exit(labs.exit_status(matrix))


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
    write: Annotated[bool, typer.Option("--write", hidden=True, help="Write docs/symptoms.md.")] = False,
) -> None:
    """Say which failures a log's lines belong to, and where each is explained and repaired."""
    from failurelab.failures import symptoms

    if write:
        from failurelab_course import symptoms_page

        path = eras.root() / symptoms.PAGE
        path.parent.mkdir(exist_ok=True)
        path.write_text(symptoms_page.page(), encoding="utf-8")
        _say(f"{symptoms.PAGE} written")
        return
    _say(symptoms.describe(symptoms.read_log(log) if log else sys.stdin))


@app.command(
    "preflight",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def judge_script(context: typer.Context) -> None:  # what follows is the script's
    """Judge a training script as it is, with a small model, before the GPU hours are spent (--help for more)."""
    from failurelab.preflight import command

    raise typer.Exit(command.main(sys.argv[sys.argv.index("preflight") + 1 :]))  # click takes a -- away


@app.command(
    "diagnose", add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def diagnose_run(context: typer.Context) -> None:
    """Say what is wrong with a run, by the files that it left: figures, logs, script, versions (--help for more)."""
    from failurelab.diagnose import command

    raise typer.Exit(command.main(sys.argv[sys.argv.index("diagnose") + 1 :]))


@app.command("pack")
def make_bundle(
    out: Annotated[pathlib.Path, typer.Option(help="The folder to write.")],
    python: Annotated[str, typer.Option(help="3.11 or 3.12: the Python that will install it.")] = "3.11",
    platform: Annotated[str, typer.Option(help="manylinux_2_N_x86_64, N of the machines' glibc.")] = (
        "manylinux_2_28_x86_64"
    ),
    chosen: Annotated[str, typer.Option("--eras", metavar="A,B", help="Eras beside today; all without.")] = "",
    torch_index: Annotated[str, typer.Option(help="An index of torch's builds for CPUs.")] = "",
) -> None:
    """Pack the course and all wheels for a room without a network."""
    from failurelab_course.eras import offline

    names = [name.strip() for name in chosen.split(",") if name.strip()]
    offline.pack(out, offline.Target(python, platform), names, torch_index, say=_say)


@eras_app.command("list")
def eras_list() -> None:
    """List the eras, and whether each is ready."""
    table = Table("era", "title", "status", "ZeRO-3 on a CPU")
    for era in eras.known():
        table.add_row(era.name, era.title, era.status, "yes" if era.has_zero3 else "NOT RUN")
    console.print(table)


@eras_app.command("create")
def eras_create(
    names: Names = None,
    wheels: Annotated[
        pathlib.Path | None, typer.Option(help="Take everything from this folder of wheels, without a network.")
    ] = None,
) -> None:
    """Make eras that are missing, half-made or of another lock."""
    from failurelab_course.eras import install

    chosen = names or [era.name for era in eras.known() if era.name != eras.TODAY]
    install.create_all(chosen, say=_say, wheels=wheels)


@eras_app.command("remove")
def eras_remove(names: Annotated[list[str], typer.Argument(help="The eras to delete.")]) -> None:
    """Delete eras and their kernelspecs."""
    from failurelab_course.eras import install

    for name in names:
        install.remove(name, say=_say)


@evidence_app.command("record")
def evidence_record(
    out: Annotated[pathlib.Path, typer.Option(help="The ledger to write.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Only these benchmarks or notebooks; others are kept.")] = None,
    time_limit: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Start nothing new after it; keep what there is.")
    ] = None,
) -> None:
    """Run benchmarks, notebooks and labs, and keep what they measured in one ledger."""
    from failurelab_course.runs import record as recording

    recording.record(out, device=device, only=only or [], time_limit=time_limit, say=_say)


@evidence_app.command("show")
def evidence_show(
    ledger: Annotated[pathlib.Path | None, typer.Argument(help="By default evidence/cpu.json.")] = None,
    failure: Annotated[str, typer.Option(help="Only this failure, such as F1.")] = "",
) -> None:
    """Print a ledger's records."""
    from failurelab_course.ledger import records as evidence

    columns = ("failure", "case", "state", "era", "seed", "tier")
    table = Table(*columns, "figures")
    for record in evidence.read_ledger(ledger or eras.root() / "evidence" / "cpu.json"):
        if not failure or record["failure"] == failure:
            metrics = ", ".join(f"{name} {_short(value)}" for name, value in record["figures"].items())
            table.add_row(*(str(record.get(key, "")) for key in columns), metrics)
    console.print(table)
    for part in evidence.read_not_run(ledger or eras.root() / "evidence" / "cpu.json"):
        _say(str(part))


@evidence_app.command("compare")
def evidence_compare(
    old: Annotated[pathlib.Path, typer.Argument(help="A ledger.")],
    new: Annotated[pathlib.Path, typer.Argument(help="Another.")],
    tolerance: Annotated[float, typer.Option(help="Relative difference of magnitudes that is passed over.")] = 0.1,
    as_json: Json = False,
) -> None:
    """Tell what changed between two ledgers; exit status 1 if a verdict did, or something is missing."""
    import dataclasses

    from failurelab_course.ledger.compare import compare
    from failurelab_course.ledger.records import read_ledger, read_not_run

    comparison = compare(read_ledger(old), read_ledger(new), tolerance, read_not_run(new))
    if as_json:
        print(json.dumps(dataclasses.asdict(comparison) | {"holds": comparison.holds}, indent=1))
        raise typer.Exit(int(not comparison.holds))
    for title, lines in (
        (f"only in {old}", comparison.only_old),
        (f"only in {new}", comparison.only_new),
        (f"NOT RUN in {new}", comparison.not_run),
        ("versions", comparison.versions),
        ("verdicts", [f"{one.where}: {one.figure} {one.old} -> {one.new}" for one in comparison.verdicts]),
    ):
        if lines:
            console.print(f"{len(lines)} {title}", style="bold")
            print("\n".join(f"  {line}" for line in lines))
    if comparison.magnitudes:
        table = Table("measurement", "figure", "old", "new", "ratio", title=f"differ by more than {tolerance:.0%}")
        for change in comparison.magnitudes:
            ratio = "-" if change.ratio is None else f"{change.ratio:.2f}"
            table.add_row(change.where, change.figure, _short(change.old), _short(change.new), ratio)
        console.print(table)
    console.print(f"{old}: {comparison.machines[0]}; {new}: {comparison.machines[1]}", highlight=False, soft_wrap=True)
    differ = f"{len(comparison.verdicts)} verdicts and {len(comparison.magnitudes)} magnitudes differ"
    console.print(f"{comparison.same} measurements in both; {differ}", style="bold", highlight=False)
    raise typer.Exit(int(not comparison.holds))


@evidence_app.command("tables")
def evidence_tables() -> None:
    """Write the tables and pictures of README.md and docs/measured.md from evidence/cpu.json."""
    from failurelab_course.ledger import pages, pictures
    from failurelab_course.ledger.records import read_ledger

    folder = eras.root() / "evidence"
    records = read_ledger(folder / "cpu.json")
    for page, changed in pages.write_pages(records).items():
        _say(f"{page}: tables {'written' if changed else 'unchanged'}")
    pictures.draw_pictures(records, folder)
    _say(f"{', '.join(f'evidence/{name}' for name in pictures.PICTURES)}: drawn")


def _verified(row) -> None:
    """Say each outcome as it comes: the whole proof takes a minute or more."""
    print(f"{row.result:<12} {row.lab} {row.script}", file=sys.stderr, flush=True)


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _say(text: str) -> None:
    print(text, flush=True)


def _name_value(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise typer.BadParameter(f"{text!r} is not a NAME with a VALUE, such as -p steps 50")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _papermill_parameters(arguments: list[str]) -> list[str]:
    """Return the arguments with `-p NAME VALUE`, as papermill writes it, joined to NAME=VALUE, as typer reads it."""
    joined, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-p", "--parameter") and len(rest) >= 2 and "=" not in rest[0]:
            joined += [word, f"{rest.pop(0)}={rest.pop(0)}"]
        else:
            joined.append(word)
    return joined


def run() -> int:
    """Run the command line; return the exit status."""
    # A seat that is ended, or a CI's time limit: what was started is ended, and temporary folders go, as by Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(_papermill_parameters(sys.argv[1:]))
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
