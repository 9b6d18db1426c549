"""The command `failurelab lab`, and the magic `%lab`, which is the same command in a notebook's cell."""

import json
import pathlib
import shlex
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from . import check_client, eras, lab_report, lab_state, lab_work, labs

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The exercises: repair a broken training script.")
console = Console(highlight=False)
_STYLES = {labs.PASS: "bold green", labs.FAIL: "bold red", labs.ENVIRONMENT: "bold yellow"}
# Where a learner looks for the next step of a check that could not be asked.
_DOCTOR = "Next: failurelab doctor"

Name = Annotated[str | None, typer.Argument(help="Number or name; the first that is not solved without.")]
OneName = Annotated[str, typer.Argument(help="Number or name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_labs(as_json: Json = False) -> None:
    """List the labs, and how far you are."""
    state = lab_state.read(lab_state.default_path())
    found = labs.find()
    rows = [(lab, state.get(lab.name, lab_state.Progress())) for lab in found]
    if as_json:
        listed = [
            {"lab": lab.name, "title": lab.title, "failures": lab.failures, "state": progress.words}
            for lab, progress in rows
        ]
        print(json.dumps({"schema": 1, "labs": listed}, indent=1))
        return
    table = Table("lab", "title", "difficulty", "minutes", "state", "hints")
    for lab, progress in rows:
        style = "green" if progress.solved else ""
        hints = f"{progress.hints} of {len(lab.hints)}" if progress.hints else "-"
        state_text = Text(progress.words, style)
        table.add_row(lab.number, lab.title, lab.difficulty, str(lab.minutes), state_text, hints)
    console.print(table)
    solved = sum(bool(progress.solved) for _, progress in rows)
    console.print(f"{solved} of {len(rows)} solved.", style="bold")
    if solved < len(rows):
        lab = lab_work.next_lab(state)
        console.print(f"Next: edit labs/{lab.name}/train.py, then failurelab lab check {lab.number}")


@app.command()
def check(name: Name = None, as_json: Json = False) -> None:
    """Run your train.py, measure it, and say what is still wrong."""
    lab = _lab(name)
    say = sys.stderr.write if as_json else console.out
    say(f"lab {lab.number}: running labs/{lab.name}/train.py in {lab.era}; this takes some seconds ...\n".rstrip("\n"))
    row = lab_work.check(lab)
    if as_json:
        print(json.dumps(labs.to_json([row]), indent=1))
    else:
        _show(lab, row)
    raise typer.Exit(lab_work.exit_status(row))


@app.command()
def hint(
    name: Name = None, again: Annotated[bool, typer.Option("--again", help="Those that you have read.")] = False
) -> None:
    """Show the next hint; there are three, each says more."""
    lab = _lab(name)
    shown = lab_work.hint(lab, again=again)
    for number, text in shown:
        console.print(f"Hint {number} of {len(lab.hints)} for lab {lab.number}", style="bold")
        console.print(Markdown(text))
    if not shown:
        console.print(f"No hint was read yet. Next: failurelab lab hint {lab.number}")


@app.command()
def solution(
    name: OneName, yes: Annotated[bool, typer.Option("--yes", help="Also if the lab is not solved yet.")] = False
) -> None:
    """Show what the solution changes, and why."""
    lab = _lab(name)
    console.print(Syntax(lab_work.solution(lab, asked=yes), "diff", word_wrap=True, background_color="default"))
    console.print(f"The whole script: labs/{lab.name}/solution.py")


@app.command()
def reset(name: OneName) -> None:
    """Make train.py as it was at first; what you wrote is kept beside it."""
    lab = _lab(name)
    kept = lab_work.reset(lab)
    where = f"Yours is kept in labs/{lab.name}/{kept.name}." if kept else "It was unchanged."
    console.print(f"labs/{lab.name}/train.py is as it was at first. {where}")


@app.command()
def watch(name: Name = None) -> None:
    """Check train.py each time you save it, until it passes."""
    lab = _lab(name)
    try:
        for row in lab_work.watch(lab, say=console.out):
            _show(lab, row)
    except KeyboardInterrupt:
        console.print("The watch ended; your script is as you saved it.")
        raise typer.Exit(1) from None
    except check_client.EnvironmentBroken as error:
        console.print(f"{labs.ENVIRONMENT} {error} {_DOCTOR}", style=_STYLES[labs.ENVIRONMENT])
        raise typer.Exit(3) from None


@app.command()
def report(
    paths: Annotated[list[pathlib.Path], typer.Argument(help="Learners' labs.json files, or folders of them.")],
    as_json: Json = False,
) -> None:
    """Merge learners' state files: who solved what, with how many hints and wrong fixes, in how many minutes."""
    found = lab_report.merge(paths)
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        table = Table("lab", "solved", "hints read: learners", "wrong fixes tried", "checks", "minutes")
        for each in found.labs:
            hints = ", ".join(f"{count}: {learners}" for count, learners in each.hints.items()) or "-"
            tried = ", ".join(f"{fix} ({count})" for fix, count in each.wrong_fixes.items()) or "-"
            medians = ["-" if value is None else f"{value:g}" for value in (each.checks, each.minutes)]
            table.add_row(each.lab, f"{each.solved} of {each.learners}", hints, tried, *medians)
        console.print(table)
        console.print(f"{found.files} learners; checks and minutes are medians of those who solved the lab.")
    for reason in found.left_out:
        print(f"LEFT OUT {reason}", file=sys.stderr)
    raise typer.Exit(1 if found.left_out else 0)


def _lab(name: str | None) -> labs.Lab:
    if name is None:
        return lab_work.next_lab(lab_state.read(lab_state.default_path()))
    return labs.find([name])[0]


def _show(lab: labs.Lab, row: labs.Row) -> None:
    console.print(Text.assemble((row.result, _STYLES.get(row.result, "bold")), f" lab {lab.number}: {row.reason}"))
    if row.traceback:
        console.print(row.traceback.rstrip(), style="dim", markup=False)
    if row.result == labs.PASS:
        state = lab_state.read(lab_state.default_path())
        left = [each for each in labs.known() if not state.get(each, lab_state.Progress()).solved]
        console.print(f"Compare with the solution: failurelab lab solution {lab.number}")
        console.print(f"Next: lab {left[0][:2]}" if left else "That was the last: all labs are solved.")
    elif row.result == labs.FAIL:
        console.print(f"Stuck? failurelab lab hint {lab.number}", style="dim")
    else:
        console.print(_DOCTOR)


def lab_magic(line: str) -> None:
    """Run `failurelab lab` in a cell: `%lab check 03`."""
    words = shlex.split(line)
    if words[:1] == ["watch"]:
        print("A watch would hold this notebook. Next: save train.py and run %lab check, or watch in a terminal")
        return
    try:
        app(words, prog_name="%lab", standalone_mode=False)
    except typer.Exit:
        pass  # the verdict was printed; a cell has no exit status
    except (labs.LabError, lab_state.StateError, eras.EraError) as error:
        print(f"ERROR {error}")
    except Exception as error:
        if not hasattr(error, "format_message"):  # of a wrong call, as click says it
            raise
        print(f"ERROR {error.format_message()} Next: %lab --help")


def load_ipython_extension(shell) -> None:
    """Register `%lab`, at `%load_ext failurelab`."""
    shell.register_magic_function(lab_magic, "line", "lab")
