#!/usr/bin/env python3
"""What `failurelab preflight` says of a corpus of scripts, broken and healthy, against what each of them has.

    python benchmarks/preflight_corpus.py [--only TEXT] [--again] [--out FOLDER]

The corpus and its expected causes stand in `benchmarks/corpus`. Each case runs in a fresh copy of a folder with a model
of Qwen2-0.5B's sizes (configuration and tokenizer, no weights), the tiny Qwen2, an adapter and four small datasets.
Where an edit healed, the patch is applied there and preflight asked once more: nothing may be found then.
Resumable: a case that was judged in this repository's `.course/preflight_corpus` is read, unless `--again`. Examples of
trl's repository are run where TRL_REPOSITORY names a clone of it.

Eras: today.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import archives
import frames
import recording
import tomllib
from lab_cures import read_cures

from failurelab_course import eras
from failurelab_course.experiments import observe
from failurelab_course.labs import definition
from failurelab_course.notebook_runs import notebooks, stored
from failurelab_preflight import cli, launcher_line
from failurelab_preflight.report import terminal

HERE = pathlib.Path(__file__).parent
CORPUS = HERE / "corpus"
OUTCOMES = ("named right", "named wrong", "suspected", "silent", "not judged")
NO_MASK = "no attention mask"  # trl 0.14 scores prompts of unequal length so (TRL #2708): F21 is true if it names this
REPOSITORY = "TRL_REPOSITORY"  # a clone of https://github.com/huggingface/trl, for its examples
CACHE = HERE.parent / ".course" / "preflight_corpus"
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "max_window_layers": 24, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "initializer_range": 0.02, "attention_dropout": 0.0, "use_cache": True, "use_sliding_window": False,
    "sliding_window": 32768, "tie_word_embeddings": True, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
    "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "Qwen/Qwen2-0.5B-Instruct", "r": 8,
    "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "inference_mode": True, "bias": "none",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A script with its arguments, and the failures that it has.

    Attributes:
        name: of the case.
        half: `first`, `trl`, `course` or `labs`: whose it is.
        script: its path in the corpus, `trl:` and the path in the stack's own trl, `examples:` and the name of an
            example in trl's repository, `notebook:` and the name of the notebook that begins with it, or `lab:` and a
            lab's number and script.
        stack: the era that it runs in.
        expected: its failures, the worst first; empty for a healthy one.
        also: failures that may be found too, and need not.
        arguments: of the script.
        environment: variables of the command.
        launch: what stands before the script in the command.
        odd: why a healthy script looks broken.
        model: what a notebook's script finds in `model_path`.
    """

    name: str
    half: str
    script: str
    stack: str
    expected: tuple[str, ...]
    also: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    launch: str = ""
    odd: str = ""
    model: str = "models/tiny-qwen2"


def read_corpus() -> list[Case]:
    """Return the cases of the corpus, from each of its TOML files."""
    cases = []
    for path in sorted(CORPUS.glob("*.toml")):
        if path.name == "labs.toml":
            cases += read_labs(path)
            continue
        for table in tomllib.loads(path.read_text())["case"]:
            lists = {name: tuple(table[name]) for name in ("expected", "also", "arguments") if name in table}
            cases.append(Case(**(table | lists)))
    return cases


def read_labs(path: pathlib.Path) -> list[Case]:
    """Return the scripts of the labs that train by a trainer of trl: start, wrong fixes, solution and other cures."""
    told, cases, cures = tomllib.loads(path.read_text()), [], read_cures()
    for lab in definition.find():
        if not lab.trainer.endswith("Trainer"):
            continue
        broken = () if lab.false_alarm else tuple(each for each in lab.failures if each != "F3a")  # a note
        scripts = [(script, broken) for script in (lab.broken, *lab.wrong_fixes)]
        scripts += [(script, ()) for script in (lab.solution, *cures.get(lab.number, ()))]
        for script, expected in scripts:
            name = f"{lab.number}_{script.name}"
            case = Case(
                name=f"lab_{name}", half="labs", script=f"lab:{name}", stack=lab.era,
                expected=tuple(told["expected"].get(name, expected)),
                also=(*told["also"].get(name, ()), *told["also"].get(lab.number, ())),
                launch=told["launch"].get(lab.number, ""),
            )  # fmt: skip
            cases.append(case)
    return cases


def write_lab_script(case: Case, folder: pathlib.Path) -> str:
    """Write a lab's script where it finds the tiny Qwen2, as in its own folder; return its path."""
    number, _, name = case.script.removeprefix("lab:").partition("_")
    (lab,) = definition.find([number])
    scripts = (lab.broken, *lab.wrong_fixes, lab.solution, *read_cures().get(number, ()))
    (script,) = (script for script in scripts if script.name == name)
    path = script.write(folder / "labs" / lab.name)
    return str(path.rename(path.with_name("train.py")).relative_to(folder))


def make_folder(folder: pathlib.Path) -> None:
    """Write what the corpus' scripts read: models, an adapter, datasets and the scripts themselves."""
    tiny = HERE.parent / "models" / "tiny-qwen2"
    for archive in sorted(CORPUS.glob("*.tar.xz")):
        archives.unpack(archive, folder)
    (folder / "models").mkdir()
    (folder / "models" / "tiny-qwen2").symlink_to(tiny.resolve())
    for name in ("Qwen2-0.5B", "Qwen2-0.5B-Instruct", "Qwen2-0.5B-Reward"):
        qwen = folder / "Qwen" / name
        qwen.mkdir(parents=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny / file, qwen)
        scores = {"architectures": ["Qwen2ForSequenceClassification"]} if name.endswith("Reward") else {}
        (qwen / "config.json").write_text(json.dumps(QWEN | scores))
        (qwen / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "pad_token_id": 0}))
    adapter = folder / "adapters" / "sft"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (folder / "data").mkdir()
    sums = [(a, b, "please " * (a % 3)) for a in range(20) for b in range(1, 20, 2)]
    rows = {
        "sums": [{"prompt": f"{polite}{a}+{b}=", "answer": str(a + b)} for a, b, polite in sums],
        "chat": [
            {"prompt": [{"role": "user", "content": f"{polite}what is {a}+{b}?"}], "answer": str(a + b)}
            for a, b, polite in sums
        ],
        "sft": [
            {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]}
            for a, b, _ in sums
        ],
        "dpo": [
            {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b, _ in sums
        ],
    }  # fmt: skip
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "data" / f"{name}.jsonl").write_text(text)
        (folder / "trl-lib" / name).mkdir(parents=True)  # as a dataset of the hub is called
        for split in ("train", "test"):
            (folder / "trl-lib" / name / f"{split}.jsonl").write_text(text)


def write_notebook_script(case: Case, folder: pathlib.Path) -> str:
    """Write the script of a notebook, without the line that names its era; return its path."""
    (notebook,) = notebooks.find([case.script.removeprefix("notebook:")])
    _, source = stored.script(notebook.content)
    if case.model == "models/tiny-qwen2-bf16":  # a checkpoint as it lies on a hub
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        for kind, options in ((AutoModelForCausalLM, {"dtype": torch.bfloat16}), (AutoTokenizer, {})):
            kind.from_pretrained(folder / "models" / "tiny-qwen2", **options).save_pretrained(folder / case.model)
    path = folder / "train.py"
    path.write_text(f"model_path, seed = {case.model!r}, 0\n{source}")
    return path.name


def write_example(case: Case, folder: pathlib.Path) -> str:
    """Write an example of trl's repository, as it was at the release of the case's stack; return its path."""
    name = case.script.removeprefix("examples:")
    (info,) = eras.find(case.stack).python.parent.parent.glob("lib/python*/site-packages/trl-*.dist-info")
    tag = "v" + info.stem.removeprefix("trl-")
    command = ["git", "-C", os.environ[REPOSITORY], "show", f"{tag}:examples/scripts/{name}"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (folder / name).write_text(text)
    return name


@contextlib.contextmanager
def prepared(case: Case) -> Iterator[tuple[pathlib.Path, str, list[str]]]:
    """Yield a fresh folder that is the current one, the Python of the case's stack, and the words of its command."""
    with tempfile.TemporaryDirectory(prefix="corpus-") as name, contextlib.chdir(name):
        folder, before = pathlib.Path(name), dict(os.environ)
        make_folder(folder)
        os.environ |= {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", **case.environment}
        try:
            python = eras.find(case.stack).python
            script = case.script
            if script.startswith("trl:"):
                (package,) = python.parent.parent.glob("lib/python*/site-packages/trl")
                script = str(package / script.removeprefix("trl:"))
            elif script.startswith("examples:"):
                script = write_example(case, folder)
            elif script.startswith("notebook:"):
                script = write_notebook_script(case, folder)
            elif script.startswith("lab:"):
                script = write_lab_script(case, folder)
            yield folder, str(python), [*case.launch.split(), script, *case.arguments]
        finally:
            os.environ.clear()
            os.environ.update(before)


def judge(case: Case, patched: bool = False, tries: bool | None = None) -> dict:
    """Run preflight on a case; return what it named and suspected, its error, and its seconds.

    Args:
        case: to be judged.
        patched: apply the patch that healed, and say what is accused then.
        tries: as `again` of preflight's command.
    """
    started = time.perf_counter()
    with prepared(case) as (folder, python, words):
        there = {path.name for path in folder.iterdir()}
        asked = len(case.launch.split())
        line = launcher_line.read_line(words, python) if asked else launcher_line.Launch(words[0], case.arguments)
        answered = cli.ask(line, python=python, time_limit=300, again=tries)
        seconds = time.perf_counter() - started
        new = sorted({path.name for path in folder.iterdir()} - there - {"cache"})
        clean = None
        if patched and answered.patch and not answered.suspected and not words[asked].startswith("/"):
            (folder / "fix.diff").write_bytes(answered.patch)
            subprocess.run(["git", "apply", "fix.diff"], check=True)
            again = cli.ask(line, python=python, time_limit=300, again=False)
            clean = again.exit_status == 0
    return {
        "named": [finding.failure for finding in answered.named],
        "suspected": [finding.failure for finding in answered.suspected],
        "held": [finding.failure for finding in answered.held],
        "not_checked": [finding.failure for finding in answered.not_checked],
        "error": answered.error,
        "left_behind": new,
        "patched_clean": clean,
        "seconds": round(seconds, 1),
        "text": terminal.text(answered, everything=True),
    }


def grade(case: Case, result: dict) -> dict[str, Any]:
    """Return what an answer is worth: one outcome of five, whether the cause came first, and what is false in it."""
    named, suspected = result["named"], result["suspected"]
    maskless = case.stack.startswith("trl-0.14") and NO_MASK in " ".join(result.get("text", "").split())
    known = {"F21"} if maskless else set()
    true = {*case.expected, *case.also, *known}
    accused = [*named, *suspected]
    return {
        "outcome": _outcome(case, named, suspected, true, result["error"]),
        "ran": bool(case.expected) or not result["error"],
        "all": set(case.expected) <= set(accused),
        "first": not case.expected or accused[:1] == [case.expected[0]],
        "named_wrong": sorted(set(named) - true),
        "accused_wrong": sorted(set(accused) - true),
        "patched_clean": result.get("patched_clean"),
    }


def _outcome(case: Case, named: list[str], suspected: list[str], true: set[str], error: str) -> str:
    """Return one of `OUTCOMES`: `named right` is the worst failure, and nothing false.

    Of a healthy script, `silent` is right.
    """
    if set(named) - true:
        return "named wrong"
    if not case.expected:
        return "suspected" if set(suspected) - true else "not judged" if error else "silent"
    if case.expected[0] in named:
        return "named right"
    if set(case.expected) & {*named, *suspected}:
        return "suspected"
    return "not judged" if error else "silent"


def right(case: Case, result: dict) -> bool:
    """Return whether all that a script has was said, the cause first, and nothing else; a healthy one must train."""
    grades = grade(case, result)
    return grades["ran"] and grades["all"] and grades["first"] and not grades["accused_wrong"]


def table_preflight(folder: pathlib.Path) -> str:
    """What preflight said of the corpus: an outcome for each broken script, by part; and the healthy ones."""
    runs = frames.read_runs(folder, "preflight_corpus", "preflight: (?P<name>.+)")
    outcomes = ("named right", "suspected", "silent", "not judged")
    is_broken, body = runs["expected"] != "none", []
    broken, healthy = runs[is_broken], runs[~is_broken]
    for half, part in broken.groupby("half"):
        counts = [int((part["outcome"] == outcome).sum()) for outcome in outcomes]
        body.append([half, len(part), *counts, frames.count(part["first"])])
    accused = (~healthy["outcome"].isin(["silent", "not judged"])).sum()
    clean = runs["patched_clean"].dropna()
    return "\n".join(
        [
            frames.markdown(["broken", "scripts", *outcomes, "cause first"], body),
            "",
            f"- Named wrong: {(broken['outcome'] == 'named wrong').sum()} of {len(broken)}.",
            f"- Healthy: {accused} of {len(healthy)} accused, {(healthy['outcome'] == 'not judged').sum()} not judged.",
            f"- Patched by `--diff`, and nothing is found: {frames.count(clean) if len(clean) else 'NOT RUN'}.",
            f"- Seconds, all runs of a script, median: {frames.median(runs['seconds'], '.0f')}.",
        ]
    )


def main() -> None:
    """Judge the corpus, print what came of each case, and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--again", action="store_true", help="judge also what was judged before")
    parser.add_argument("--out", type=pathlib.Path, help="folder of preflight_corpus.json; other cases in it are kept")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    rules = recording.name_commit()
    records, tallies = [], collections.defaultdict(list)
    for case in [case for case in read_corpus() if options.only in case.name]:
        kept = CACHE / f"{case.name}.json"
        if kept.exists() and not options.again:
            result = json.loads(kept.read_text())
        elif case.script.startswith("examples:") and REPOSITORY not in os.environ:
            print(f"NOT RUN {case.name}: {REPOSITORY} names no clone of trl's repository")
            continue
        else:
            result = judge(case, patched=True) | {"rules": rules}
            kept.write_text(json.dumps(result))
        grades = grade(case, result)
        error = f"  ERROR {result['error'][:150]}" * bool(result["error"])
        print(
            f"{'right' if right(case, result) else 'WRONG'} {case.name}: {case.expected}, {grades['outcome']}: "
            f"named {result['named']}, suspected {result['suspected']}, {result['seconds']} s{error}",
            flush=True,
        )
        tallies[case.half, bool(case.expected)].append(grades)
        metrics = {
            "expected": ", ".join(case.expected) or "none", "named": ", ".join(result["named"]) or "none",
            "suspected": ", ".join(result["suspected"]) or "none", "also_allowed": ", ".join(case.also), **grades,
            **{name: ", ".join(result[name]) for name in ("held", "not_checked")}, "seconds": result["seconds"],
            "stack": case.stack, "half": case.half, "ended_in_an_error": bool(result["error"]),
            "rules": result["rules"],
        }  # fmt: skip
        records.append(observe.record("ground", "measured", metrics, case=f"preflight: {case.name}"))
    for (half, broken), grades in sorted(tallies.items()):
        counts = collections.Counter(each["outcome"] for each in grades)
        shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
        first = f"; cause first {sum(each['first'] for each in grades)}" * broken
        print(f"{half}, {'broken' if broken else 'healthy'}, {len(grades)} scripts: {shown}{first}")
    if options.out and records:
        path, judged = options.out / "preflight_corpus.json", {record["case"] for record in records}
        before = recording.read_file(path) if path.exists() else []
        recording.write_file(path, [record for record in before if record["case"] not in judged] + records)


if __name__ == "__main__":
    main()
