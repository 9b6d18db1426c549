#!/usr/bin/env python3
"""Generate runs whose cause is known: what each leaves behind, small enough for a repository.

    python benchmarks/runs_corpus.py [--only TEXT] [--again] [--preflight]

`benchmarks/training_runs/first_variants.toml` says what is run: a script of `training_runs/scripts`, what is changed
in it, the stack, the seeds, the expected causes, and the clean twin. A run's artefacts go to the archive
`first.tar.xz`, its checkpoints and what it measured to `.course/runs_corpus/`, which git ignores. What is there is not
made again.
Then `training_runs/first.toml` is written: the runs, and whether each variant differs from its twin by more than three
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

HERE = pathlib.Path(__file__).resolve().parent
RUNS, CACHE = HERE / "training_runs", HERE.parent / ".course" / "runs_corpus"
PART = HERE.parent / ".course" / "training_runs" / "first"  # the archive, unpacked; it is packed again in the end
TIMES = 3  # a fault counts if broken and clean differ by more than so many times the seeds' spread
TWIN_SEEDS = [0, 1, 2]
DEFAULTS = {
    "stack": "today", "expected": [], "odd": "", "set": {}, "edits": [], "launched": False, "seeds": [0, 1],
}  # fmt: skip
# trl 0.14 counts prompts for a batch where later releases count completions, and logs none
OLDEST = ("trl-0.14", "trl-0.14-tf-4.52")


def unpacked() -> pathlib.Path:
    """Return the folder of the runs: their archive, unpacked once."""
    if not PART.is_dir():
        PART.parent.mkdir(parents=True, exist_ok=True)
        archives.unpack(RUNS / "first.tar.xz", PART.parent)
    return PART


def read_variants() -> list[dict]:
    """Return the variants, each with what its script, stack and seeds are."""
    variants = tomllib.loads((RUNS / "first_variants.toml").read_text())["variant"]
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


def is_made(variant: dict, seed: int) -> bool:
    """Return whether a run is there, made by the script that its variant makes today."""
    name = name_of(variant["name"], seed)
    scripts = (folder / "train.py" for folder in (unpacked() / name, CACHE / name / "artefacts"))
    made = any(path.exists() and path.read_text() == script_of(variant, seed) for path in scripts)
    return made and (CACHE / name / "result.json").exists()


def jobs_of(variants: list[dict], again: bool) -> dict[str, list[dict]]:
    """Return what is to be run, by stack."""
    jobs: dict[str, list[dict]] = {}
    for variant in sorted(variants, key=lambda variant: not (variant["expected"] or variant["is_twin"])):
        for seed in variant["measured_seeds"]:
            if is_made(variant, seed) and not again:
                continue
            name, script = name_of(variant["name"], seed), script_of(variant, seed)
            kept = CACHE / name
            folder = unpacked() / name if seed in variant["seeds"] else kept / "artefacts"
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


def results_of(variant: dict) -> dict[int, dict]:
    """Return what each seed of a variant measured."""
    made = [seed for seed in variant["measured_seeds"] if is_made(variant, seed)]
    return {seed: json.loads((CACHE / name_of(variant["name"], seed) / "result.json").read_text()) for seed in made}


def compare(variant: dict, twin: dict) -> dict:
    """Return how a variant differs from its clean twin, in the metric that it names."""
    metric = variant.get("metric", "accuracy")
    broken, clean = ([result.get(metric) for result in results_of(each).values()] for each in (variant, twin))
    row = {"variant": variant["name"], "expected": variant["expected"], "stack": variant["stack"], "metric": metric,
           "twin": twin["name"], "clean": rounded(clean), "broken": rounded(broken)}  # fmt: skip
    if None in broken and metric == "accuracy" and all(not r.get("finite", True) for r in results_of(variant).values()):
        broken = [0.0] * len(broken)  # weights of NaN answer nothing
    if None in [*broken, *clean] or len(clean) < len(TWIN_SEEDS) or not broken:
        return row | {"difference": None, "spread": None, "counts": False}
    spread = max(statistics.stdev(seeds) for seeds in (clean, broken) if len(seeds) > 1)
    difference = abs(statistics.fmean(broken) - statistics.fmean(clean))
    return row | {"difference": round(difference, 5), "spread": round(spread, 5), "counts": difference > TIMES * spread}


def rounded(values: list) -> list:
    """Return figures with four digits, for a reader."""
    return [value if value is None else float(f"{value:.4g}") for value in values]


def write_toml(variants: list[dict]) -> None:
    """Write the list of runs, and what of each variant was reproduced; a variant that was not leaves no runs."""
    by_name = {variant["name"]: variant for variant in variants}
    lines = ["# Written by benchmarks/runs_corpus.py: the runs of this half, and what each is.",
             "# How a run is made, and what its files are, stands in README.md.", ""]  # fmt: skip
    compared, dropped, kept = [], [], set()
    for variant in variants:
        if not results_of(variant):
            continue  # not made yet
        if variant.get("error"):
            errors = [result.get("error", "") for result in results_of(variant).values()]
            holds = bool(errors) and all(re.search(variant["error"], error) for error in errors)
            row = {"variant": variant["name"], "expected": variant["expected"], "stack": variant["stack"],
                   "error": variant["error"], "counts": holds}  # fmt: skip
        elif variant["expected"]:
            row = compare(variant, by_name[variant["twin"]])
            row["why"] = variant.get("why", "")
        else:
            continue
        (compared if row["counts"] else dropped).append(row)
    gone = {row["variant"] for row in dropped}
    for variant in variants:
        for seed in variant["seeds"]:
            name = name_of(variant["name"], seed)
            if variant["name"] in gone or not is_made(variant, seed):
                continue
            kept.add(name)
            if not (unpacked() / name).exists():
                shutil.move(CACHE / name / "artefacts", unpacked() / name)
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
    (RUNS / "first.toml").write_text("\n".join(lines).rstrip() + "\n")
    for folder in unpacked().iterdir():
        if folder.name not in kept:
            target = CACHE / folder.name / "artefacts"
            shutil.rmtree(target, ignore_errors=True)
            (CACHE / folder.name).mkdir(parents=True, exist_ok=True)
            shutil.move(folder, target)
    archives.pack(unpacked(), RUNS / "first.tar.xz")
    healthy = lines.count("expected = []")
    size = sum(path.stat().st_size for path in unpacked().rglob("*") if path.is_file())
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


def ask_preflight(chosen: list[str], again: bool) -> None:
    """Write `preflight.json` beside each run: what preflight says of its script, in its stack.

    The seeds of a variant have one script: it is asked once, and each gets the answer.
    """
    variants: dict[str, list[dict]] = {}
    for run in sorted(tomllib.loads((RUNS / "first.toml").read_text())["run"], key=lambda run: not run["expected"]):
        if run["variant"] in chosen:
            variants.setdefault(run["variant"], []).append(run)
    for variant, runs in variants.items():
        folders = [unpacked() / run["name"] for run in runs]
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
    archives.pack(unpacked(), RUNS / "first.tar.xz")


def main() -> None:
    """Generate the runs, and write their list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="variants whose name this pattern finds")
    parser.add_argument("--again", action="store_true", help="make also what is there")
    parser.add_argument("--preflight", action="store_true", help="ask preflight about each listed run's script")
    options = parser.parse_args()
    variants = read_variants()
    chosen = [variant for variant in variants if re.search(options.only, variant["name"])]
    if options.preflight:
        ask_preflight([variant["name"] for variant in chosen], options.again)
        return
    subprocess.run([python_of("today"), str(RUNS / "small_models.py")], check=True)
    for stack, jobs in jobs_of(chosen, options.again).items():
        work(stack, jobs)
    if not options.only:
        write_toml(variants)


if __name__ == "__main__":
    main()
