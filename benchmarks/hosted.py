#!/usr/bin/env python3
"""Open notebooks alone, in a Python that stands for a hosted runtime's, and measure the way to their last cell.

    python benchmarks/hosted.py [--notebooks 00 01] [--cache FOLDER]    with a cache that is there: only from that

The stand-in has torch, ipykernel and pip, no uv, no git, no make, no clone and no ensurepip, and each notebook is a
lone file in an empty folder. The course comes as an archive of what is committed, as a repository's host gives it; the
libraries come from a package index: for each notebook into an empty cache, then from that cache. What only a real host
can tell is in docs/hosted.md.

Eras: today.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import frames
import jupyter_client.kernelspec
import nbformat
import papermill
import recording

from failurelab_course.eras import install, root
from failurelab_course.experiments import observe

NAMES = ["00", "01", "03", "07", "09"]
_KERNEL = "hosted"


def make_runtime(folder: pathlib.Path) -> pathlib.Path:
    """Make the stand-in for a hosted runtime's Python: torch, ipykernel and pip; return its interpreter."""
    python = folder / "python" / "bin" / "python"
    torch = next(line for line in (root() / "eras" / "torch.txt").read_text().splitlines() if line.startswith("torch"))
    environment = os.environ | {"UV_FIND_LINKS": install.find_links()}
    backend = [] if install.find_links() else ["--torch-backend=auto"]
    for line in (
        ["venv", "--python", sys.executable, str(folder / "python")],
        ["pip", "install", "--python", str(python), *backend, torch, "ipykernel", "pip"],
    ):
        subprocess.run([install.uv(), "--quiet", *line], env=environment, check=True)
    return python


def make_archive(folder: pathlib.Path) -> pathlib.Path:
    """Pack what is committed, as a repository's host gives it; return the archive."""
    archive = folder / "course.tar.gz"
    line = ["git", "-C", str(root()), "archive", "--prefix=grpo-failure-lab/", f"--output={archive}", "HEAD"]
    subprocess.run(line, check=True)
    return archive


def run(notebook: pathlib.Path, python: pathlib.Path, folder: pathlib.Path, variables: dict[str, str]) -> dict:
    """Run a copy of a notebook, alone in a folder; return its seconds to the last cell, and what went wrong."""
    folder.mkdir(parents=True)
    copy, content = folder / notebook.name, nbformat.read(notebook, 4)
    run_first = f"%run -n {root()}/tools/fetch_course.py\nfetch('{variables['FAILURELAB_COURSE']}')"
    content.cells.insert(1, nbformat.v4.new_code_cell(run_first))
    nbformat.write(content, copy)
    kernels = folder / "jupyter" / "kernels" / _KERNEL
    kernels.mkdir(parents=True)
    # The PATH has the system's programs, without those that a hosted runtime may lack.
    programs = folder / "programs"
    programs.mkdir()
    for name in (
        "sh",
        "bash",
        "env",
        "g++",
        "gcc",
        "cc",
        "c++",
        "as",
        "ld",
        "which",
        "uname",
        "ldconfig",
        "sort",
        "tail",
        "cat",
    ):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    spec = {
        "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "a hosted runtime",
        "language": "python",
        "env": variables
        | {"PATH": f"{python.parent}{os.pathsep}{programs}", "PYTHONPATH": "", "FAILURELAB_EVIDENCE": ""},
    }
    (kernels / "kernel.json").write_text(json.dumps(spec))
    started, error = time.monotonic(), ""
    kept = jupyter_client.kernelspec.KernelSpecManager.kernel_dirs
    jupyter_client.kernelspec.KernelSpecManager.kernel_dirs = [str(kernels.parent)]
    try:
        papermill.execute_notebook(
            str(copy), str(folder / "ran.ipynb"), kernel_name=_KERNEL, cwd=str(folder), progress_bar=False
        )
    except papermill.exceptions.PapermillExecutionError as raised:
        error = f"{raised.ename}: {raised.evalue}"[:300]
    finally:
        jupyter_client.kernelspec.KernelSpecManager.kernel_dirs = kept
    return {"seconds": round(time.monotonic() - started), "error": error}


def _size(folder: pathlib.Path) -> float:
    files = (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return round(sum(file.stat().st_size for file in files) / 1e9, 2)


def table_hosted(folder: pathlib.Path) -> str:
    """How long a notebook takes from a lone file and an empty cache to its last cell, and what is downloaded for it."""
    runs = frames.read_runs(folder, "hosted", r"(?P<notebook>\w+), empty cache")
    return "\n".join(
        f"- {name}: {frames.median(rows['seconds'], '.0f')} seconds, {frames.median(rows['downloaded_gb'])} GB"
        for name, rows in runs.groupby("notebook")
    )


def main() -> None:
    """Measure and record."""
    options = recording.begin(__doc__, notebooks={"nargs": "+", "default": NAMES}, cache=pathlib.Path())
    if options.device != "cpu":
        recording.end_not_run("the stand-in for a hosted runtime is measured on a CPU")
    with tempfile.TemporaryDirectory(prefix="hosted-", ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        course = make_archive(folder).as_uri()
        for wanted in options.notebooks:
            (notebook,) = (root() / "notebooks").glob(f"{wanted}_*.ipynb")
            given = options.cache != pathlib.Path()
            cache = options.cache if given else folder / f"cache-{wanted}"
            for state in ("warm",) if given else ("empty", "warm"):
                measure(notebook, state, course, cache, folder / f"runtime-{wanted}")
            if not given:
                shutil.rmtree(cache, ignore_errors=True)


def measure(notebook: pathlib.Path, state: str, course: str, cache: pathlib.Path, runtime: pathlib.Path) -> None:
    """Open a notebook alone in a new runtime, and record what came of it; a failure ends the benchmark."""
    python = make_runtime(runtime)
    variables = {
        "FAILURELAB_COURSE": course,
        "UV_CACHE_DIR": str(cache),
        "PIP_NO_CACHE_DIR": "1",
        "UV_FIND_LINKS": install.find_links(),
    }
    before = _size(cache) if cache.exists() else 0.0
    metrics = run(notebook, python, runtime / "opened", variables)
    metrics["downloaded_gb"] = round(_size(cache) - before, 2)
    shutil.rmtree(runtime, ignore_errors=True)
    print(notebook.stem, state, metrics, flush=True)
    if metrics["error"]:
        sys.exit(f"{notebook.stem} ended in {metrics['error']}")
    observe.record("ground", "measured", metrics, case=f"{notebook.stem}, {state} cache")


if __name__ == "__main__":
    main()
