"""What a reward function says of itself: name, the columns that it asks for, texts, whether it reads a completion."""

import ast
import contextlib
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

_STANDARD = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_USUAL = ("answer", "answers", "solution", "ground_truth", "label", "labels", "target", "reference", "expected")
REFERENCES = (*_USUAL, "gold", "final_answer", "correct_answer", "output", "response", "completion")


def key_of(functions: Sequence[Any], place: int) -> str:
    """Return the stable key of one of a trainer's reward functions: `reward_funcs[1] length_reward`."""
    function = functions[place]
    while isinstance(function, functools.partial):
        function = function.func
    return f"reward_funcs[{place}] {getattr(function, '__name__', type(function).__name__)}"


def weights_of(trainer: Any, count: int) -> list[float]:
    """Return the weight of each of a trainer's `count` reward functions."""
    weights = getattr(trainer, "reward_weights", None)
    return [1.0] * count if weights is None else [float(weight) for weight in weights]


def reference_column(rows: Sequence[Mapping[str, Any]], asked: Sequence[str] = ()) -> str | None:
    """Return the column with the reference answers: one that the reward functions ask for, else by its name."""
    columns = [name for name in rows[0] if name != "prompt"] if rows else []
    known = [name for name in REFERENCES if name in columns]
    wanted = [name for name in known if name in asked] or [
        name for name in columns if name in asked and isinstance(rows[0][name], (str, int, float))
    ]
    return next(iter(wanted or known), None)


def parameters(function: Callable[..., Any], follow_wrapped: bool = True) -> list[inspect.Parameter]:
    """Return the parameters of a function; none where it does not tell them.

    Args:
        function: of a decorated one, those of the function in the decorator.
        follow_wrapped: False for those of the decorator.
    """
    try:
        return list(inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values())
    except (TypeError, ValueError):
        return []


def asked_columns(function: Callable[..., Any]) -> list[str]:
    """Return the columns that a function asks for: its arguments, and the keys that it takes of its **kwargs."""
    return [name for name in _asked(function) if name not in _STANDARD]


def asks_for(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function asks for this argument, by its name or as a key of its **kwargs."""
    return name in _asked(function)


def _asked(function: Callable[..., Any]) -> list[str]:
    known = parameters(function)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [each.name for each in known if each.kind in kinds]
    rest = next((each.name for each in known if each.kind is each.VAR_KEYWORD), None)
    tree = parse(function)
    for node in ast.walk(tree) if tree is not None and rest else ():
        key = None
        if isinstance(node, ast.Subscript) and _is_name(node.value, rest):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            key = node.args[0] if node.args and _is_name(node.func.value, rest) else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            names.append(key.value)
    return list(dict.fromkeys(names))


def reads_completions(function: Callable[..., Any]) -> bool:
    """Return whether a function may read a completion: counting them, or asking for their type, does not count."""
    tree = parse(function)
    if tree is None:
        return True
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    typed = {call.args[0] for call in calls if _is_name(call.func, ("isinstance", "type"))}
    counted = {call.args[0] for call in calls if _is_name(call.func, "len")}
    unread = set()
    for node in ast.walk(tree):
        iterated = node.generators if isinstance(node, (ast.ListComp, ast.GeneratorExp)) else ()
        for loop in (node,) if isinstance(node, ast.For) else iterated:
            target = getattr(loop.target, "id", None)
            used = [
                node
                for node in ast.walk(tree)
                if _is_name(node, target) and isinstance(node.ctx, ast.Load) and node not in typed
            ]
            if target and not used:
                unread.add(loop.iter)
    names = ("completions", "completion_ids", *_rest_name(tree))
    return any(
        _is_name(node, names) and isinstance(node.ctx, ast.Load) and node not in counted | unread
        for node in ast.walk(tree)
    )


def gives_constant(function: Callable[..., Any]) -> bool:
    """Return whether all rewards of a function are one number of its text, and nothing decides on another."""
    tree = parse(function)
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    decides = (ast.If, ast.IfExp, ast.Compare, ast.BoolOp, ast.Try, ast.While, ast.Match, ast.AugAssign, ast.Yield)
    if any(isinstance(node, decides) for node in nodes):
        return False
    given = [node.elt for node in nodes if isinstance(node, (ast.ListComp, ast.GeneratorExp))]
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            given += node.args
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List):
            given += node.left.elts
    values = [node.value if isinstance(node, ast.Constant) else None for node in given]
    return len(set(values)) == 1 and isinstance(values[0], (int, float))


def numbers(function: Callable[..., Any]) -> list[float]:
    """Return the numbers that stand in a function."""
    tree = parse(function)
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)] if tree is not None else []
    return [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def plain_function(function: Any) -> Any:
    """Return the Python function behind a partial, a decorator, a method, or an object that is called."""
    while hasattr(function, "__wrapped__") or hasattr(function, "func"):
        function = getattr(function, "__wrapped__", None) or function.func
    function = getattr(function, "__func__", function)
    return function if hasattr(function, "__code__") else inspect.getattr_static(type(function), "__call__", function)


def texts(function: Any) -> list[str]:
    """Return the texts and patterns that stand in a function, and in what it calls in its own module.

    What it says to people, or asks the system for, is left out: no completion is read by it.
    """
    constants, said, read = [], set[str](), set[str]()
    for code, values in _codes(function):
        constants += [*code.co_consts, *values]
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
            beside = {id(inner) for node in ast.walk(tree) for part in _said(node) for inner in ast.walk(part)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    (said if id(node) in beside else read).add(node.value)
    constants = [value.pattern if isinstance(value, re.Pattern) else value for value in constants]
    kept = (value for value in constants if isinstance(value, str) and value not in said - read)
    return list(dict.fromkeys(kept))


_SAYING = re.compile(
    r"(^|\.)(print|debug|info|warning|warn|error|exception|critical|log|write|writelines|getenv|open|strftime|strptime|"
    r"encode|decode|add_scalar|environ\.get|\w*(Error|Exception))$"
)


def _said(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that are said to people, or to the system."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if ast.get_docstring(node) is not None:
            yield node.body[0]
    elif isinstance(node, ast.Raise):
        yield node
    elif isinstance(node, ast.Assert) and node.msg is not None:
        yield node.msg
    elif isinstance(node, ast.Call) and _SAYING.search(ast.unparse(node.func)):
        yield from (*node.args, *node.keywords)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
        yield node.slice


def reads_json(function: Any) -> bool:
    """Return whether a function names `json`."""
    return any("json" in code.co_names for code, _ in _codes(function))


def _codes(function: Any, depth: int = 3) -> Iterator[tuple[types.CodeType, list[Any]]]:
    """Yield the code of a function, of what is defined in it, and of what it calls in its own module.

    Beside the code stand the values of the names that are from outside.
    """
    instance, function = function, plain_function(function)
    instance = getattr(instance, "__self__", instance)
    if not isinstance(function, types.FunctionType):
        return
    codes, values = [function.__code__], []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that nothing was put into yet
            values.append(cell.cell_contents)
    if instance is not function:
        values += vars(instance).values() if hasattr(instance, "__dict__") else ()
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        values += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        if instance is not function:
            own = (inspect.getattr_static(type(instance), name, None) for name in code.co_names)
            values += [value for value in own if isinstance(value, (types.FunctionType, re.Pattern, str))]
    yield codes[0], values
    for code in codes[1:]:
        yield code, []
    for value in values if depth else ():
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__ and value is not function:
            yield from _codes(value, depth - 1)


def parse(function: Callable[..., Any]) -> Any:
    """Return the syntax tree of a function; None where its source is not there, or is a part of a line."""
    function = plain_function(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if getattr(function, "__name__", "") == "<lambda>":
        return lambdas[0] if len(lambdas) == 1 else None  # which of a line's it is, nobody knows
    return next((node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))), None)


def _rest_name(tree: Any) -> tuple[str, ...]:
    """Return the name of **kwargs where the completions can only come by it, and of a first positional argument."""
    arguments = tree.args
    named = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return () if "completions" in named or arguments.kwarg is None else (arguments.kwarg.arg,)


def _is_name(node: Any, name: Any) -> TypeGuard[ast.Name]:
    names = name if isinstance(name, tuple) else (name,)
    return isinstance(node, ast.Name) and node.id in names
