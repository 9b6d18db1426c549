"""Notebook 08 says that its script is that of lab 19: the same adapter and options, so one can go to the other."""

import ast
import pathlib

from failurelab_course import eras
from failurelab_course.runs import notebooks as course
from failurelab_course.runs import stored


def read_calls(source: str) -> dict[str, dict[str, str]]:
    """Return the keyword arguments of the script's configs, as they are written."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    wanted = ("GRPOConfig", "LoraConfig", "BitsAndBytesConfig")
    return {
        ast.unparse(call.func): {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        for call in calls
        if ast.unparse(call.func) in wanted
    }


def test_the_script_of_notebook_08_is_that_of_lab_19():
    """The folder aside, and what a GPU is called."""
    (notebook,) = course.find(["08"])
    (cell,) = [cell.source for cell in notebook.code if "script" in stored.tags(cell)]
    (lab,) = pathlib.Path(eras.root(), "labs").glob("19_*/start.py")
    ours, theirs = read_calls(cell.partition("\n")[2]), read_calls(lab.read_text(encoding="utf-8"))
    for calls in (ours, theirs):
        for name in ("output_dir", "use_cpu"):
            calls["GRPOConfig"].pop(name)
    assert ours == theirs
