#!/usr/bin/env python3
"""Which name do released versions of transformers know for "only the last rows of logits", and what of the other name?

Downloads the wheels into a temporary folder (10 to 12 MB each), reads `Qwen2ForCausalLM.forward` in them without
importing anything, and prints a table. Then one step of GRPO is run with trl 0.14.0 and with trl 0.15.2 in each release
of RUN, put before the era's own on the path: how many rows of logits are made and needed, and how far on the token
stands that a row was scored against (0 is the next one, which is right). It needs a package index, and is the only
benchmark that does.

Eras: today.
"""

import ast
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import frames
import recording
from packaging.version import Version

from failurelab_course import eras
from failurelab_course.eras import install
from failurelab_course.experiments import observe

VERSIONS = ("4.45.2", "4.46.3", "4.48.3", "4.49.0", "4.50.3", "4.51.3", "4.52.4", "4.57.6", "5.24.0")
RUN = {  # TRL 0.15.2 does not train with 4.52: a TypeError of its sampler
    "trl-0.14": ("4.48.3", "4.49.0", "4.50.3", "4.51.3", "4.52.4"),
    "trl-0.15": ("4.48.3", "4.49.0", "4.50.3", "4.51.3"),
}
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


def step() -> None:
    """Train one step in this process's stack, and print what LogitsGuard saw of it as JSON."""
    from failurelab import guards
    from failurelab_course.experiments import models, trainers

    observe.quiet()
    guard = guards.LogitsGuard(action="warn")
    rows = models.equal_length_rows(models.rows(), 4)
    trainers.grpo(*models.load(), steps=1, rows=rows, callbacks=[guard]).train()
    report = guard.report
    # The guard counts from the first row that was used, and that stands so many places too early.
    print(json.dumps([report.made, report.needed - (report.shift or 0), report.shift]))


def run(era: str, package: Path) -> list[int]:
    """Run `step` in an era, with the transformers of a folder in the place of the era's own."""
    paths = [str(package), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {paths}; import signatures; signatures.step()"
    done = eras.run(eras.find(era), ["-W", "ignore", "-c", code], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{era} with {package.name} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def table_names(folder: pathlib.Path) -> str:
    """What each transformers calls the argument for the last rows of logits, and what it does with the other name."""
    (figures,) = [each for each in frames.read_runs(folder, "signatures")["figures"] if "takes" in each]
    lines = zip(*(figures[column] for column in ("transformers", "takes", "other_name")))
    return frames.markdown(["transformers", "Qwen2 takes", "the other name is"], frames.fold(lines))


def main() -> None:
    """Read the versions of the story, and run those that it turns on."""
    recording.begin(__doc__)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            with zipfile.ZipFile(download(version, folder)) as wheel:
                rows.append((version, *judge(version, forward_of(wheel.read(SOURCE).decode()))))
                if any(version in versions for versions in RUN.values()):
                    wheel.extractall(Path(folder, version))
        for era, versions in RUN.items():
            made, needed, shift = zip(*(run(era, Path(folder, version)) for version in versions))
            print(f"\n{era}: rows made {made}, needed {needed}, scored against the token further on by {shift}")
            observe.record(
                "F3b",
                "measured",
                {"transformers": versions, "made": made, "needed": needed, "shift": shift},
                case=f"a step of {era}",
            )
    print("| transformers | Qwen2 takes | the other name |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    names, takes, others = (list(column) for column in zip(*rows))
    observe.record(
        "F3a",
        "measured",
        {"transformers": names, "takes": takes, "other_name": others},
        case="read in wheels",
    )


if __name__ == "__main__":
    main()
