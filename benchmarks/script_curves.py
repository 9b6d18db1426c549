"""Curves of notebooks 08 and 12 to 14, by the scripts that stand there: broken, a popular fix, the repair, healthy.

The script's cell, and the functions of the page that repair it, are taken from the notebook and run longer. By hand, a
trained model is asked the sums of its notebook; 12 has none, and 14's are asked once.

Eras: today, trl-0.14, trl-0.15.
"""

import ast
import json
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import recording
import torch

from failurelab_course import eras
from failurelab_course.experiments import models, observe, trainers, vllm_stand_in

SEEDS = {"08": 5, "12": 3, "13": 3, "14": 5}
STEPS = {"08": 60, "12": 40, "13": 60, "14": 80}
Names = dict[str, Any]


def cells(number: str) -> list[str]:
    """Return the sources of a notebook's code cells, without the magic of the first line; the script's first."""
    (path,) = (eras.root() / "notebooks").glob(f"{number}_*.ipynb")
    code = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    code.sort(key=lambda cell: "script" not in cell["metadata"].get("tags", []))
    sources = ["".join(cell["source"]) for cell in code]
    return [source.split("\n", 1)[1] if source.startswith("%%") else source for source in sources]


def script_of(number: str, seed: int, *functions: str) -> Names:
    """Run the definitions of a notebook's script, and functions of the page; return their names."""
    script, *others = cells(number)
    names: Names = {"model_path": str(models.path("tiny")), "seed": seed}
    for source in [script, *others]:
        try:
            parts = ast.parse(source).body
        except SyntaxError:  # a cell of another language, or with a magic inside
            continue
        wanted = [
            part
            for part in parts
            if (source is script and not _trains(part)) or getattr(part, "name", None) in functions
        ]
        exec(compile(ast.Module(wanted, []), f"notebook {number}", "exec"), names)
    names["options"] |= {"max_steps": STEPS[number], "logging_steps": 1, "disable_tqdm": True}
    return names


def _trains(part: ast.stmt) -> bool:
    """Whether a statement of a script starts the training."""
    return isinstance(part, ast.Expr) or (isinstance(part, ast.Assign) and ast.unparse(part).startswith("trainer ="))


def figures_of(trainer: Any, asked: list[tuple[str, str]]) -> Names:
    """Return a trained trainer's curve, and what its model answers by hand."""
    steps, rewards = trainers.curve(trainer)
    policy = trainer.model.eval()
    tokenizer = models.load()[1]
    right = [models.accuracy(policy, tokenizer, sampled=True, seed=draw, prompts=asked) for draw in range(3)]
    return {
        "steps": steps,
        "rewards": [round(reward, 4) for reward in rewards],
        "accuracy_after": statistics.fmean(right),
    }


def padded(seed: int, **changes: Any) -> Names:
    """Notebook 08: sums and chats in one batch."""
    names = script_of("08", seed)
    if observe.era() == "trl-0.15":  # counts completions
        changes["per_device_train_batch_size"] = 16 * names["options"]["num_generations"]
    trainer = names["train"](**changes)
    return figures_of(trainer, list(names["answers"].items()))


def weighted(seed: int, eight_bits: bool = True, **changes: Any) -> Names:
    """Notebook 12: long completions of an engine in 8 bits, or in bfloat16."""
    vllm_stand_in.install(eight_bits=eight_bits)
    trainer = script_of("12", seed)["train"](**changes)
    steps, rewards = trainers.curve(trainer)
    logged = [row for row in trainer.state.log_history if "reward" in row]
    means = [row.get("sampling/importance_sampling_ratio/mean", 1.0) for row in logged]
    return {
        "steps": steps,
        "rewards": [round(reward, 4) for reward in rewards],
        "mean_weight": statistics.fmean(means),
    }


def ranked(seed: int, count: int, old: str = "", new: str = "") -> Names:
    """Notebook 13: so many processes, a line of the script replaced."""
    from failurelab_course.notebook.torchrun import Torchrun

    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (script, *_) = cells("13")
        assert old in script
        (place / "train.py").write_text(script.replace(old, new) if old else script)
        (place / "curve.py").write_text(_RANK)
        os.chdir(folder)
        torchrun = Torchrun()
        try:
            torchrun(count, "curve.py", models.path("tiny"), seed, STEPS["13"])
        finally:
            torchrun.close()
            os.chdir(here)
        return json.loads((place / "figures.json").read_text())


# What each process of notebook 13 runs: its script, longer, and by rank 0 what the model answers by hand.
_RANK = f"""
import json, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import script_curves, train

trainer = train.make(max_steps=int(sys.argv[3]), logging_steps=1, disable_tqdm=True)
trainer.train()
if trainer.accelerator.process_index == 0:
    trainer.model.to("cpu")
    with open("figures.json", "w") as file:
        json.dump(script_curves.figures_of(trainer, train.sums), file)
"""


def turned(seed: int, rollout: str = "rollout", **changes: Any) -> Names:
    """Notebook 14: two turns; by hand the first one is asked."""
    names = script_of("14", seed, "masked", "by_ids")
    trainer = names["make"](names[rollout], **changes)
    trainer.train()
    ends = [row["completions/clipped_ratio"] for row in trainer.state.log_history if "reward" in row]
    return figures_of(trainer, list(names["sums"].items())) | {"clipped": statistics.fmean(ends)}


def cases() -> Iterator[tuple[str, str, str, Callable[[int], Names]]]:
    """Yield failure, state, case, and what runs it with a seed; those of this era."""
    if observe.era() == "trl-0.14":
        yield "F21", "broken", "08: broken", padded
        yield "F21", "wrong_fix", "08: twice the learning rate", lambda seed: padded(seed, learning_rate=8e-4)
        alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
        yield "F21", "right_fix", "08: one prompt a batch", lambda seed: padded(seed, **alone)
    elif observe.era() == "trl-0.15":
        yield "F21", "healthy", "08: trl 0.15", padded
    else:
        mode = "vllm_importance_sampling_mode"
        yield "F17", "broken", "12: broken", weighted
        yield "F17", "wrong_fix", "12: capped", lambda seed: weighted(seed, **{mode: "sequence_truncate"})
        yield "F17", "right_fix", "12: a weight a token", lambda seed: weighted(seed, **{mode: "token_truncate"})
        yield "F17", "healthy", "12: engine in bfloat16", lambda seed: weighted(seed, eight_bits=False)
        own, whole = "total / mask.sum()", "total / sum(self.tokens)"
        shared = f"{whole} * len(self.tokens)"
        yield "F21", "broken", "13: two processes", lambda seed: ranked(seed, 2)
        yield "F21", "wrong_fix", "13: divided by all", lambda seed: ranked(seed, 2, own, whole)
        yield "F21", "right_fix", "13: repaired", lambda seed: ranked(seed, 2, own, shared)
        yield "F21", "healthy", "13: one process", lambda seed: ranked(seed, 1)
        for state, name in {"broken": "rollout", "wrong_fix": "masked", "right_fix": "by_ids"}.items():
            yield "F18", state, f"14: {name}", lambda seed, name=name: turned(seed, name)


def main() -> None:
    """Run all, or the cases that begin as `--only` says."""
    arguments = recording.begin(__doc__, only="")
    if arguments.device != "cpu":
        recording.end_not_run("these scripts are the pages' own, which name no device: they are run on the CPU")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a Trainer takes a GPU by itself
    torch.set_num_threads(1)
    for case in cases():
        if case[2].startswith(arguments.only):
            recording.record_cases([case], SEEDS[case[2][:2]], "cpu")


if __name__ == "__main__":
    main()
