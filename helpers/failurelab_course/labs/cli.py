"""The command `failurelab lab`; in a notebook's cell it is the magic `%lab`."""

import contextlib
import pathlib
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from failurelab import failures as registry
from failurelab_course import eras, outcomes
from failurelab_course.labs import definition as lab_files
from failurelab_course.labs import exercise as lab_work
from failurelab_course.labs import progress as lab_state
from failurelab_course.labs import report as lab_report
from failurelab_course.labs import verify as labs

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The exercises: repair a broken training script.")
console = Console(highlight=False)
# Where a learner looks for the next step of a check that could not be asked.
_DOCTOR = "Next: failurelab doctor"
_TITLE = 31  # characters of a lab's title in the list: what is left of 80 with the other columns
_DIFF = {"+": "green", "-": "red", "@": "cyan"}

Name = Annotated[str | None, typer.Argument(help="Number or name; the first that is not solved without.")]
OneName = Annotated[str, typer.Argument(help="Number or name.")]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:N, or auto: a GPU where there is one, for the labs that use one.")
]


@app.command("list")
def list_labs() -> None:
    """List the labs, a line each, and how far you are."""
    state = lab_state.read(lab_state.default_path())
    rows = [(lab, state.get(lab.name, lab_state.Progress())) for lab in labs.find()]

    def print_line(number: str, title: str, given: str, minutes: str, era: str, state: str, style: str = "") -> None:
        title = title if len(title) <= _TITLE else f"{title[: _TITLE - 1]}…"
        line = Text(f"{number:<3} {title:<{_TITLE}}  {given:<7}  {minutes:>3}  {era:<16}  ")
        console.print(line.append(state, style), no_wrap=True, overflow="ellipsis", crop=True)

    print_line("lab", "title", "given", "min", "era", "state")
    for lab, progress in rows:
        hints = f", hints: {progress.hints} of {len(lab.hints)}" if progress.hints else ""
        # which notebooks a lab belongs to says what is wrong in it
        about = dict.fromkeys(registry.get(id).notebook[:2] for id in lab.failures if progress.solved)
        read = f", see {' '.join(filter(None, about))}" if any(about) else ""
        style = "green" if progress.solved else ""
        print_line(lab.number, lab.title, lab.given, str(lab.minutes), lab.era, progress.words + read + hints, style)
    solved = sum(bool(progress.solved) for _, progress in rows)
    for given, words in lab_files.GIVEN.items():
        console.print(f"given {given}: {words}", style="dim")
    console.print("see: the notebooks about the cause of a lab that is solved", style="dim")
    console.print("what is said of a run stands at the top of its script", style="dim")
    console.print(f"{solved} of {len(rows)} solved.", style="bold")
    if solved < len(rows):
        lab = lab_work.next_lab(state)
        lab_files.learner_script(lab)
        console.print(f"Next: edit labs/{lab.name}/train.py, then failurelab lab check {lab.number}")


@app.command()
def check(name: Name = None, device: Device = "cpu") -> None:
    """Run your train.py, measure it, and say what is still wrong."""
    lab = _lab(name)
    device = labs.resolved(device, lab)
    where = "" if device == "cpu" else f" on {device}"
    task = f"lab {lab.number}: running labs/{lab.name}/train.py in {lab.era}{where}"
    task += "; most take 10 to 30 seconds, those under ZeRO-3 one or two minutes"
    if not console.is_interactive:  # where a line cannot be drawn again
        console.out(task)
    with console.status(task) if console.is_interactive else contextlib.nullcontext():
        row = lab_work.keep_result(lab, labs.check(lab, device=device))
    _show(lab, row)
    raise typer.Exit(outcomes.exit_status([row.result]))


@app.command()
def hint(name: Name = None) -> None:
    """Show the next hint, below those that you have read; there are three, each says more."""
    lab = _lab(name)
    console.print(" ".join(lab.symptom.split()), style="italic")
    for number, text in enumerate(lab_work.hint(lab), start=1):
        console.print(f"Hint {number} of {len(lab.hints)} for lab {lab.number}", style="bold")
        console.print(Markdown(text))


@app.command()
def solution(
    name: OneName, yes: Annotated[bool, typer.Option("--yes", help="Also if the lab is not solved yet.")] = False
) -> None:
    """Show what the solution changes, and why."""
    lab = _lab(name)
    for line in lab_work.solution(lab, asked=yes).splitlines():
        # Not wrapped, so that it can be copied.
        console.print(Text(line, _DIFF.get(line[:1], "")), soft_wrap=True)
    _print_path("The whole script: ", lab_work.write(lab, lab.solution))


@app.command("open")
def open_script(
    name: Name = None,
    wrong_fix: Annotated[
        str, typer.Option(help="Instead: a repair that people try and that does not heal, written whole to be run.")
    ] = "",
) -> None:
    """Print the path of your train.py, which is made if it is not there yet."""
    lab = _lab(name)
    path = lab_work.write(lab, lab_work.find_wrong_fix(lab, wrong_fix)) if wrong_fix else lab_files.learner_script(lab)
    _print_path("", path)


@app.command()
def reset(name: OneName) -> None:
    """Make train.py as it was at first; what you wrote is kept beside it."""
    lab = _lab(name)
    kept = lab_work.reset(lab)
    where = f"Yours is kept in labs/{lab.name}/{kept.name}." if kept else "It was unchanged."
    console.print(f"labs/{lab.name}/train.py is as it was at first. {where}")


@app.command()
def report(
    paths: Annotated[list[pathlib.Path], typer.Argument(help="Learners' labs.json files, or folders of them.")],
) -> None:
    """Merge learners' state files: who solved what, with how many hints and wrong fixes, in how many minutes."""
    merged = lab_report.merge(paths)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("lab", "solved", "hints: learners", "checks", "minutes", "wrong fixes: learners"):
        table.add_column(head, overflow="fold")
    for lab in merged.labs:
        hints = "\n".join(f"{count}: {learners}" for count, learners in lab.hints.items()) or "-"
        tried = "\n".join(f"{fix}: {count}" for fix, count in lab.wrong_fixes.items()) or "-"
        medians = ["-" if value is None else f"{value:g}" for value in (lab.checks, lab.minutes)]
        seen = f"\n{lab.with_solution} saw solution" if lab.with_solution else ""
        table.add_row(lab.lab, f"{lab.solved} of {lab.learners}{seen}", hints, *medians, tried)
    console.print(table)
    console.print(f"{merged.files} learners; labs that none of them touched are left out.")
    console.print("Hints, checks and minutes are of those who solved the lab; checks and minutes are medians.")
    for reason in merged.left_out:
        print(f"LEFT OUT {reason}", file=sys.stderr)
    raise typer.Exit(1 if merged.left_out else 0)


def _print_path(text: str, path: pathlib.Path) -> None:
    """Print a path as it is seen from the course's folder, unbroken, so that it can be copied."""
    console.print(Text(f"{text}{path.relative_to(eras.root())}"), soft_wrap=True)


def _lab(name: str | None) -> labs.Lab:
    if name is None:
        return lab_work.next_lab(lab_state.read(lab_state.default_path()))
    return labs.find([name])[0]


def _show(lab: labs.Lab, row: labs.ScriptOutcome) -> None:
    console.print(Text.assemble((row.result, outcomes.STYLES[row.result]), f" lab {lab.number}: {row.reason}"))
    if row.traceback:
        console.print(row.traceback.rstrip(), style="dim", markup=False)
    if row.result == labs.PASS:
        state = lab_state.read(lab_state.default_path())
        is_last = all(state.get(name, lab_state.Progress()).solved for name in labs.known())
        console.print(f"Compare with the solution: failurelab lab solution {lab.number}")
        following = "" if is_last else lab_work.next_lab(state, after=lab.name).number
        console.print(f"Next: lab {following}" if following else "That was the last: all labs are solved.")
    elif row.result == labs.FAIL:
        console.print(f"Stuck? failurelab lab hint {lab.number}", style="dim")
    elif row.result == labs.ENVIRONMENT:
        console.print(_DOCTOR)
