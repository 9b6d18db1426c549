"""The atlas: every failure in every release of trl and transformers, measured: `make atlas`.

    python benchmarks/atlas/measure.py [--only new|NAME,...] [--probes TEXT ...] [--jobs N] [--out evidence/atlas]

For each stack (`stacks`) an environment is made with uv as people could make it on its day, all probes (`probes.toml`)
are run in it by one process that has its libraries and forks, and the environment is removed. What came out is one line
a stack (`columns`): what each field of the configurations is by default, and for each probe whether the failure was
there, loud or silent, with what was measured. A stack that no installer can make, and a probe that cannot run, are
recorded as that.
What is measured is not measured again, so that Ctrl-C loses one stack at most, and a new probe costs each stack that
probe alone; `--again` measures all the same. What failed for want of a network or of space is told, and tried again by
the next run.

It needs a package index and 3 GB of disk.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import columns
import stacks
from stacks import Stack

from failurelab import failures as registry
from failurelab.errors import FailureLabError
from failurelab.failures import verdicts, versions
from failurelab.failures.atlas import COULD_NOT_RUN, LOUD, NONE, NOT_MEASURED, NOT_THERE, SILENT, STATES
from failurelab.failures.toml_table import read_toml
from failurelab_course.eras import install
from failurelab_preflight.answer import Answer
from failurelab_preflight.finding import Change, Verdict
from failurelab_preflight.session import Session, TimeIsOver

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
OUT = ROOT / "evidence" / "atlas"
ENVIRONMENTS = ROOT / ".atlas"
NEEDED = 4 * 2**30  # free bytes: two environments, most of which are links into uv's cache
BESIDE = ("peft", "accelerate", "datasets", "packaging", "psutil")
LIMIT = 900.0  # seconds in which a stack runs all its probes
_NO_FIT = re.compile(r"No solution found|[Nn]o version of|unsatisfiable|Failed to build")  # what uv says of releases
_GROWTH = 0.5  # of the logits' size in float32: what a longer prompt adds at least, if its rows are made
TOKENS = 8  # that the probe of generation draws
Record = dict[str, Any]


def read_probes(path: pathlib.Path = HERE / "probes.toml") -> list[Record]:
    """Return the probes: id, failures, what is run, and the arguments of probe.py."""
    read = read_toml(path)
    probes = list(read["probe"])
    for table in read["option"]:
        for settings in table["settings"]:
            processes = int(table.get("processes", 1))
            beside = f", {processes} processes" * (processes > 1)
            step = {
                "id": f"step {settings or 'as it comes'}{beside}",
                "failure": ["F15", "F20", "F21"],
                "what": f"GRPOTrainer's step beside its definition{beside}: {settings or 'options as they come'}",
                "arguments": settings,
            }
            only = {"only": table["only"]} if "only" in table else {}
            probes.append(step | only | {"processes": processes})
    return probes


def asked_of(package: str) -> list[Record]:
    """Return the probes that are asked of each release of a package, trl or transformers."""
    return [probe for probe in read_probes() if probe.get("only", package) == package]


def lacking(stack: Stack, out: pathlib.Path, texts: Sequence[str] = (), again: bool = False) -> list[Record]:
    """Return the probes that a stack's evidence lacks; with texts, or `again`, also those that it has.

    Args:
        stack: whose evidence it is.
        out: the folder of all evidence.
        texts: only probes whose id holds one of these; all where there is none.
        again: also what is measured already.
    """
    record = columns.read_stack(stack.name, out)
    measured = {probe["id"] for probe in record.get("probes", ())}
    probes = asked_of(stack.name.partition("-")[0])
    if texts:
        return [probe for probe in probes if any(text in probe["id"] for text in texts)]
    if again:
        return probes
    cannot = "could_not_be_installed" in record
    return [] if cannot else [probe for probe in probes if probe["id"] not in measured]


def measure(stack: Stack, probes: list[Record], folder: pathlib.Path) -> Record:
    """Return what all probes say in a stack whose environment is made in a folder and removed."""
    record: Record = {"stack": stack.name, "pinned": stack.pinned, "until": str(stack.until)}
    started = time.monotonic()
    try:
        python = _install(stack, folder)
        record |= {
            "versions": versions.ask_versions(python),
            "seconds_to_install": round(time.monotonic() - started, 1),
        }
        alone = [probe for probe in probes if "measures" in probe]
        judged = [probe for probe in probes if probe not in alone]
        _install_beside(judged, python, stack)
        record |= _ask_all(str(python), judged)
        _install_beside(alone, python, stack)  # after the others, which had not this either
        record["probes"] = _together(record["probes"], _ask_alone(str(python), alone))
        record["megabytes"] = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file()) // 10**6
    except NotInstalled as error:
        if not _NO_FIT.search(str(error)):
            raise
        record["could_not_be_installed"] = str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record["seconds"] = round(time.monotonic() - started, 1)
    return record


def _install(stack: Stack, folder: pathlib.Path) -> pathlib.Path:
    """Make an environment with the stack, and torch as all eras have it; return its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    python, torch = folder / "bin" / "python", _torch()
    places = {name: f" @ {stack.source}" if v == stacks.MAIN else f"=={v}" for name, v in stack.pinned.items()}
    wanted = [name + place for name, place in places.items()]
    wanted += [name for name in ("transformers", *BESIDE) if name not in stack.pinned]
    backend = [] if install.find_links() else ["--torch-backend=cpu"]
    _run_uv("venv", "--python", sys.executable, str(folder))
    _run_uv("pip", "install", "--python", str(python), *backend, torch)
    _run_uv("pip", "install", "--python", str(python), "--exclude-newer", str(stack.until), *backend, torch, *wanted)
    return python


def _install_beside(probes: list[Record], python: pathlib.Path, stack: Stack) -> None:
    """Install what these probes need, as of the stack's day; they miss what does not go with the stack, and say so."""
    fixed = [f"{name}=={version}" for name, version in versions.ask_versions(python).items() if name != "torch"]
    for package in sorted({name for probe in probes for name in probe.get("needs", ())}):
        try:
            _run_uv("pip", "install", "--python", str(python), "--exclude-newer", str(stack.until), *fixed, package)
        except NotInstalled as error:
            if not _NO_FIT.search(str(error)):
                raise


def _run_uv(*line: str) -> None:
    environment = os.environ | {"UV_FIND_LINKS": install.find_links(), "DS_BUILD_OPS": "0"}
    done = subprocess.run([install.uv(), "--quiet", *line], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled(" ".join((done.stderr.strip() or "uv said nothing").split())[:500])


class NotInstalled(FailureLabError):
    """A stack cannot be made; the message is the installer's."""

    exit_status = 3


def _torch() -> str:
    lines = (ROOT / "eras" / "torch.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def _ask_all(python: str, probes: list[Record]) -> Record:
    if not probes:
        return {"probes": []}
    spec = {"script": str(HERE / "probe.py"), "folder": str(HERE), "module": "", "arguments": [], "steps": 3}
    spec |= {"real_model": False, "world_size": 1, "zero_stage": 0, "left_out": [], "visible": ""}
    variables = {"ATLAS_MODEL": str(ROOT / "models" / "tiny-qwen2"), "HF_HUB_OFFLINE": "1"}
    variables |= {"PYTHONPATH": str(ROOT / "helpers")}
    records = []
    with tempfile.TemporaryDirectory(prefix="atlas-", ignore_cleanup_errors=True) as name:
        folder, defaults = pathlib.Path(name), pathlib.Path(name, "defaults.json")
        variables["ATLAS_BFLOAT16"] = str(_as_bfloat16(ROOT / "models" / "tiny-qwen2", folder / "tiny-bfloat16"))
        with Session(folder, python, variables, spec, LIMIT, lambda stage: None).open() as session:
            session.spec["arguments"] = ["--defaults", str(defaults)]
            session.run(Change())
            answers: dict[
                tuple[str, int], Answer
            ] = {}  # of probes that are the same training, judged for another failure
            for probe in probes:
                session.count = session.spec["world_size"] = probe.get("processes", 1)
                started = time.monotonic()
                try:
                    said = _ask(session, probe, answers)
                except TimeIsOver as error:
                    said = {"state": NOT_MEASURED, "said": str(error)}
                for here in (folder, ROOT):  # paths of this machine tell nobody anything
                    said["said"] = said["said"].replace(f"{here}/", "")
                records.append({"id": probe["id"], **said, "seconds": round(time.monotonic() - started, 1)})
        return {"defaults": json.loads(defaults.read_text()) if defaults.exists() else {}, "probes": records}


def _ask_alone(python: str, probes: list[Record]) -> list[Record]:
    """Run probes that preflight has no part in, forked from one process; return their records.

    DeepSpeed, which preflight trains without, is there for them, and nothing else generates or scores.
    """
    if not probes:
        return []
    runs = [(probe, more) for probe in probes for more in probe["runs"]]
    options = [[*(f"{probe['arguments']} {more}".split()), "--measure", probe["measures"]] for probe, more in runs]
    lists = json.dumps([[*line, "--says", "says.jsonl"] for line in options])
    variables = {"ATLAS_MODEL": str(ROOT / "models" / "tiny-qwen2"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONPATH": str(ROOT / "helpers"), "WANDB_DISABLED": "true", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="atlas-", ignore_cleanup_errors=True) as name:
        started = time.monotonic()
        line = [python, str(HERE / "probe.py"), "--each", lists]
        subprocess.run(line, cwd=name, env=os.environ | variables, capture_output=True, timeout=LIMIT)
        seconds = round((time.monotonic() - started) / len(probes), 1)
        said = [_read_run(pathlib.Path(name, str(number))) for number in range(len(runs))]
    records = []
    for probe in probes:
        record = judge_figures(probe["measures"], [told for told, (of, _) in zip(said, runs) if of is probe])
        if record["state"] == COULD_NOT_RUN and re.search(probe.get("refused", "$^"), record["said"]):
            record = {"state": NOT_THERE, "said": f"refused: {record['said']}"}
        records.append({"id": probe["id"], **record, "seconds": seconds})
    return records


def _read_run(folder: pathlib.Path) -> list[Record]:
    """Return what a run wrote down; of one that ended without a word, its error."""
    says, errors = folder / "says.jsonl", folder / "stderr"
    if says.exists():
        return [json.loads(line) for line in says.read_text().splitlines()]
    lines = errors.read_text(errors="replace").strip().splitlines() if errors.exists() else []
    return [{"error": lines[-1][:300] if lines else "it ended without a word"}]


def _as_bfloat16(model: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Return a folder with a model's checkpoint in bfloat16, as most released models have theirs."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return folder


def _ask(session: Session, probe: Record, answers: dict[tuple[str, int], Answer]) -> Record:
    """Run a probe, or take the answer of one that is the same training, and judge it."""
    key = probe["arguments"], session.count
    session.spec["arguments"] = probe["arguments"].split()
    if key not in answers:
        answers[key] = session.run(Change())
    return judge(answers[key], probe["failure"], probe.get("refused", ""), probe.get("spared", ""))


def judge_memory(figures: list[list[Record]]) -> Record:
    """Return whether the peak of a training pass grows with the prompt, from two runs that differ in its length alone.

    What grows by less than half of the prompts' rows of logits is what the layers keep.
    """
    if not all(figures):
        return {"state": NOT_MEASURED, "said": "no training pass was made"}
    short, long = (run[0] for run in figures)
    logits = short["rows"] * (long["tokens"] - short["tokens"]) * short["vocabulary"] * 4
    said = (
        f"peak of a training pass {short['peak'] / 2**20:.0f} MiB with {short['tokens']} tokens and "
        f"{long['peak'] / 2**20:.0f} MiB with {long['tokens']}, {short['rows']} rows of which 4 tokens are completion, "
        f"{short['vocabulary']} entries: the logits of what is more would be {logits / 2**20:.0f} MiB"
    )
    grown = long["peak"] - short["peak"]
    return (
        {"state": SILENT, "failure": "F3a", "said": said} if grown > _GROWTH * logits else {"state": NONE, "said": said}
    )


def judge_rollouts(figures: list[list[Record]]) -> Record:
    """Return whether an engine that a rollout function asks is left with the weights of the start."""
    gaps = [entry["gap"] for entry in figures[0]]
    if not gaps:
        return {"state": NOT_THERE, "said": "rollout_func is taken, and not called without vLLM"}
    if len(gaps) < 2:
        return {"state": NOT_MEASURED, "said": "the engine was asked once, before any step"}
    said = (
        f"engine and policy are {gaps[-1]:.2g} nats a token apart at call {len(gaps)}, and {gaps[0]:.2g} at the first"
    )
    place = {"policy_gap": gaps[-1], "policy_gap_first": gaps[0]}
    is_found = verdicts.judge(registry.get("F16"), [place]).verdict == verdicts.FOUND
    state = {"state": SILENT, "failure": "F16"} if is_found else {"state": NONE}
    return state | {"said": said, "figures": [place]}


def judge_generation(figures: list[list[Record]]) -> Record:
    """Return whether generation in train mode draws from the policy, with each kind of checkpointing.

    It tells nothing where eval mode does not either, or where these rows would not show what goes wrong.
    """
    runs = [run[0] for run in figures if run]
    kinds = ", ".join(f"{run['train']:.2g} ({run['kind']}, use_cache={run['cache']})" for run in runs)
    even = max(run["eval"] for run in runs)
    if (ends := [run["ends"] for run in runs if run["ends"]]) and even <= runs[0]["rounding"]:
        return {
            "state": LOUD,
            "failure": "F7",
            "said": f"in train mode generate ends in {ends[0]}; in eval mode it is right",
        }
    unmasked, alone = (min(planted) for planted in zip(*(run["planted"] for run in runs)))
    said = (
        f"generate is off the policy by {kinds} nats a token at most in train mode, by {even:.2g} in eval mode; "
        f"the next token would be by {unmasked:.2g} if no mask hid anything, and by {alone:.2g} if the last token "
        "alone were seen"
    )
    names = {"train": "draw_gap", "rounding": "draw_rounding", "lengths": "prompt_lengths"}
    places = [{name: run[key] for key, name in names.items()} | {"tokens_drawn": TOKENS} for run in runs]
    controls = {"no causal mask": {"draw_gap": unmasked}, "predicted from the last token alone": {"draw_gap": alone}}
    # of every run: one that shows nothing says that nothing was looked at there
    verdict_of = [verdicts.judge(registry.get("F7"), [place], controls).verdict for place in places]
    kept = {"said": said, "figures": places, "planted": controls}
    if verdicts.FOUND in verdict_of and even <= runs[0]["rounding"]:
        return {"state": SILENT, "failure": "F7", **kept}
    held = set(verdict_of) == {verdicts.HELD} and even <= runs[0]["rounding"] and len(runs) == len(figures)
    return {"state": NONE if held else NOT_MEASURED, **kept}


def judge_partitions(figures: list[list[Record]]) -> Record:
    """Return whether generation under ZeRO-3 gathers each layer for each token, or training ends in an error."""
    told = {name: value for entry in figures[0] for name, value in entry.items()}
    hooks = max((entry.get("hooks", 0) for entry in figures[0]), default=0)
    if said := told.get("evaluate"):  # of 0.14 it is transformers' own, which has no batches of prompts
        state = NOT_THERE if "'list' object" in said else COULD_NOT_RUN
        return {"state": state, "said": f"evaluate() before train() ends in {said}"}
    if said := told.get("train"):
        engine = re.search(r"no attribute '(optimizer|backward)'", said)  # what the engine has, and another object not
        state = {"state": LOUD, "failure": "F4"} if engine else {"state": COULD_NOT_RUN}
        return state | {"said": f"train() ends in {said}"}
    if "train" not in told:
        return {"state": COULD_NOT_RUN, "said": "training ended without a word"}
    if hooks:
        return {"state": SILENT, "failure": "F4", "said": f"{hooks} hooks of ZeRO-3 are on while it generates"}
    return {"state": NONE, "said": "no hook of ZeRO-3 is on while it generates, and training ends well"}


def judge_calls(figures: list[list[Record]]) -> Record:
    """Return whether a call of a tool is scored as the ids that were drawn, or as those of its text."""
    called = [entry for entry in figures[0] if entry["called"]]
    if not called:
        return {"state": NOT_MEASURED, "said": "no completion went on after its call"}
    others = sum(not entry["kept"] for entry in called)
    said = f"{others} of {len(called)} completions are scored with other ids for their call than were drawn"
    return {"state": SILENT, "failure": "F18", "said": said} if others else {"state": NONE, "said": said}


def judge_warnings(figures: list[list[Record]]) -> Record:
    """Return how often the warning of checkpointing was issued in which passes, of each run; it is no failure."""
    counts = ["/".join(str(run[0][name]) for name in ("generation", "scoring", "training")) for run in figures]
    return {"state": NONE, "said": ", ".join(counts)}


def judge_adapter(figures: list[list[Record]]) -> Record:
    """Return whether training leaves a loaded adapter as it was, in silence or with the error that says so."""
    run = figures[0][0]
    said = f"{run['trainable']} of {run['tensors']} tensors of the adapter are trainable, {run['changed']} changed"
    if "element 0 of tensors does not require grad" in run["ends"]:
        return {"state": LOUD, "failure": "F2", "said": f"{said}; training ends in {run['ends']}"}
    if run["ends"]:
        return {"state": COULD_NOT_RUN, "said": run["ends"]}
    return {"state": NONE, "said": said} if run["changed"] else {"state": SILENT, "failure": "F23", "said": said}


JUDGES = {
    "memory": judge_memory,
    "rollouts": judge_rollouts,
    "generation": judge_generation,
    "zero3": judge_partitions,
    "evaluation": judge_partitions,
    "tools": judge_calls,
    "warnings": judge_warnings,
    "adapter": judge_adapter,
}


def judge_figures(measures: str, figures: list[list[Record]]) -> Record:
    """Return the state of a probe that measures by itself, by what each of its runs wrote down."""
    for error in (entry["error"] for run in figures for entry in run if "error" in entry):
        if "NOT THERE" in error:
            return {"state": NOT_THERE, "said": error.partition("NOT THERE: ")[2]}
        return {"state": COULD_NOT_RUN, "said": error}
    return JUDGES[measures](figures)


def judge(answer: Answer, failures: list[str], refused: str = "", spared: str = "") -> Record:
    """Return the state of a probe by what preflight answered, and what it measured.

    Args:
        answer: preflight's.
        failures: ids, of which any counts.
        refused: a pattern of the error with which a release refuses the set-up, where that is no failure.
        spared: a pattern of what preflight says where the failure does not apply, because this release is spared.
    """
    if "NOT THERE" in answer.error:
        return {"state": NOT_THERE, "said": answer.error.partition("NOT THERE: ")[2].split(" Next")[0]}
    if unknown := re.search(r"Unknown loss type: \w+", answer.error):  # as trl says it, in the first step
        return {"state": NOT_THERE, "said": unknown[0]}
    if refused and re.search(refused, answer.error):
        return {"state": NOT_THERE, "said": f"refused: {answer.error}"}
    concerned = [finding for finding in answer.findings if finding.failure in failures]
    if accused := [finding for finding in concerned if finding.is_there]:
        first = accused[0]
        # Preflight stops before a backward pass that it knows to end in an error, and says so.
        ends = first.ends or 'ends in "element 0' in first.evidence
        state = LOUD if ends or (first.failure == "F22" and answer.error) else SILENT
        sure = {} if first.verdict is not Verdict.SUSPECTED else {"read": True}
        return {"state": state, "failure": first.failure, "said": first.evidence, **sure}
    if held := [finding for finding in concerned if finding.verdict is Verdict.HELD]:
        return {"state": NONE, "said": held[0].evidence}
    if answer.error:
        return {"state": COULD_NOT_RUN, "said": answer.error}
    whys = [finding.why for finding in concerned if finding.why]
    if spared and (why := next((why for why in whys if re.search(spared, why)), "")):
        return {"state": NONE, "said": why}
    return {"state": NOT_MEASURED, "said": (whys or ["preflight says nothing of it"])[0]}


def _free(folder: pathlib.Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def _environments() -> Iterator[pathlib.Path]:
    """Give a folder for environments that is gone afterwards, however this ends."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ENVIRONMENTS, ignore_cleanup_errors=True) as folder:
        yield pathlib.Path(folder)


def main() -> int:
    """Measure what is asked for; return 1 if a stack was not measured, for another reason than its releases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="new", help="names of stacks, with commas; without, all that are not measured"
    )
    parser.add_argument(
        "--probes", nargs="*", default=[], metavar="TEXT", help="only probes whose id holds one of these, also again"
    )
    parser.add_argument("--one", default="", metavar="NAME", help="measure this stack, in this process")
    parser.add_argument("--again", action="store_true", help="measure what is measured already, too")
    parser.add_argument("--main", default=stacks.UPSTREAM, metavar="PLACE", help="a folder or an address: trl's main")
    parser.add_argument("--jobs", type=int, default=2, help="stacks at a time")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="only say which stacks there are")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        every = stacks.choose(stacks.read_index("trl"), stacks.read_index("transformers"))
        chosen = every if options.only == "new" else _named(every, options.only.split(","))
        if options.list:
            print("\n".join(f"{stack.name}, as of {stack.until}" for stack in chosen))
            return 0
        if _free(ENVIRONMENTS) < NEEDED:
            free = _free(ENVIRONMENTS) / 2**30
            raise NoSpace(
                f"{free:.1f} GiB are free at {ENVIRONMENTS}, and 4 are needed. Next: free some, and run it again"
            )
        if options.one:
            known = [*every, stacks.main(options.main)]
            return _measure_one(_named(known, [options.one])[0], options)
        left = [stack for stack in chosen if lacking(stack, options.out, options.probes, options.again)]
        return measure_all(left, options)
    except FailureLabError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(
            f"no space is left on the disk ({error.filename}). Next: free some; the same command goes on",
            file=sys.stderr,
        )
        return NoSpace.exit_status
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept. Next: the same command goes on", file=sys.stderr)
        return 130


class NoSpace(FailureLabError):
    """The disk has no place for environments."""

    exit_status = 3


def _measure_one(stack: Stack, options: argparse.Namespace) -> int:
    probes = lacking(stack, options.out, options.probes, options.again)
    with _environments() as folder:
        record = measure(stack, probes, folder / stack.name)
    before = columns.read_stack(stack.name, options.out)
    if before and "probes" in record:
        if options.probes:
            print("\n".join(f"  {probe['id']}: {probe['state']}. {probe['said'][:160]}" for probe in record["probes"]))
        record["probes"] = _together(before.get("probes", []), record["probes"])
        record["seconds"] = round(record["seconds"] + before.get("seconds", 0) * ("probes" in before), 1)
        record = {"defaults": before.get("defaults", {})} | record
    columns.write(record, options.out)
    return 0


def _together(before: list[Record], now: list[Record]) -> list[Record]:
    """Return the records of all probes that there are today, the newest of each, in their order."""
    newest = {record["id"]: record for record in [*before, *now]}
    return [newest[probe["id"]] for probe in read_probes() if probe["id"] in newest]


def _named(every: list[Stack], names: list[str]) -> list[Stack]:
    known = {stack.name: stack for stack in every}
    if unknown := [name for name in names if name not in known]:
        raise UnknownStack(f"no stack is called {', '.join(unknown)}. Next: --list names them")
    return [known[name] for name in names]


class UnknownStack(FailureLabError):
    """A name that no stack has."""

    exit_status = 2


def measure_all(left: list[Stack], options: argparse.Namespace) -> int:
    """Measure stacks in processes of their own, some at a time; on Ctrl-C these are ended, and clear up."""
    missing, started = 0, time.monotonic()
    running: set[subprocess.Popen] = set()
    again = ["--again"] * options.again

    def measure_one(stack: Stack) -> str:
        """Return why it was not measured; empty where it was."""
        line = [
            sys.executable,
            __file__,
            "--one",
            stack.name,
            "--out",
            str(options.out),
            "--main",
            options.main,
            *again,
            "--probes",
            *options.probes,
        ]
        # a session of its own, or Ctrl-C would reach it as well
        with subprocess.Popen(line, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
            running.add(process)
            said = process.communicate()[1].strip()
        running.discard(process)
        return (said or "its process ended without a word").splitlines()[-1] if process.returncode else ""

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        tasks = {pool.submit(measure_one, stack): stack for stack in left}
        try:
            for count, done in enumerate(concurrent.futures.as_completed(tasks), 1):
                name, why = tasks[done].name, done.result()
                missing += bool(why)
                took = datetime.timedelta(seconds=round(time.monotonic() - started))
                told = f"{name} was not measured: {why[:300]}" if why else _in_words(name, options.out)
                print(f"{count} of {len(left)}, after {took}: {told}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise
    return int(missing > 0)


def _in_words(name: str, out: pathlib.Path) -> str:
    record = columns.read_stack(name, out)
    if "probes" not in record:
        return f"{name} cannot be installed: {record['could_not_be_installed'][:160]}"
    counts = {state: sum(probe["state"] == state for probe in record["probes"]) for state in STATES}
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{name}, {record['seconds']:.0f} s: {said}"


if __name__ == "__main__":
    sys.exit(main())
