"""A notebook's file: read, written, and what can be said of its cells without running them."""

import ast
import pathlib
import re
from typing import Any

import nbformat

CHECKED = "nbval-check-output"
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def read(path: pathlib.Path) -> Any:
    """Read a notebook.

    Raises:
        ValueError: the file is missing, or holds no notebook of format 4; the message is one line.
    """
    try:
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook, version=4)
    except Exception as error:  # nbformat has several of its own, and meets AttributeError in what is no notebook
        raise ValueError(f"{path.name} is no notebook: {(str(error).strip().splitlines() or [''])[0]}") from error
    return notebook


def write_text(notebook: Any) -> str:
    """Return the notebook as it is written to a file."""
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"


def tags(cell: Any) -> list[str]:
    """Return a cell's tags."""
    return list(cell.metadata.get("tags", []))


def script(notebook: Any) -> tuple[str, str]:
    """Return the reader's script: the first era that it names (empty if none), and its source without that line.

    It is the cell tagged `script`. Where this only defines `train`, so that several eras can take it, the code cell
    after it runs it, and belongs to the script. A `%%writefile` line is none of it.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (place,) = [place for place, cell in enumerate(code) if "script" in tags(cell)]
    head, _, body = code[place].source.partition("\n")
    if head.startswith("%%writefile "):
        return "", body
    if not head.startswith("%%era "):
        return "", code[place].source
    if body.startswith("%%writefile "):
        body = body.partition("\n")[2]
    if "def train(" in body and not re.search(r"^ *(\w+ = )?train\(", body, re.MULTILINE):
        body += "\n" + code[place + 1].source.partition("\n")[2]
    return head.split()[1].split(",")[0], body


def is_folded(cell: Any) -> bool:
    """Whether JupyterLab shows a code cell's source folded: what is no part of the story."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def declared_parameters(notebook: Any) -> dict[str, Any]:
    """Return the names that the cell tagged `parameters` assigns, with their values: literals.

    Raises:
        SyntaxError: the cell is no Python.
        ValueError: a value is no literal.
    """
    source = next((cell.source for cell in notebook.cells if "parameters" in tags(cell)), "")
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return {target.id: ast.literal_eval(node.value) for node in assigned for target in node.targets}
