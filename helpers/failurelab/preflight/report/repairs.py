"""Repairs as a diff of the script's own lines: something said before training, an argument taken out or changed."""

import ast
import difflib

from failurelab.preflight.inputs import Seen


def before_training(seen: Seen, statement: str, sentence: str, possible: bool = True) -> str:
    """Return a diff that says `statement` before training begins, or `sentence` where the script is not the place.

    Args:
        seen: with the script and the line that begins training.
        statement: with `{trainer}` for the script's own name of it.
        sentence: for a reader who finds the place.
        possible: whether the statement would hold for this trainer.
    """
    call = _training_call(seen) if possible else None
    if call is None:
        return sentence
    lines = seen.source.text.splitlines()
    place = call.lineno - 1
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    if lines[place].lstrip() and not lines[place].lstrip().startswith(ast.unparse(call.func)[:3]):
        return sentence  # the call is a part of a longer statement
    return diff(seen, [*lines[:place], indent + statement.format(trainer=ast.unparse(call.func.value)), *lines[place:]])


def without_argument(seen: Seen, name: str, sentence: str) -> str:
    """Return a diff without the keyword argument `name`, where the script says it once, in one line."""
    keywords = _keywords(seen, name)
    if len(keywords) != 1 or keywords[0].value.end_lineno != keywords[0].lineno:
        return sentence
    keyword = keywords[0]
    lines = seen.source.text.splitlines()
    place = keyword.lineno - 1
    line = lines[place]
    before, after = line[: keyword.col_offset], line[keyword.value.end_col_offset :]
    if not before.strip() and after.strip() in (",", ""):
        return diff(seen, lines[:place] + lines[place + 1 :])
    if after.lstrip().startswith(","):
        after = after.lstrip()[1:].lstrip()
    else:
        before = before.rstrip().removesuffix(",")
    return diff(seen, [*lines[:place], before + after, *lines[place + 1 :]])


def diff(seen: Seen, lines: list[str]) -> str:
    """Return a unified diff from the script to these lines."""
    path = seen.source.path
    changes = difflib.unified_diff(seen.source.text.splitlines(), lines, path, path, n=1, lineterm="")
    return "\n".join(changes)


def _training_call(seen: Seen) -> ast.Call | None:
    tree = _tree(seen)
    if tree is None or not seen.source.line:
        return None
    for node in ast.walk(tree):
        method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "train"
        if method and node.lineno <= seen.source.line <= node.end_lineno and not isinstance(node.func.value, ast.Call):
            return node
    return None


def _keywords(seen: Seen, name: str) -> list[ast.keyword]:
    tree = _tree(seen)
    return [] if tree is None else [
        node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == name
    ]  # fmt: skip


def _tree(seen: Seen) -> ast.Module | None:
    try:
        return ast.parse(seen.source.text) if seen.source else None
    except SyntaxError:
        return None
