"""All that has a GPU tier, on this machine's card, in parts of nine minutes that resume: `make gpu`, `make gpu PART=3`.

    make gpu NAME=h100 PYTHON=/path/to/python               in a Python with a CUDA torch: it needs no network
    make gpu NAME=h100 PYTHON=/path/to/python SITES=sites   the stacks too: sites/trl-0.14 and so on, sites/today

A folder of SITES holds what `pip install --target` put there, on a machine with a network; torch is PYTHON's own.

What a step came to is written to steps.json as soon as it ends: PASS, FAIL, or NOT RUN where this machine or Python
lacks something. The benchmarks write their own files, and README.md shows their figures beside the CPU's.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import time

try:
    from tools import predictions
except ImportError:  # run as a script, by a Python that knows nothing of the course
    import predictions

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 540  # seconds of one part
GIB = 8  # that a card must have free
OUTCOMES = {0: "PASS", 3: "NOT RUN", 4: "NOT RUN"}
Step = tuple[str, ...]


def parts(out: pathlib.Path) -> list[list[Step]]:
    """Return the steps of each part, as words after the Python; the notebooks' pages go to .course/gpu."""
    names, labs = (
        sorted(path.name[:2] for path in (ROOT / room).glob("[0-9][0-9]_*")) for room in ("notebooks", "labs")
    )
    scripts = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "recording.begin" in path.read_text())

    def course(*words: str) -> Step:
        return ("-m", "failurelab", *words, "--device", "cuda")

    def notebook(name: str, model: str = "tiny") -> Step:
        pages = f".course/gpu/{out.name}/{name}-{model}"
        return course("run", name, "--model", model, "--jobs", "1", "--out", pages)

    def benchmark(name: str, *words: str) -> Step:
        return (f"benchmarks/{name}.py", "--device", "cuda", "--out", str(out), *words)

    costs = [benchmark("guards"), benchmark("textbook", "--parts", "cost", "large"), benchmark("preflight_time")]
    chosen = ("guards", "preflight_time", "textbook")
    verified = [course("verify", *labs[at : at + 4]) for at in range(0, len(labs), 4)]
    figures = [benchmark(path.stem) for path in scripts if path.stem not in chosen]
    return [
        [("-m", "failurelab", "doctor"), *map(notebook, names[:6])],
        [notebook(name) for name in names[6:]],
        verified[::2],
        verified[1::2],
        [notebook("01", "random-0.5b"), notebook("03", "random-0.5b")],
        costs,
        figures[::2],
        figures[1::2],
    ]


def environment(folder: pathlib.Path, sites: list[pathlib.Path]) -> pathlib.Path:
    """Return a new environment's Python, which finds the course, then these folders, then this Python's libraries."""
    own = dict.fromkeys([sysconfig.get_paths()["purelib"]])
    if torch := importlib.util.find_spec("torch"):  # a user's own folder may have it
        own[str(pathlib.Path(torch.origin).parents[1])] = None
    paths = [ROOT / "helpers", *(path.resolve() for path in sites), *own]
    # Not a plain path on each line, for the .pth files in there count too: setuptools brings distutils by one.
    text = "import site; " + "; ".join(f"site.addsitedir({str(path)!r})" for path in paths) + "\n"
    if any(file.read_text() == text for file in folder.glob("lib/python*/site-packages/paths.pth")):
        return folder / "bin" / "python"  # an earlier part made it
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    course = site / "grpo_failurelab_course-0.dist-info"  # so that the command finds the course, and the course itself
    course.mkdir(exist_ok=True)
    (course / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo-failurelab-course\nVersion: 0\n")
    (course / "entry_points.txt").write_text("[failurelab.commands]\ncourse = failurelab_course.cli:run\n")
    launcher = folder / "bin" / "torchrun"  # torch's own, where it lies, starts that Python
    launcher.write_text(f"#!{folder / 'bin' / 'python'}\nfrom torch.distributed.run import main\n\nmain()\n")
    launcher.chmod(0o755)
    (site / "paths.pth").write_text(text)
    return folder / "bin" / "python"


def own_python(sites: pathlib.Path | None = None) -> pathlib.Path:
    """Return a Python that has this one's libraries and the course, and make the eras that `sites` has folders of."""
    from failurelab_course import eras
    from failurelab_course.eras import install

    folders = {path.name: path for path in sites.iterdir() if path.is_dir()} if sites else {}
    today = [folders[eras.TODAY]] if eras.TODAY in folders else []
    for era in eras.known():
        if era.name in folders and era.name != eras.TODAY:
            environment(era.folder, [folders[era.name], *today])  # what a stack does not pin is today's
            install.mark(era, era.folder)
    return environment(ROOT / ".course" / "gpu" / "env", today)


def run_part(number: int, steps: list[Step], out: pathlib.Path, python: pathlib.Path, limit: float = LIMIT) -> bool:
    """Run the steps of a part that have not ended yet, until the time is over; return whether all have ended."""
    file = out / "steps.json"
    done = json.loads(file.read_text()) if file.is_file() else {}
    end, fresh = time.monotonic() + limit, True
    jupyter = os.pathsep.join([*filter(None, [os.environ.get("JUPYTER_PATH")]), f"{sys.prefix}/share/jupyter"])
    path = f"{pathlib.Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja
    for step in steps:
        name = " ".join(step).replace(f"{ROOT}{os.sep}", "")
        if name in done:
            continue
        started = time.monotonic()
        if started >= end and not fresh:
            return False
        print(f"part_{number}: {name}", flush=True)
        process = subprocess.Popen(
            [python, *step], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
            env=os.environ | {"FAILURELAB_ERA": "today", "JUPYTER_PATH": jupyter, "PATH": path},
        )  # fmt: skip
        try:
            lines = process.communicate(timeout=end - started)[0].strip().splitlines() or [""]
            outcome = OUTCOMES.get(process.returncode, "FAIL")
            reasons = [line for line in lines if re.search(r"^\d\d_\w+: (?!started)|NOT RUN|^ERROR", line)]
            said = (reasons[0] if reasons and outcome != "PASS" else lines[-1]).replace(f"{ROOT}{os.sep}", "")[:300]
            lacks = "No module named" in said or "eras create" in said
            outcome = "NOT RUN" if outcome == "FAIL" and lacks else outcome
        except subprocess.TimeoutExpired:
            if not fresh:
                return False
            outcome, said = "NOT RUN", f"longer than {limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
        fresh = False
        seconds = round(time.monotonic() - started, 1)
        done[name] = {"part": number, "outcome": outcome, "seconds": seconds, "said": said}
        file.with_suffix(".new").write_text(json.dumps(done, indent=1) + "\n")
        file.with_suffix(".new").replace(file)
        print(outcome if outcome == "PASS" else f"{outcome} {said}", flush=True)
    return True


def page(out: pathlib.Path) -> str:
    """Return the page of a card: what became of each step, and each figure beside the CPU's."""
    lines = [f"# Measured: {out.name}", "", "| part | step | | seconds | |", "| --- | --- | --- | --- | --- |"]
    ended = out / "steps.json"
    steps = json.loads(ended.read_text()) if ended.is_file() else {}
    for name, step in sorted(steps.items(), key=lambda item: item[1]["part"]):
        said = step["said"].replace("|", "/") if step["outcome"] != "PASS" else ""
        lines.append(f"| {step['part']} | `{name}` | {step['outcome']} | {step['seconds']} | {said} |")
    rows, agree = [], 0
    for file in sorted(set(out.glob("*.json")) - {ended}):
        cpu, here = (_figures(folder / file.name) for folder in (ROOT / "evidence" / "cpu", out))
        agree += sum(cpu.get(key) == here[key] for key in here)
        rows += [
            f"| {file.stem} | {' | '.join(key)} | {cpu.get(key, '')} | {here[key]} |"
            for key in here
            if cpu.get(key) != here[key]
        ]
    lines += ["", "What the CPU's figures predicted (benchmarks/predictions.toml):", "", *predictions.describe(out)]
    lines += ["", f"{agree} figures are the CPU's to four digits. The others:", ""]
    lines += ["| benchmark | era | case | figure | CPU | here |", "| --- | --- | --- | --- | --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def _figures(file: pathlib.Path) -> dict[Step, str]:
    return {
        (record["era"], str(record.get("case", "")).replace("|", "/"), name): f"{value:.4g}"
        for record in (json.loads(file.read_text())["records"] if file.is_file() else [])
        for name, value in record["figures"].items()
        if isinstance(value, int | float)
    }


def look(sites: pathlib.Path | None) -> str:
    """Return why the parts cannot run in this Python, with the next step; empty if they can."""
    ours = ROOT / ".venv"
    if sites and (ours.exists() or not sites.is_dir()):
        why = ".venv is here, and has its own stacks" if ours.exists() else f"{sites} is no folder"
        return f"{why}. Next: make gpu without SITES="
    if sites:
        sys.path.insert(0, str(sites / "today"))
        os.environ["JUPYTER_PATH"] = str((sites / "today" / "share" / "jupyter").resolve())
    sys.path.insert(0, str(ROOT / "helpers"))
    try:
        from failurelab_course.experiments import devices

        devices.require_memory(GIB, devices.resolve("cuda"), "make gpu")
    except ImportError as error:
        return f"{sys.executable}: {error}. Next: make gpu PYTHON=one that has torch"
    except devices.TierError as error:
        return str(error).replace(", or run with --device cpu", "").replace("--model tiny, or ", "")
    if ours.exists() and pathlib.Path(sys.prefix).resolve() != ours.resolve():
        return ".venv is here, and the course runs in that one. Next: make gpu without PYTHON="
    return ""


def main(words: list[str] | None = None) -> int:
    """Run the command; return its exit status: 1 where steps are left, 3 where no card can be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int)
    parser.add_argument("--name", default="gpu")
    parser.add_argument("--sites", type=pathlib.Path, help="a folder of stacks, each made by pip install --target")
    options = parser.parse_args(words)
    if problem := look(options.sites):
        print(f"ERROR {problem}", file=sys.stderr)
        return 3
    out = ROOT / "evidence" / options.name
    out.mkdir(parents=True, exist_ok=True)
    python = pathlib.Path(sys.executable) if (ROOT / ".venv").exists() else own_python(options.sites)
    left = []
    every = parts(out)
    for number, steps in enumerate(every, 1):
        if options.part not in (None, number):
            continue
        print(f"part {number} of {len(every)}: {len(steps)} steps, at most {LIMIT // 60} minutes at a time", flush=True)
        if not run_part(number, steps, out, python):
            left.append(f"make gpu NAME={options.name} PART={number}")
    (out / "README.md").write_text(page(out))
    print(f"{out / 'README.md'} is written. Next: {', then '.join(left) or 'read it'}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
