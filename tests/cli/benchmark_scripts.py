"""Scripts of benchmarks/ as modules, for tests."""

import importlib.util
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str):
    """Import benchmarks/NAME.py, and what lies beside it, as it does when it is run."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
