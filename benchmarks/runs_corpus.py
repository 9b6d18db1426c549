#!/usr/bin/env python3
"""Generate runs whose cause is known: what each leaves behind, small enough for a repository.

    python benchmarks/runs_corpus.py first [--only TEXT] [--again] [--write] [--preflight]

`benchmarks/training_runs/HALF_variants.toml` says what is run: a script of `training_runs/scripts`, what is changed
in it, the stack, the seeds, the expected causes, and the clean twin. A run's artefacts go to the archive
`HALF.tar.xz`, its checkpoints and what it measured to `.course/runs_corpus/`, which git ignores. What is there is not
made again.
Then `training_runs/HALF.toml` is written: the runs, and whether each variant differs from its twin by more than three
times the seeds' spread. A variant that does not is dropped, and listed there as dropped. `--preflight` runs no
training: it asks `failurelab preflight` about each listed run's script, in its stack, and keeps the answer.

Eras: today.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import archives
import tomllib

from failurelab_course import eras
from failurelab_course.experiments import devices

HERE = pathlib.Path(__file__).resolve().parent
RUNS, CACHE = HERE / "training_runs", HERE.parent / ".course" / "runs_corpus"
PARTS = HERE.parent / ".course" / "training_runs"  # the archives, unpacked; `--write` packs them
TIMES = 3  # a fault counts if broken and clean differ by more than so many times the seeds' spread
TWIN_SEEDS = [0, 1, 2]
DEFAULTS = {
    "stack": "today", "expected": [], "odd": "", "set": {}, "edits": [], "launched": False, "seeds": [0, 1],
}  # fmt: skip
# trl 0.14 counts prompts for a batch where later releases count completions, and logs none
OLDEST = ("trl-0.14", "trl-0.14-tf-4.52")


def part(half: str) -> pathlib.Path:
    """Return the folder of a half's runs: its archive, unpacked once."""
    folder = PARTS / half
    if not folder.is_dir():
        PARTS.mkdir(parents=True, exist_ok=True)
        archives.unpack(RUNS / f"{half}.tar.xz", PARTS)
    return folder


def read_variants(half: str) -> list[dict]:
    """Return the variants of a half, each with what its script, stack and seeds are."""
    variants = tomllib.loads((RUNS / f"{half}_variants.toml").read_text())["variant"]
    names = [variant["name"] for variant in variants]
    if len(names) != len(set(names)):
        raise SystemExit(f"a variant's name is used twice: {sorted(names)}")
    twins = {variant["twin"] for variant in variants if "twin" in variant}
    if twins - set(names):
        raise SystemExit(f"no variant is called {sorted(twins - set(names))}")
    for variant in variants:
        variant |= {key: value for key, value in DEFAULTS.items() if key not in variant}
        variant["is_twin"] = variant["name"] in twins
        variant["measured_seeds"] = TWIN_SEEDS if variant["is_twin"] else variant["seeds"]
    return variants


def script_of(variant: dict, seed: int) -> str:
    """Return the script as a user has it: the edits of the variant, and the options that it sets."""
    text = (RUNS / "scripts" / f"{variant['script']}.py").read_text()
    for old, new in variant["edits"]:
        if old not in text:
            raise SystemExit(f"{variant['name']}: nothing to replace in {variant['script']}.py: {old!r}")
        text = text.replace(old, new)
    options = dict(variant["set"]) | {"seed": str(seed)}
    if variant["stack"] in OLDEST:
        batch, group = (option(text, options, name) for name in ("per_device_train_batch_size", "num_generations"))
        options |= {"per_device_train_batch_size": str(int(batch) // int(group)), "log_completions": ""}
    for name, value in options.items():
        text = set_option(text, name, value)
    return text


def option(text: str, options: dict, name: str) -> str:
    """Return the value that an option has in a script after `options` are set."""
    return options.get(name) or line_of(name).search(text)["value"]


def line_of(name: str) -> re.Pattern:
    """Return what finds the line that sets an option: a keyword, a dataclass's field, YAML, argparse's default."""
    forms = r"=|: \w+ = |: |\", type=\w+, default="
    return re.compile(rf"^(?P<indent> *)(?P<head>.*?\b{name}(?:{forms}))(?P<value>.+?)(?P<tail>[,)]?)\n", re.M)


def set_option(text: str, name: str, value: str) -> str:
    """Return the script with an option of its config set, added, or, for an empty value, taken out."""
    line = line_of(name)
    if line.search(text):
        return line.sub(lambda found: f"{found[1]}{found[2]}{value}{found[4]}\n" if value else "", text, count=1)
    if not value:
        return text
    seed = re.compile(r"^( +)(seed=.+,\n)", re.M)
    return seed.sub(lambda found: f"{found[1]}{name}={value},\n{found[0]}", text, count=1)


def name_of(variant: str, seed: int) -> str:
    """Return a run's name, which says nothing of its cause."""
    return "run_" + hashlib.sha256(f"{variant} {seed}".encode()).hexdigest()[:6]


def is_made(half: str, variant: dict, seed: int) -> bool:
    """Return whether a run is there, made by the script that its variant makes today."""
    name = name_of(variant["name"], seed)
    scripts = (folder / "train.py" for folder in (part(half) / name, CACHE / name / "artefacts"))
    made = any(path.exists() and path.read_text() == script_of(variant, seed) for path in scripts)
    return made and (CACHE / name / "result.json").exists()


def jobs_of(half: str, variants: list[dict], again: bool) -> dict[str, list[dict]]:
    """Return what is to be run, by stack."""
    jobs: dict[str, list[dict]] = {}
    for variant in sorted(variants, key=lambda variant: not (variant["expected"] or variant["is_twin"])):
        for seed in variant["measured_seeds"]:
            if is_made(half, variant, seed) and not again:
                continue
            name, script = name_of(variant["name"], seed), script_of(variant, seed)
            kept = CACHE / name
            folder = part(half) / name if seed in variant["seeds"] else kept / "artefacts"
            jobs.setdefault(variant["stack"], []).append({
                "name": name, "label": f"{variant['name']} {seed}", "script": script, "artefacts": str(folder),
                "kept": str(kept), "models": str(CACHE / "models"), "launched": variant["launched"],
            })  # fmt: skip
    return jobs


def python_of(stack: str) -> str:
    """Return the stack's Python; one that is no era lies under `.course/stacks`."""
    own = CACHE.parent / "stacks" / stack / "bin" / "python"
    return str(own if own.exists() else eras.find(stack).python)


def work(stack: str, jobs: list[dict]) -> None:
    """Run a stack's jobs in one process, which imports once."""
    environment = os.environ | {
        "PYTHONPATH": str(HERE.parent / "helpers"), "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "FAILURELAB_ERA": stack, "HF_DATASETS_CACHE": str(CACHE / "datasets"), "HF_HOME": str(CACHE / "home"),
        "NO_COLOR": "1",
    }  # fmt: skip
    command = [python_of(stack), str(RUNS / "worker.py")]
    subprocess.run(command, input=json.dumps(jobs), text=True, env=environment, check=True)


def results_of(half: str, variant: dict) -> dict[int, dict]:
    """Return what each seed of a variant measured."""
    made = [seed for seed in variant["measured_seeds"] if is_made(half, variant, seed)]
    return {seed: json.loads((CACHE / name_of(variant["name"], seed) / "result.json").read_text()) for seed in made}


def compare(half: str, variant: dict, twin: dict) -> dict:
    """Return how a variant differs from its clean twin, in the metric that it names."""
    metric = variant.get("metric", "accuracy")
    broken, clean = ([result.get(metric) for result in results_of(half, each).values()] for each in (variant, twin))
    row = {"variant": variant["name"], "expected": variant["expected"], "stack": variant["stack"], "metric": metric,
           "twin": twin["name"], "clean": rounded(clean), "broken": rounded(broken)}  # fmt: skip
    if (
        None in broken
        and metric == "accuracy"
        and all(not r.get("finite", True) for r in results_of(half, variant).values())
    ):
        broken = [0.0] * len(broken)  # weights of NaN answer nothing
    if None in [*broken, *clean] or len(clean) < len(TWIN_SEEDS) or not broken:
        return row | {"difference": None, "spread": None, "counts": False}
    spread = max(statistics.stdev(seeds) for seeds in (clean, broken) if len(seeds) > 1)
    difference = abs(statistics.fmean(broken) - statistics.fmean(clean))
    return row | {"difference": round(difference, 5), "spread": round(spread, 5), "counts": difference > TIMES * spread}


def rounded(values: list) -> list:
    """Return figures with four digits, for a reader."""
    return [value if value is None else float(f"{value:.4g}") for value in values]


def write_toml(half: str, variants: list[dict]) -> None:
    """Write the list of runs, and what of each variant was reproduced; a variant that was not leaves no runs."""
    by_name = {variant["name"]: variant for variant in variants}
    lines = ["# Written by benchmarks/runs_corpus.py: the runs of this half, and what each is.",
             "# How a run is made, and what its files are, stands in README.md.", ""]  # fmt: skip
    compared, dropped, kept = [], [], set()
    for variant in variants:
        if not results_of(half, variant):
            continue  # not made yet
        if variant.get("error"):
            errors = [result.get("error", "") for result in results_of(half, variant).values()]
            holds = bool(errors) and all(re.search(variant["error"], error) for error in errors)
            row = {"variant": variant["name"], "expected": variant["expected"], "stack": variant["stack"],
                   "error": variant["error"], "counts": holds}  # fmt: skip
        elif variant["expected"]:
            row = compare(half, variant, by_name[variant["twin"]])
            row["why"] = variant.get("why", "")
        else:
            continue
        (compared if row["counts"] else dropped).append(row)
    gone = {row["variant"] for row in dropped}
    for variant in variants:
        for seed in variant["seeds"]:
            name = name_of(variant["name"], seed)
            if variant["name"] in gone or not is_made(half, variant, seed):
                continue
            kept.add(name)
            if not (part(half) / name).exists():
                shutil.move(CACHE / name / "artefacts", part(half) / name)
            lines += ["[[run]]", f'name = "{name}"', f"expected = {json.dumps(variant['expected'])}",
                      f"odd = {str(bool(variant['odd'])).lower()}", f'variant = "{variant["name"]}"',
                      f'stack = "{variant["stack"]}"', f"seed = {seed}"]  # fmt: skip
            if variant["odd"]:
                lines.append(f"looks = {json.dumps(variant['odd'])}")
            lines.append("")
    for title, rows in (("reproduced", compared), ("dropped", dropped)):
        for row in rows:
            lines.append(f"[[{title}]]")
            row = {key: value for key, value in row.items() if value not in (None, "") and key != "counts"}
            lines += [f"{key} = {toml(value)}" for key, value in row.items()]
            lines.append("")
    (RUNS / f"{half}.toml").write_text("\n".join(lines).rstrip() + "\n")
    for folder in part(half).iterdir():
        if folder.name not in kept:
            target = CACHE / folder.name / "artefacts"
            shutil.rmtree(target, ignore_errors=True)
            (CACHE / folder.name).mkdir(parents=True, exist_ok=True)
            shutil.move(folder, target)
    archives.pack(part(half), RUNS / f"{half}.tar.xz")
    healthy = lines.count("expected = []")
    size = sum(path.stat().st_size for path in part(half).rglob("*") if path.is_file())
    print(f"{len(kept)} runs, {healthy} healthy, {size / 1e6:.2f} MB; {len(compared)} variants reproduced, "
          f"{len(dropped)} dropped")  # fmt: skip
    for row in dropped:
        print("dropped:", json.dumps(row))


def toml(value) -> str:
    """Return a value as TOML has it; a missing figure in a list is a text."""
    return json.dumps(["none" if part is None else part for part in value] if isinstance(value, list) else value)


def short(answer: dict) -> dict:
    """Return preflight's answer in few characters: no repairs, no versions, and texts cut."""
    kept = {kind: [] for kind in ("findings", "held", "not_checked")}
    for kind, limit in (("findings", 300), ("held", 60), ("not_checked", 60)):
        for part in answer[kind]:
            text = "why" if "why" in part else "evidence"
            kept[kind].append({"failure": part["failure"], text: part[text][:limit]})
    return kept


def ask_preflight(half: str, chosen: list[str], again: bool) -> None:
    """Write `preflight.json` beside each run of a half: what preflight says of its script, in its stack.

    The seeds of a variant have one script: it is asked once, and each gets the answer.
    """
    variants: dict[str, list[dict]] = {}
    for run in sorted(tomllib.loads((RUNS / f"{half}.toml").read_text())["run"], key=lambda run: not run["expected"]):
        if run["variant"] in chosen:
            variants.setdefault(run["variant"], []).append(run)
    for variant, runs in variants.items():
        folders = [part(half) / run["name"] for run in runs]
        if all((folder / "preflight.json").exists() for folder in folders) and not again:
            continue
        with tempfile.TemporaryDirectory() as name:
            place = pathlib.Path(name)
            (place / "models").symlink_to(CACHE / "models")
            shutil.copy(folders[0] / "train.py", place)
            command = [sys.executable, "-m", "failurelab_preflight", "--all", "--python", python_of(runs[0]["stack"])]
            asked = subprocess.run([*command, "--json", "answer.json", "train.py"], cwd=place, capture_output=True)
            answer = short(json.loads((place / "answer.json").read_text()))
        for folder in folders:
            (folder / "preflight.json").write_text(json.dumps(answer, separators=(",", ":")) + "\n")
        found = ", ".join(finding["failure"] for finding in answer["findings"]) or "nothing"
        print(variant, runs[0]["expected"], f"status {asked.returncode}, found {found}", flush=True)


def main() -> None:
    """Generate the runs of a half, and write its list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=devices.argument, default="cpu", help="not used: the runs are on the CPU")
    parser.add_argument("half", nargs="?", default="first")
    parser.add_argument("--only", default="", help="variants whose name this pattern finds")
    parser.add_argument("--again", action="store_true", help="make also what is there")
    parser.add_argument("--write", action="store_true", help="run nothing; write the list of what is there")
    parser.add_argument("--preflight", action="store_true", help="ask preflight about each listed run's script")
    options = parser.parse_args()
    if options.preflight:
        names = [variant["name"] for variant in read_variants(options.half) if re.search(options.only, variant["name"])]
        ask_preflight(options.half, names, options.again)
        return
    variants = read_variants(options.half)
    if not options.write:
        for script in ("small_models.py", f"{options.half}_models.py"):
            if (RUNS / script).exists():
                subprocess.run([python_of("today"), str(RUNS / script)], check=True)
        chosen = [variant for variant in variants if re.search(options.only, variant["name"])]
        for stack, jobs in jobs_of(options.half, chosen, options.again).items():
            work(stack, jobs)
    if not options.only:
        write_toml(options.half, variants)


if __name__ == "__main__":
    main()
