"""Run notebooks on the CPU tier and store their outputs: python -m tools.store_outputs [--seconds] [NAME...]

JupyterLab and papermill write into a notebook what differs from run to run: timings, the interpreter's version, paths.
A review cannot see what a change means in such a file. `normalise` leaves only what a reader and nbval need, so that
making the outputs again gives the same file.

With `--seconds` each is run alone, and how long it took is written into its first cell, by which a reader plans: ask on
a machine that has nothing else to do.
"""

import itertools
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

import nbformat
from tools.site_pages import OPENING

from failurelab_course import state_file
from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import runs, stored

# Without the interpreter's version, which differs from machine to machine.
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}


def normalise(notebook: Any) -> Any:
    """Return a copy in the one form that is stored: without what differs from run to run or machine to machine.

    Cells, sources, ids, tags, slide types, folds and outputs stay. papermill's metadata, its injected cell, timings,
    the interpreter's version and all output metadata but alt texts go; cells are numbered; adjacent streams are one.
    """
    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    notebook.metadata = nbformat.from_dict({"kernelspec": stored.KERNELSPEC, "language_info": LANGUAGE})
    notebook.nbformat, notebook.nbformat_minor = 4, 5  # the first with cell ids
    injected = {"injected-parameters", "papermill-error-cell-tag"}
    notebook.cells = [cell for cell in notebook.cells if not injected & set(stored.tags(cell))]
    numbers = itertools.count(1)
    for cell in notebook.cells:
        folded = {
            name: True for name in ("source_hidden", "outputs_hidden") if cell.metadata.get("jupyter", {}).get(name)
        }
        kept = {name: cell.metadata[name] for name in ("slideshow", "tags") if cell.metadata.get(name)}
        cell.metadata = nbformat.from_dict(kept | ({"jupyter": folded} if folded else {}))
        if cell.cell_type != "code":
            continue
        if cell.execution_count is not None:
            cell.execution_count = next(numbers)
        cell.outputs = _join_streams(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
            if "metadata" in output:
                alts = {k: {"alt": v["alt"]} for k, v in output.metadata.items() if isinstance(v, dict) and "alt" in v}
                output.metadata = nbformat.from_dict(alts)
    return notebook


def _join_streams(outputs: list[Any]) -> list[Any]:
    """Join adjacent pieces of one stream: where a kernel cuts it depends on the clock."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last and last.output_type == "stream" and last.name == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def write_seconds(opening: str, seconds: float) -> str:
    """Return a notebook's first cell with the seconds that a run took, rounded up to five."""
    start, end = OPENING.search(opening).span("runs")
    return f"{opening[:start]}{-int(-seconds // 5) * 5} seconds{opening[end:]}"


def store(
    names: Iterable[str] = (), *, folder: pathlib.Path | None = None, timed: bool = False, **options: Any
) -> dict[str, str]:
    """Run notebooks, and write the outputs of each into its file if it passed and nobody changed it meanwhile.

    Args:
        names: numbers or names; all when none is given.
        folder: where the notebooks are, if not in the course.
        timed: whether each is run alone, and says in its first cell how long that took.
        options: as for `runs.run`.

    Returns:
        By name, why a notebook was not written; empty for one that was.
    """
    chosen = {notebook.name: notebook.path for notebook in course.find(names, folder)}
    before = {name: path.read_bytes() for name, path in chosen.items()}
    problems = {}
    for result in runs.run(list(chosen), folder=folder, **options, **({"jobs": 1} if timed else {})):
        path, problems[result.name] = chosen[result.name], ""
        if result.status != "PASS":
            problems[result.name] = f"{result.status}: {result.reason}"
        elif path.read_bytes() != before[result.name]:
            problems[result.name] = "it was changed while it ran, so it was not written; run it again"
        else:
            content = normalise(stored.read(result.copy))
            if timed:
                content.cells[0].source = write_seconds(content.cells[0].source, result.seconds)
            text = stored.write_text(content)
            if text.encode() != before[result.name]:
                state_file.write(path, text)
    return problems


def main(words: list[str]) -> int:
    """Store the outputs of the named notebooks, of all without a name; return 1 if any was not written."""
    names = [word for word in words if word != "--seconds"]
    problems = {name: problem for name, problem in store(names, timed=names != words).items() if problem}
    for name, problem in problems.items():
        print(f"{name}: not stored. {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
