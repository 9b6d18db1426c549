"""What a run imports, imported once for all runs of a script: before its first statement, and by its first ones.

A run is forked from a process that has them, and answers as a process of its own does (`tests/cli/test_preflight.py`).
So of the script's imports only those count that nothing of its own precedes: a variable of the environment that it sets
first may change what an import does.
"""

import ast
import contextlib
import importlib
import pathlib
import sys
from collections.abc import Generator

from failurelab.preflight.script_text import read_source

_LIBRARIES = frozenset((
    "accelerate", "datasets", "evaluate", "huggingface_hub", "numpy", "pandas", "peft", "rich", "safetensors", "torch",
    "tokenizers", "tqdm", "transformers", "trl", "yaml",
))  # fmt: skip
_BEFORE_ANY_SCRIPT = {  # what `Run.watching` imports; of preflight's own modules also those that come later
    "transformers": ["AutoTokenizer", "BitsAndBytesConfig", "PreTrainedTokenizerBase", "Trainer"],
    "peft": ["PeftModel"],
    **{f"failurelab.preflight.{name}": [] for name in ("run", "intercept.saved", "intercept.rewards", "judges.order")},
}


def preload(script: str, folder: str) -> None:
    """Import what every run needs, and the libraries that a script begins with, names of lazy modules too.

    Args:
        script: its path.
        folder: where its own modules are found.

    An error is left to the script.
    """
    for module, names in _BEFORE_ANY_SCRIPT.items():
        _import(module, names)
    with contextlib.suppress(Exception):
        for module, names in leading_imports(pathlib.Path(script), pathlib.Path(folder), set()):
            _import(module, names)
    sys.stdout.flush()


def leading_imports(
    file: pathlib.Path, folder: pathlib.Path, seen: set[pathlib.Path]
) -> Generator[tuple[str, list[str]], None, bool]:
    """Yield the modules that a script imports of these libraries, and names from them, before any other statement.

    The modules of its own that it imports are followed: what they import comes in its turn.

    Returns:
        Whether nothing but imports and definitions stands in the file, so that what comes behind it may count too.
    """
    seen.add(file)
    for node in ast.parse(read_source(str(file))).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Import):
            modules: list[tuple[str, list[str]]] = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [(node.module, [alias.name for alias in node.names])]
        elif _only_defines(node):
            continue
        else:
            return False
        for module, names in modules:
            root = module.partition(".")[0]
            if root in _LIBRARIES:
                yield module, names
            elif root not in sys.stdlib_module_names:
                own = own_files(module, names, folder)
                if not own:
                    return False  # another library may do anything
                for path in own:
                    if path not in seen and not (yield from leading_imports(path, folder, seen)):
                        return False
    return True


def _only_defines(node: ast.stmt) -> bool:
    """Return whether a function or class calls nothing, and sets nothing of others, when it is defined."""
    if isinstance(node, ast.FunctionDef):
        return not node.decorator_list and not _calls(node.args)
    if not isinstance(node, ast.ClassDef) or node.decorator_list:
        return False
    inert = (ast.Expr, ast.Pass, ast.AnnAssign)
    return all((isinstance(each, inert) and not _calls(each)) or _only_defines(each) for each in node.body)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(node))


def own_files(module: str, names: list[str], folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files in the script's folder that an import runs, in their order; a name may be a module too."""
    parts = module.split(".")
    paths = [folder.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    paths += [paths[-1] / name for name in names]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    return [file for file in files if file.is_file()]


def _import(module: str, names: list[str]) -> None:
    with contextlib.suppress(Exception):
        loaded = importlib.import_module(module)
        for name in names:
            getattr(loaded, name, None)
