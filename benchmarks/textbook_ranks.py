"""One optimizer step of two processes beside its definition, in each way of training.

Two real processes by gloo train the small Qwen2 by four steps, and then two are compared, both of which must hold.
FSDP2 is sharded by hand, for accelerate takes it for accelerators alone.

Eras: trl-0.22, today.
"""

import importlib.util
import json
import pathlib
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
from textbook import BETA, compare, make, summarize

COMPARED = (5, 6)
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


def run(way: str, device: str) -> dict[str, Any]:
    """Train and compare in this process, and return the figures."""
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # the last run's, by which models are loaded
    given = {"max_steps": COMPARED[-1], "per_device_train_batch_size": 8, "beta": BETA}
    given |= {key: value for key, value in WAYS[way].items() if key not in ("stage", "trainer")}
    if stage := WAYS[way].get("stage"):
        given |= ranks_child.zero(stage)
    if "DDP" not in way:
        given["max_grad_norm"] = 1e9  # an engine clips within its step, and a sharded gradient by a method of its own
    made = make(device, trainer=ranks_child.Sharded if "trainer" in WAYS[way] else None, **given)
    reports = compare(made, COMPARED)
    return summarize(reports, reason=reports[-1].reason)


def work(ways: Sequence[str], kept: str, device: str) -> None:
    """Do runs one after another, as one of the processes; rank 0 writes their figures down."""
    torch.set_num_threads(1)
    for way in ways:
        figures = run(way, device)
        if ranks_child.RANK == 0:
            with open(kept, "a", encoding="utf-8") as stream:
                stream.write(json.dumps([way, figures]) + "\n")


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
    """Run the ways, those of DeepSpeed where it is here, and record what they gave."""
    device = recording.begin(__doc__).device
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = pathlib.Path(name)
        kept = folder / "kept.jsonl"
        zero = [way for way in WAYS if "ZeRO" in way and importlib.util.find_spec("deepspeed")]
        for target, ways in ((work, [way for way in WAYS if "ZeRO" not in way]), (work_with_engine, zero)):
            codes = ranks_child.launch(folder, target, ways, str(kept), device, patience=3600) if ways else []
            if any(codes):
                sys.exit((folder / f"log-{codes.index(next(filter(None, codes)))}").read_text()[-3000:])
        done = dict(json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines())
    for way in filter(done.get, WAYS):
        observe.record("ground", "measured", done[way], case=f"way: {way}", device=device)
        print(f"{way:30s} {done[way]}", flush=True)


if __name__ == "__main__":
    main()
