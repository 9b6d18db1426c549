"""One optimizer step beside the textbook: how near healthy ones lie, and what comparing costs.

    python benchmarks/textbook.py [--parts kinds cost large]

For `kinds` the small Qwen2 is trained by ten steps that move its weights, in each kind of training; then four steps are
compared. (Each option in each release is in the atlas, `benchmarks/atlas/probes.toml`; mistakes are planted in
`tests/unit/test_textbook.py`.) `large` measures a first step at the shape of Qwen2-0.5B. Prompts have one length in trl
0.14, which scores without an attention mask.

Eras: trl-0.14, trl-0.15, trl-0.22, today.
"""

import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import frames
import packaging.version
import pandas
import peft
import psutil
import recording
import torch
import trl
from guards import Clock

from failurelab import guards, textbook
from failurelab_course.experiments import models, observe

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "unit"))
import steps

COMPARED, RATE, BETA = (11, 12, 13, 14), 3e-4, 0.2
PARTS = ("kinds", "cost", "large")
VERSION = packaging.version.Version(trl.__version__)
KNOWN = trl.GRPOConfig.__dataclass_fields__
BASE = {"learning_rate": RATE, "max_grad_norm": 0.2, "lr_scheduler_type": "constant"}
LARGE_GIB = (15, 11)  # of a machine, of a card: weights, gradients, two more copies in float32; no Adam's states yet


def before(release: str) -> bool:
    """Whether this trl is older."""
    return packaging.version.Version(release) > VERSION


def make(device: str, kind: str = "full", trainer: Any = None, policy: Any = None, **options: Any) -> Any:
    """Return a trainer on the small model, or on `policy`."""
    asked = {**BASE, "max_steps": COMPARED[-1], **twice(), "lengths": (5,) if before("0.15") else (4, 5), **options}
    loaded, tokenizer = models.load("tiny", device=device)
    policy = policy or loaded
    if kind == "qlora":
        policy, _ = models.load_four_bit(device)
    if kind == "checkpointing":
        asked |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    config = None
    if kind in ("lora", "qlora"):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    folder = tempfile.mkdtemp(prefix="textbook-")
    return steps.trainer(policy, tokenizer, folder, kind=trainer, config=config, **asked)


def twice() -> dict[str, Any]:
    """Return the option of two steps for each generation, where it is known."""
    return {"num_iterations": 2} if "num_iterations" in KNOWN else {}


def once() -> dict[str, Any]:
    """Return the option of one step for each generation, where it is known."""
    return {"num_iterations": 1} if "num_iterations" in KNOWN else {}


def compare(made: Any, compared: Sequence[int] = COMPARED, **options: Any) -> list[textbook.Comparison]:
    """Return the comparisons of some steps."""
    with textbook.compare(made, compared, **options) as watched:
        made.train()
    return watched.reports


def summarize(reports: Sequence[textbook.Comparison], **more: Any) -> dict[str, Any]:
    """Return the figures of a run: those of the step that lies farthest, and what all came to."""
    judged = [report for report in reports if report.apart] or reports[-1:]
    worst = max(judged, key=lambda report: report.apart.distance if report.apart else 0.0)
    verdicts = [report.verdict for report in reports]
    figures = {
        "cosine": worst.apart.cosine if worst.apart else None,
        "size": worst.apart.size if worst.apart else None,
        "floor_cosine": worst.floor.cosine,
        "floor_size": worst.floor.size,
        "steps_judged": sum(report.apart is not None for report in reports),
        "named": worst.named,
        "backward": max((report.backward.away for report in reports if report.backward), default=None),
        "verdict": next((each for each in ("FOUND", "HELD") if each in verdicts), verdicts[0]).lower(),
        **more,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def record(case: str, reports: Sequence[textbook.Comparison], device: str) -> None:
    """Record and print a run."""
    figures = summarize(reports)
    observe.record("ground", "measured", figures, case=case, device=device)
    print(f"{case}: {figures}", flush=True)


def kinds(device: str) -> None:
    """Train all weights, adapters, with checkpointing, and in 4-bit."""
    for kind in ["full", "lora", "checkpointing"] + (["qlora"] if VERSION.major else []):
        more = {"learning_rate": 1e-2} if "lora" in kind else {}
        record(f"kind: {kind}", compare(make(device, kind, beta=BETA, **more)), device)


def cost_of(build: Callable[[], Any], step: int, guarded: bool, device: str, memory: bool) -> tuple[float, float]:
    """Return the seconds of a step, and the peak of the run in MiB (0 if it is not asked for)."""
    made, clock = build(), Clock(device)
    made.add_callback(clock)
    if guarded:
        made.add_callback(guards.StepGuard(made, every=step))
    peak = observe.peak_memory(made.train, device) / 2**20 if memory else 0.0
    if not memory:
        made.train()
    return clock.seconds[step - 1], peak


def cost(device: str) -> None:
    """Measure what a comparison adds to a step of the small model: seconds, and then memory."""

    def build() -> Any:
        return make(device, max_steps=4)

    rounds = [[cost_of(build, 4, guarded, device, False)[0] for guarded in (False, True)] for _ in range(5)]
    peaks = [cost_of(build, 4, guarded, device, True)[1] for guarded in (False, True)]
    keep_cost("small", [statistics.median(each) for each in zip(*rounds)], peaks, device)


def large(device: str) -> None:
    """Measure the same at the shape of Qwen2-0.5B, at the first step: 8 completions of 32 tokens."""
    is_card = torch.device(device).type == "cuda"
    free = (torch.cuda.mem_get_info(device)[0] if is_card else psutil.virtual_memory().available) / 2**30
    if free < (need := LARGE_GIB[is_card]):
        print(f"cost, Qwen2-0.5B: NOT RUN, {free:.0f} GiB are free of {need}", flush=True)
        return

    def build() -> Any:
        sizes = {"max_steps": 1, "num_generations": 4, "max_completion_length": 32, "gradient_accumulation_steps": 1}
        batch = {"per_device_train_batch_size": 2 if before("0.15") else 8}
        return make(device, policy=models.load("random-0.5b", device=device)[0], **sizes, **batch, **once())

    runs = [cost_of(build, 1, guarded, device, True) for guarded in (False, True)]
    keep_cost("Qwen2-0.5B, random weights", *([run[part] for run in runs] for part in (0, 1)), device)


def keep_cost(case: str, seconds: Sequence[float], peaks: Sequence[float], device: str) -> None:
    """Record the cost of a step: without the guard, and with it."""
    figures = {"step_seconds": seconds[0], "guarded_seconds": seconds[1], "peak_mib": peaks[0], "guarded_mib": peaks[1]}
    observe.record("ground", "measured", figures, case=f"cost: {case}", device=device)
    print(f"cost: {case}", figures, flush=True)


def table_step_guard(folder: pathlib.Path) -> str:
    """What a compared step costs beside the same step without StepGuard."""
    runs = frames.read_runs(folder, "textbook", "cost: (?P<model>.+)")
    if runs.empty:
        return "NOT RUN."
    lines = []
    for run in runs.to_dict("records"):
        line = f"- {run['model']}: {run['step_seconds']:.3g} seconds, {run['guarded_seconds']:.3g} compared"
        peak = f"; at most {run['peak_mib']:.0f} MiB, {run['guarded_mib']:.0f} compared"
        lines.append(line if pandas.isna(run["peak_mib"]) else line + peak)
    return "\n".join(lines)


def main() -> None:
    """Run the parts."""
    options = recording.begin(__doc__, parts={"nargs": "+", "choices": PARTS, "default": PARTS, "help": "all without"})
    torch.set_num_threads(1)
    for part in options.parts:
        if part != "large" or VERSION.major:
            globals()[part](options.device)


if __name__ == "__main__":
    main()
