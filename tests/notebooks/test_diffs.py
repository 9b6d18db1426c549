"""The diff at each notebook's end, applied to the reader's script: broken before, healed after, measured in its era.

With LoRA too, for most readers train adapters: the runner gives the trainer a `peft_config` where the script gives
none. And where the notebook says "or upgrade", the script as it stands there, without the diff, in the newer stack.

`expected/NAME.py` says how. `MEASURE` is run after the script, with its names, and sets `healed` and `metrics`; it
finds `trainer`, also where the script keeps it inside a function, and `started`, the trainable tensors as they were
when that was made. `RAISES` matches the error of a script that raises before the diff. `BEFORE` is run before the
script: what a launcher does, or a node that is not there. `LORA` are options of LoraConfig, or None for a script that
has its own adapters; `LORA_MEASURE` and `LORA_RAISES` stand where adapters fail in another way. `UPGRADE` names newer
eras in which the notebook does not run the script itself, and for each the edits of text that its release asks for;
with `STAYS` the diff may stay there. `PROCESSES` are as many as a launcher would start, the script with `ARGUMENTS`.
`SHORT` are edits for a run of fewer steps that proves the same, `SHORT_LORA` with adapters too, and `SHORT_BROKEN` for
the broken run. A second diff, to code of the reader's own, is tagged `own-diff`, and that code `own`; `OWN_MEASURE`
judges it.
"""

import importlib
import json
import re
import subprocess

import pytest
from tests.files import edit
from tools.notebook_lint import diff_of

from failurelab_course import eras
from failurelab_course.experiments import models
from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs import stored

NAMES = [each.name for each in course.notebooks() if not each.name.startswith("00")]
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


TRIALS = {name: importlib.import_module(f"tests.notebooks.expected.{name}") for name in NAMES}
# Each notebook without adapters, and with them unless the script has its own.
CASES = [(name, lora) for name in NAMES for lora in (False, True) if not lora or getattr(TRIALS[name], "LORA", LORA)]
UPGRADES = [(name, era) for name in NAMES for era in getattr(TRIALS[name], "UPGRADE", {})]


def ids(case):
    """Name a case: 02_garbage_rollouts-lora."""
    return {False: "plain", True: "lora"}.get(case, case)


def apply(script, diff, folder):
    """Return the script with the diff applied, as a reader would: by git."""
    path = folder / "train.py"
    path.write_text(script + "\n", encoding="utf-8")
    done = subprocess.run(
        ["git", "apply", "-p0", "--unidiff-zero", "--whitespace=nowarn", "-"],
        input=diff, cwd=folder, text=True, capture_output=True, env={"PATH": "/usr/bin:/bin", "GIT_DIR": "/nowhere"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path.read_text(encoding="utf-8")


# Imports trl once. Each line of its input is a script, which is run and measured in forks, one for each process that a
# launcher would start, and answered in a line.
RUNNER = """
import atexit, functools, gc, json, os, socket, sys

gc.disable()  # while it imports
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the import and the scripts print
from trl import GRPOTrainer

gc.freeze()  # each training begins with a collection
gc.enable()
make = GRPOTrainer.__init__


def answer(task):
    made = {}

    @functools.wraps(make)
    def init(self, *args, **options):
        if task["lora"] and options.get("peft_config") is None:
            from peft import LoraConfig

            options["peft_config"] = LoraConfig(**task["lora"])
        make(self, *args, **options)
        trainable = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}
        made.update(trainer=self, started=trainable)

    GRPOTrainer.__init__ = init
    os.chdir(task["folder"])
    names = dict(task["given"], __name__="__main__")
    exec(task["before"], names)
    try:
        exec(compile(task["source"], "train.py", "exec"), names)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    exec(task["measure"], names := made | names)
    return {"healed": bool(names["healed"]), "metrics": names["metrics"], "error": None}


def run(task, rank, port):
    sys.argv = ["train.py", *task["arguments"]]
    if task["processes"] > 1:  # as torchrun does
        count = str(task["processes"])
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    said = answer(task)
    if rank == "0":
        with open("answer.json", "w") as file:
            json.dump(said, file)
    from torch import distributed

    if distributed.is_initialized():  # threads of the group that outlive it end a process in SIGABRT now and then
        distributed.destroy_process_group()
    atexit._run_exitfuncs()
    os._exit(0)


for line in sys.stdin:
    task = json.loads(line)
    with socket.socket() as free:  # bound until the processes have ended, so that no other program gets this port
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch sets it on the socket that listens there
        free.bind(("127.0.0.1", 0))
        started = []
        for rank in range(task["processes"]):
            started.append(os.fork())
            if not started[-1]:
                run(task, str(rank), str(free.getsockname()[1]))
        failed = any([os.waitpid(process, 0)[1] for process in started])
    if failed:
        said = json.dumps({"error": "a process of the script did not end by itself"})
    else:
        said = open(os.path.join(task["folder"], "answer.json")).read()
    print(said, file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Return a function that runs a script and its measurement in an era: `healed`, `metrics`, the error if any."""
    runners = {}

    def run(name, era, source, lora, measure=None):
        trial = TRIALS[name]
        if era not in runners:
            found = eras.find(era)
            command = [str(found.python), "-W", "ignore", "-c", RUNNER]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            runners[era] = subprocess.Popen(command, env=eras.environment(found), **pipes)
        measure = measure or (getattr(trial, "LORA_MEASURE", trial.MEASURE) if lora else trial.MEASURE)
        task = {
            "folder": str(tmp_path_factory.mktemp("run")),
            "before": getattr(trial, "BEFORE", ""),
            "source": source,
            "measure": measure,
            "given": {"model_path": models.source("tiny"), "device": "cpu", "seed": 0},
            "lora": LORA | getattr(trial, "LORA", {}) if lora else None,
            "arguments": getattr(trial, "ARGUMENTS", []),
            "processes": getattr(trial, "PROCESSES", 1),
        }
        print(json.dumps(task), file=runners[era].stdin, flush=True)
        return json.loads(runners[era].stdout.readline())

    yield run
    for runner in runners.values():
        runner.communicate()


def short(name, lora):
    """Return the edits that make a run short."""
    return getattr(TRIALS[name], "SHORT", []) + (getattr(TRIALS[name], "SHORT_LORA", []) if lora else [])


def script_and_diff(name):
    """Return the era, the script, and the diff of a notebook."""
    (notebook,) = course.find([name])
    era, script = stored.script(notebook.content)
    (diff,) = [diff_of(cell.source) for cell in notebook.content.cells if "diff" in stored.tags(cell)]
    return era or eras.TODAY, script, diff


def test_every_notebook_of_a_failure_has_its_diff_tried():
    """A notebook whose diff nobody applies may promise anything."""
    assert [name for name, trial in TRIALS.items() if hasattr(trial, "MEASURE")] == NAMES


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), CASES, ids=ids)
def test_the_diff_heals_the_script(name, lora, tmp_path, ask):
    """The script of the notebook is broken for the stated reason; with the diff alone it is healed."""
    era, script, diff = script_and_diff(name)
    trial = TRIALS[name]
    raises = getattr(trial, "RAISES", None)
    raises = getattr(trial, "LORA_RAISES", raises) if lora else raises
    less = short(name, lora)
    before = ask(name, era, edit(script, *less, *getattr(trial, "SHORT_BROKEN", [])), lora)
    if raises:
        assert before["error"] and re.search(raises, before["error"]), before
    else:
        assert before["error"] is None and before["healed"] is False, before
    after = ask(name, era, edit(apply(script, diff, tmp_path), *less), lora)
    assert after["error"] is None and after["healed"] is True, (before, after)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), [case for case in CASES if hasattr(TRIALS[case[0]], "OWN_MEASURE")], ids=ids)
def test_the_second_diff_heals_code_of_ones_own(name, lora, tmp_path, ask):
    """What the notebook shows beside its script, with the script's names: wrong as it stands, right with its diff."""
    (notebook,) = course.find([name])
    (script,) = [cell.source for cell in notebook.code if "script" in stored.tags(cell)]
    *given, own = [cell.source for cell in notebook.code if "own" in stored.tags(cell)]
    (diff,) = [diff_of(cell.source) for cell in notebook.content.cells if "own-diff" in stored.tags(cell)]
    era, own = own.split()[1].split(",")[0], own.partition("\n")[2]
    above = "\n".join(source.partition("\n")[2] for source in (script, *given))
    measure = TRIALS[name].OWN_MEASURE
    before = ask(name, era, f"{above}\n{own}", lora, measure)
    assert before["error"] is None and before["healed"] is False, before
    after = ask(name, era, f"{above}\n{apply(own, diff, tmp_path)}", lora, measure)
    assert after["error"] is None and after["healed"] is True, (before, after)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "era"), UPGRADES)
def test_the_newer_release_heals_the_script(name, era, tmp_path, ask):
    """Upgrade, says the notebook: with the edits that the newer release asks for, without the diff or with it."""
    _, script, diff = script_and_diff(name)
    scripts = [script, apply(script, diff, tmp_path)] if getattr(TRIALS[name], "STAYS", False) else [script]
    for source in scripts:
        after = ask(name, era, edit(source, *TRIALS[name].UPGRADE[era], *short(name, False)), False)
        assert after["error"] is None and after["healed"] is True, after
