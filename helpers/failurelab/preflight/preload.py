"""What a run imports, imported once for all runs of a script: before its first statement, and by its first ones.

A run is forked from a process that has them, and answers as a process of its own does (`tests/cli/test_preflight.py`).
So of the script's imports only those count that nothing of its own precedes: a variable of the environment that it sets
first may change what an import does.
"""

import ast
import contextlib
import importlib
import sys
from collections.abc import Iterator

from failurelab.preflight.script_text import read_source

_LIBRARIES = frozenset((
    "accelerate", "datasets", "evaluate", "huggingface_hub", "numpy", "pandas", "peft", "rich", "safetensors", "torch",
    "tokenizers", "tqdm", "transformers", "trl", "yaml",
))  # fmt: skip
_BEFORE_ANY_SCRIPT = {  # what `Run.watching` imports; of preflight's own modules also those that come later
    "transformers": ["AutoTokenizer", "BitsAndBytesConfig", "PreTrainedTokenizerBase", "Trainer"],
    "peft": ["PeftModel"],
    **{f"failurelab.preflight.{name}": [] for name in ("run", "intercept.saved", "intercept.watched", "judges.order")},
}


def preload(script: str) -> None:
    """Import what every run needs, and the libraries that a script begins with, names of lazy modules too.

    An error is left to the script.
    """
    for module, names in _BEFORE_ANY_SCRIPT.items():
        _import(module, names)
    with contextlib.suppress(Exception):
        tree = ast.parse(read_source(script))
        for module, names in leading_imports(tree):
            _import(module, names)
    sys.stdout.flush()


def leading_imports(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that a script imports of these libraries, and names from them, before any other statement."""
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Import):
            modules = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [(node.module, [alias.name for alias in node.names])]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.decorator_list:
            continue  # it is only defined
        else:
            return
        for module, names in modules:
            root = module.partition(".")[0]
            if root in _LIBRARIES:
                yield module, names
            elif root not in sys.stdlib_module_names:
                return  # a module of the script's own may do anything


def _import(module: str, names: list[str]) -> None:
    with contextlib.suppress(Exception):
        loaded = importlib.import_module(module)
        for name in names:
            getattr(loaded, name, None)
