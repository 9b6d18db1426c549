#!/usr/bin/env python3
"""Which name do released versions of transformers know for "only the last rows of logits", and what of the other name?

Downloads the wheels into a temporary folder (10 to 12 MB each), reads `Qwen2ForCausalLM.forward` in them without
importing anything, and prints a table. It needs a package index.

Eras: today.
"""

import ast
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import frames
import recording
from packaging.version import Version

from failurelab_course.eras import install
from failurelab_course.experiments import observe

VERSIONS = ("4.45.2", "4.46.3", "4.48.3", "4.49.0", "4.50.3", "4.51.3", "4.52.4", "4.57.6", "5.24.0")
NAMES = ("num_logits_to_keep", "logits_to_keep")
SOURCE = "transformers/models/qwen2/modeling_qwen2.py"


def download(version: str, folder: str) -> Path:
    """Fetch the wheel of one version, without what it depends on; end as NOT RUN where no index is reached."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", folder]
    done = subprocess.run([*command, f"transformers=={version}"], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        missing = "No module named pip" in done.stderr
        if missing or install.NO_NETWORK.search(done.stderr):
            recording.end_not_run("this Python has no pip" if missing else "no package index is reached")
        sys.exit(f"transformers {version} could not be fetched: {done.stderr.strip()}")
    return next(Path(folder).glob(f"transformers-{version}-*.whl"))


def forward_of(source: str) -> ast.FunctionDef:
    """Find Qwen2ForCausalLM.forward."""
    model = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "Qwen2ForCausalLM")
    return next(node for node in model.body if getattr(node, "name", "") == "forward")


def judge(version: str, forward: ast.FunctionDef) -> tuple[str, str]:
    """Return the name taken, and what becomes of the other: TypeError, renamed (with a warning or not) or swallowed."""
    taken = [argument.arg for argument in forward.args.args + forward.args.kwonlyargs if argument.arg in NAMES]
    if len(taken) != 1:
        return " and ".join(taken) or "neither", "?"
    other = next(name for name in NAMES if name != taken[0])
    for decorator in forward.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "deprecate_kwarg":
            first = decorator.args[0].value if decorator.args else None
            options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in decorator.keywords}
            if first == other and options.get("new_name") == taken[0]:
                # It warns before the version named there; from that version on it renames without a word.
                warns = Version(version) < Version(options["version"])
                return taken[0], "renamed, FutureWarning" if warns else "renamed, no warning"
    return taken[0], "swallowed" if forward.args.kwarg else "TypeError"


def table_names(folder: pathlib.Path) -> str:
    """What each transformers calls the argument for the last rows of logits, and what it does with the other name."""
    (figures,) = [each for each in frames.read_runs(folder, "signatures")["figures"] if "takes" in each]
    lines = zip(*(figures[column] for column in ("transformers", "takes", "other_name")))
    return frames.markdown(["transformers", "Qwen2 takes", "the other name is"], frames.fold(lines))


def main() -> None:
    """Read the versions of the story."""
    recording.begin(__doc__)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            with zipfile.ZipFile(download(version, folder)) as wheel:
                rows.append((version, *judge(version, forward_of(wheel.read(SOURCE).decode()))))
    print(frames.markdown(["transformers", "Qwen2 takes", "the other name"], rows))
    names, takes, others = (list(column) for column in zip(*rows))
    figures = {"transformers": names, "takes": takes, "other_name": others}
    observe.record("F3a", "measured", figures, case="read in wheels")


if __name__ == "__main__":
    main()
