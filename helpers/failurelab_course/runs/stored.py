"""The one form in which a notebook is stored in git, and what can be read from it without running it.

JupyterLab and papermill write into a notebook what differs from run to run: timings, the interpreter's version, paths.
A file in that form changes with each run, and a review cannot see what a change means. `normalise` leaves only what a
reader and nbval need, so that making the outputs again gives the same file.
"""

import ast
import itertools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import nbformat

CHECKED = "nbval-check-output"
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# Without the interpreter's version, which differs from machine to machine.
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}


def read(path: pathlib.Path) -> Any:
    """Read a notebook.

    Raises:
        ValueError: the file is missing, or holds no notebook of format 4; the message is one line.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("nbformat") != 4:
            raise ValueError("it says no nbformat 4")
        notebook = nbformat.from_dict(content)
        nbformat.validate(notebook)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise ValueError(f"{path.name} is no notebook: {str(error).strip().splitlines()[0]}") from error
    return nbformat.reads(json.dumps(content), as_version=4)


def tags(cell: Any) -> list[str]:
    """Return a cell's tags."""
    return list(cell.metadata.get("tags", []))


def output_texts(output: Any) -> Iterator[str]:
    """Yield the texts of one output, as a reader sees them."""
    if output.output_type == "stream":
        yield output.text
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield re.sub(r"<style.*?</style>|<[^>]*>", " ", data, flags=re.DOTALL) if kind == "text/html" else data


def declared_parameters(source: str) -> dict[str, Any]:
    """Return the names that a parameters cell assigns, with their values; only literals count.

    Raises:
        SyntaxError: the cell is no Python.
    """
    found = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in targets:
                if isinstance(target, ast.Name):
                    try:
                        found[target.id] = ast.literal_eval(node.value)
                    except ValueError:
                        continue
    return found


def is_folded(cell: Any) -> bool:
    """Whether JupyterLab shows a code cell's source folded: what is no part of the story."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def checked_cells(notebook: Any) -> list[tuple[int, Any]]:
    """Return the code cells whose stored output nbval compares, each with its place."""
    return [
        (number, cell)
        for number, cell in enumerate(notebook.cells, 1)
        if cell.cell_type == "code" and CHECKED in tags(cell)
    ]


def normalise(notebook: Any) -> Any:
    """Return a copy in the one form that is stored: without what differs from run to run or machine to machine.

    Cells, sources, ids, tags, slide types, folds and outputs stay. papermill's metadata, its injected cell, timings,
    the interpreter's version and all output metadata but alt texts go; cells are numbered; adjacent streams are one.
    """
    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE})
    notebook.nbformat, notebook.nbformat_minor = 4, 5  # the first with cell ids
    injected = {"injected-parameters", "papermill-error-cell-tag"}
    notebook.cells = [cell for cell in notebook.cells if not injected & set(tags(cell))]
    numbers = itertools.count(1)
    for cell in notebook.cells:
        kept = {name: cell.metadata[name] for name in ("slideshow", "tags") if cell.metadata.get(name)}
        folded = cell.metadata.get("jupyter", {})
        folded = {name: True for name in ("source_hidden", "outputs_hidden") if folded.get(name)}
        kept |= {"jupyter": folded} if folded else {}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type != "code":
            continue
        if cell.execution_count is not None:
            cell.execution_count = next(numbers)
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
            if "metadata" in output:
                alts = {k: {"alt": v["alt"]} for k, v in output.metadata.items() if isinstance(v, dict) and "alt" in v}
                output.metadata = nbformat.from_dict(alts)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Join adjacent pieces of one stream: where a kernel cuts it depends on the clock."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last and last.output_type == "stream" and last.name == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def text(notebook: Any) -> str:
    """Return the notebook as it is written to a file."""
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"
