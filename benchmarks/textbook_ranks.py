"""One optimizer step of two processes beside its definition: ways of training, two reports, and the cost.

    python benchmarks/textbook_ranks.py [--parts ways threads cost] [--kept FILE]

Two real processes by gloo train the small Qwen2. Each run of `ways` trains by four steps, and then two are compared,
both of which must hold. `threads` are the set-ups of TRL #2960 (two cards learn worse than one: ZeRO-3, bfloat16,
groups of eight, many micro-batches) and #4631 (ZeRO-2 learns worse than plain accelerate), as far as they can be
rebuilt. `cost` is what a comparison adds to a step. FSDP2 is sharded by hand, for accelerate takes it for
accelerators alone. With `--kept`, runs that a file has are taken from there, and others are added to it.

Eras: trl-0.22, today.
"""

import importlib.util
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import frames
import recording
import torch
import transformers

from failurelab_course.experiments import deepspeed as engines
from failurelab_course.experiments import observe

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "unit"))
import ranks_child
from textbook import BETA, before, compare, cost_of, make, once, summarize

PARTS, COMPARED = ("ways", "threads", "cost"), (5, 6)
FP32 = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
HAS_ENGINE = importlib.util.find_spec("deepspeed") is not None
SPREAD = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}  # groups of four lie on both ranks
WAYS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP, groups on both ranks": SPREAD,
    "DDP, LoRA": {"kind": "lora", "learning_rate": 1e-2},
    "DDP, checkpointing": {"kind": "checkpointing"},
    "DDP, bf16": {"bf16": True},
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-2, bf16": {"stage": 2, "bf16": True},
    "ZeRO-3": {"stage": 3},
    "ZeRO-3, LoRA": {"stage": 3, "kind": "lora", "learning_rate": 1e-2},
    "FSDP2": {"trainer": "Sharded"},
    "FSDP2, checkpointing": {"trainer": "Sharded", "kind": "checkpointing"},
}
# As in TRL #2960, but for the model, its data and the engine that draws; and in #4631, but for the model.
TWO_CARDS = {"bf16": True, "num_generations": 8, "gradient_accumulation_steps": 16, "max_grad_norm": 1.0}
TWO_CARDS |= {"lr_scheduler_type": "cosine", "warmup_steps": 1, "beta": 0.04, "per_device_train_batch_size": 8}


def is_here(way: str) -> bool:
    """Whether this environment, and this release, have a way of training."""
    return ("ZeRO" not in way or HAS_ENGINE) and ("both" not in way or not before("0.15"))


def list_ways() -> dict[str, dict[str, Any]]:
    """Return a run for each way of training, by its case."""
    return {f"way: {way}": {"way": way, "options": {"beta": BETA}} for way in WAYS if is_here(way)}


def list_threads() -> dict[str, dict[str, Any]]:
    """Return the runs of the two reports."""
    runs: dict[str, dict[str, Any]] = {}
    for count in (1, 2):
        for way in ("DDP", "ZeRO-3"):
            if is_here(way):
                runs[f"thread 2960: {way}, {count} of 2 cards"] = {"way": way, "options": TWO_CARDS, "count": count}
    for micros in (4, 16):
        asked = {"gradient_accumulation_steps": micros, "bf16": True, "per_device_train_batch_size": 4}
        for way, more in (("DDP", {}), ("ZeRO-2", {}), ("ZeRO-2", {"engine": FP32})):
            if is_here(way):
                said = ", gradients added in float32" if more else ""
                case = f"thread 4631: {way}{said}, {micros} micro-batches"
                runs[case] = {"way": way, "options": asked, **more}
        if is_here("ZeRO-2"):
            case = f"thread 4631: ZeRO-2 in float32, {micros} micro-batches"
            runs[case] = {"way": "ZeRO-2", "options": asked | {"bf16": False}}
    return runs


def list_cost() -> dict[str, dict[str, Any]]:
    """Return what is measured of the cost: with one and with two processes."""
    ways = [("DDP", 1), ("ZeRO-3", 1), *((way, 2) for way in ("DDP", "FSDP2", "ZeRO-2", "ZeRO-3"))]
    return {
        f"cost: {way}, {count} process{'es' * (count > 1)}": {"way": way, "count": count, "cost": True}
        for way, count in ways
        if is_here(way)
    }


def build(way: str, options: dict[str, Any], engine: dict[str, Any], device: str) -> Any:
    """Return a trainer of one process."""
    given = {"max_steps": COMPARED[-1], "per_device_train_batch_size": 2 if before("0.15") else 8}
    given |= {key: value for key, value in WAYS[way].items() if key not in ("stage", "trainer")} | options
    if before("0.15"):
        given.pop("num_iterations", None)
    if stage := WAYS[way].get("stage"):
        given |= ranks_child.zero(stage)
        given["deepspeed"] |= engine
    if "DDP" not in way:
        given["max_grad_norm"] = 1e9  # an engine clips within its step, and a sharded gradient by a method of its own
    return make(device, trainer=ranks_child.Sharded if "trainer" in WAYS[way] else None, **given)


def run(asked: dict[str, Any], device: str) -> dict[str, Any]:
    """Do one run in this process, and return its figures."""
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # the last run's, by which models are loaded
    if asked.get("cost"):
        return run_cost(asked["way"], device)
    made = build(asked["way"], asked["options"], asked.get("engine", {}), device)
    reports = compare(made, COMPARED)
    return summarize(reports, reason=reports[-1].reason)


def run_cost(way: str, device: str) -> dict[str, Any]:
    """Measure a step without the guard and with it: seconds of this process, then the peak of memory."""

    def again() -> Any:
        return build(way, {"max_steps": 4, **once()}, {}, device)

    rounds = [[cost_of(again, 4, guarded, device, False)[0] for guarded in (False, True)] for _ in range(3)]
    peaks = [cost_of(again, 4, guarded, device, True)[1] for guarded in (False, True)]
    seconds = [sorted(each)[1] for each in zip(*rounds)]
    return {"step_seconds": seconds[0], "guarded_seconds": seconds[1], "peak_mib": peaks[0], "guarded_mib": peaks[1]}


def work(part: str, cases: Sequence[str], kept: str, device: str) -> None:
    """Do runs one after another, as one of the processes; rank 0 writes their figures down."""
    torch.set_num_threads(1)
    every = globals()[f"list_{part}"]()
    for case in cases:
        figures = run(every[case], device)
        if ranks_child.RANK == 0:
            with open(kept, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"era": observe.era(), "case": case, "figures": figures}) + "\n")


def work_with_engine(*given: Any) -> None:
    """Do runs of DeepSpeed."""
    with engines.ready():
        import deepspeed

        deepspeed.init_distributed("gloo")
        work(*given)


def table_textbook_ranks(folder: pathlib.Path) -> str:
    """Two processes beside the textbook, a line for each release and verdict: the ways, and the worst figures."""
    runs, lines = frames.read_runs(folder, "textbook_ranks", "way: (?P<way>.+)"), []
    for (era, verdict), part in runs.groupby(["era", "verdict"], sort=False):
        (release,) = frames.version_heads(part, [era], "trl")
        worst = f"cosine {part['cosine'].min():.4f}, size {part['size'].min():.4g} to {part['size'].max():.4g}"
        lines.append(f"- {release}, {verdict}: {'; '.join(part['way'])} ({worst})")
    return "\n".join(lines)


def main() -> None:
    """Run the parts, and record what they gave."""
    parts = {"nargs": "+", "choices": PARTS, "default": PARTS, "help": "all without"}
    options = recording.begin(__doc__, parts=parts, kept={"default": "", "help": "a file of runs that are done"})
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-"))
    kept = pathlib.Path(options.kept or folder / "kept.jsonl").resolve()
    for part in options.parts:
        every = globals()[f"list_{part}"]()
        todo = [case for case in every if case not in read(kept)]
        for count in (1, 2):
            for with_engine in (False, True):
                cases = [
                    case
                    for case in todo
                    if every[case].get("count", 2) == count and ("ZeRO" in every[case]["way"]) == with_engine
                ]
                if cases:
                    target = work_with_engine if with_engine else work
                    given = (part, cases, str(kept), options.device)
                    codes = ranks_child.launch(folder, target, *given, count=count, patience=3600)
                    if any(codes):
                        sys.exit((folder / f"log-{codes.index(next(filter(None, codes)))}").read_text()[-3000:])
        done = read(kept)
        for case in every:
            observe.record("ground", "measured", done[case], case=case, device=options.device)
            said = {name: value for name, value in done[case].items() if name in ("verdict", "cosine", "size", "named")}
            print(f"{case:70s} {said or done[case]}", flush=True)
    shutil.rmtree(folder)


def read(kept: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return the figures of this era's runs that are done, by their case."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["case"]: row["figures"] for row in rows if row["era"] == observe.era()}


if __name__ == "__main__":
    main()
