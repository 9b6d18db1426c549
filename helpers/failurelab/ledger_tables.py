"""The README's tables and its picture, made from the ledger by `failurelab evidence tables`."""

import hashlib
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable

from . import evidence
from .evidence import Record

CURVES = ("checkpointing off", "broken", "gradients repaired", "rollouts repaired", "both repaired")
_ZERO3 = ("trl-0.14", "trl-0.15", "today")
ERAS = ("trl-0.14", "trl-0.15", "trl-0.14-tf-4.52", "today")


def _of(records: Iterable[Record], failure: str, case: str) -> list[Record]:
    """Return the benchmarks' records of a case; what notebooks recorded in passing stays out of the tables."""
    return [
        made
        for made in records
        if made["failure"] == failure and made["case"] == case and made["source"].startswith("benchmarks/")
    ]


def _spread(values: Iterable[float], digits: int = 2) -> str:
    """Return `median (minimum to maximum)`."""
    numbers = sorted(float(value) for value in values)
    if not numbers:
        return "not recorded"
    middle = f"{statistics.median(numbers):.{digits}f}"
    return middle if len(numbers) == 1 else f"{middle} ({numbers[0]:.{digits}f} to {numbers[-1]:.{digits}f})"


def _markdown(head: list[str], body: list[list]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def learning(records: list[Record]) -> str:
    """GRPO on the small Qwen2: sampled accuracy before and after, in each era."""
    body = []
    for era in ERAS:
        runs = [made["figures"] for made in _of(records, "ground", "GRPO learns sums") if made["era"] == era]
        if not runs:
            continue
        gains = [run["sampled_after"] - run["sampled_before"] for run in runs]
        body.append(
            [
                era,
                _spread(run["sampled_before"] for run in runs),
                _spread(run["sampled_after"] for run in runs),
                f"{sum(gain >= 0.2 for gain in gains)} of {len(runs)} seeds",
                _spread((run["seconds"] for run in runs), 0),
            ]
        )
    return _markdown(["era", "sampled accuracy before", "after", "gain of 0.2 or more", "seconds"], body)


def faces(records: list[Record]) -> str:
    """The three faces of the warning in trl 0.14, both trainers, and the cures."""
    body = []
    for setup in ("full", "embeddings frozen", "LoRA"):
        for kind in ("reentrant", "reentrant, require_input_grads", "non-reentrant", "off"):
            line = [setup, kind]
            for trainer in ("GRPO", "Online DPO"):
                (made,) = [r for r in _of(records, "F1", f"{trainer}, {setup}, {kind}") if r["era"] == "trl-0.14"]
                found = made["figures"]
                warned = "warning" if found["warnings"] else "no warning"
                raised = ", RuntimeError" if found["error"] else ""
                line.append(f"{found['changed']} of {found['trainable']}, {warned}{raised}")
            body.append(line)
    return _markdown(["what is trained", "checkpointing", "GRPO: tensors that change", "Online DPO"], body)


def generation(records: list[Record]) -> str:
    """Greedy accuracy of generation, by set-up and version."""
    rows = {
        "evaluation": "eval mode, checkpointing reentrant, cache, mixed lengths, sdpa",
        "train mode, checkpointing off": "train mode, checkpointing off, cache, mixed lengths, sdpa",
        "train mode, reentrant": "train mode, checkpointing reentrant, cache, mixed lengths, sdpa",
        "train mode, non-reentrant": "train mode, checkpointing non-reentrant, cache, mixed lengths, sdpa",
        "the same, `use_cache=False`": "train mode, checkpointing non-reentrant, no cache, mixed lengths, sdpa",
        "train mode, prompts of equal length": "train mode, checkpointing non-reentrant, cache, equal lengths, sdpa",
        "the same, eager attention": "train mode, checkpointing non-reentrant, cache, equal lengths, eager",
    }
    eras = ("trl-0.14", "trl-0.14-tf-4.52", "today")
    versions, body = {}, []
    for name, case in rows.items():
        line = [name]
        for era in eras:
            (made,) = [record for record in _of(records, "F7", case) if record["era"] == era]
            versions[era] = made["versions"]["transformers"]
            line.append(f"{made['figures']['greedy_accuracy']:.2f}")
        body.append(line)
    return _markdown(["generation in", *(f"transformers {versions[era]}" for era in eras)], body)


def curves(records: list[Record]) -> str:
    """The run that is broken twice: what each repair does, k of n seeds."""
    body = []
    for name in CURVES:
        runs = [made["figures"] for made in _of(records, "F7", f"curve: {name}")]
        sane = sum(run["rewards"][0] > run["accuracy_before"] - 0.08 for run in runs)
        learned = sum(run["accuracy_after"] > run["accuracy_before"] + 0.1 for run in runs)
        body.append(
            [
                name,
                _spread(run["rewards"][0] for run in runs),
                _spread(run["rewards"][-1] for run in runs),
                _spread(run["accuracy_after"] for run in runs),
                f"{sane} of {len(runs)}",
                f"{learned} of {len(runs)}",
            ]
        )
    before = _spread(made["figures"]["accuracy_before"] for made in _of(records, "F7", f"curve: {CURVES[0]}"))
    head = ["run", "reward, first 10 steps", "last 10", f"accuracy after ({before.split()[0]} before)"]
    return _markdown([*head, "rollouts sane", "learned"], body)


def suspects(records: list[Record]) -> str:
    """Which suspects of "element 0" change anything: tensors that a gradient reaches, by set-up, in trl 0.14."""
    places = [(trained, kind) for trained in ("full", "LoRA") for kind in ("off", "reentrant", "non-reentrant")]
    body = []
    for name in [f"{f}, {d}" for f in ("Qwen2", "Llama") for d in ("float32", "bf16 autocast", "bf16 weights")] + [
        "ZeRO-2",
        "ZeRO-3",
    ]:
        line = [f"Qwen2, float32, DeepSpeed {name}" if name.startswith("ZeRO") else name]
        for trained, kind in places:
            case = f"{name}, {kind}, {trained}"
            case = case if name.startswith("ZeRO") else f"matrix: {case}"
            found = next(made["figures"] for made in _of(records, "F2", case) if made["era"] == "trl-0.14")
            raised = f", {found['error'].split(':')[0]}" if found["error"] else ""
            line.append(f"{found['reached']} of {found['trainable']}{raised}")
        body.append(line)
    return _markdown(["trl 0.14", *(f"{trained}, {kind}" for trained, kind in places)], body)


def cures(records: list[Record]) -> str:
    """Every cure of "element 0": gradients, rewards alone and with the rollouts repaired, memory of a step."""
    names = {made["case"].removeprefix("cure: ") for made in records if made["case"].startswith("cure: ")}
    body = []
    for name in sorted(name for name in names if "rollouts repaired" not in name):
        alone, both = (
            [made["figures"] for made in _of(records, "F2", f"cure: {name}{more}")]
            for more in ("", ", rollouts repaired")
        )
        peak = _spread((m["figures"]["peak_mib"] for m in _of(records, "F2", f"one step: {name}")), 0).split()[0]
        body.append(
            [
                name,
                f"{min(run['reached'] for run in alone)} of {alone[0]['trainable']}",
                *(
                    _spread(run["rewards"][place] for run in runs if run.get("rewards")) if runs else "-"
                    for runs in (alone, both)
                    for place in (0, -1)
                ),
                _spread(run["accuracy_after"] for run in both or alone),
                "-" if peak == "not" else peak,
                f"{min(run['seconds'] for run in both or alone):.1f}",
            ]
        )
    head = ["cure", "tensors with a gradient", "reward, first 10 steps", "last 10"]
    more = ["rollouts repaired too: first 10", "last 10", "accuracy after", "peak MiB of a step", "seconds, fastest"]
    return _markdown([*head, *more], [[("-" if c == "not recorded" else c) for c in line] for line in body])


def depth(records: list[Record]) -> str:
    """Peak memory and seconds of a training step with LoRA, over the model's depth."""
    body = []
    for layers in (2, 4, 8, 16):
        line: list = [layers]
        for kind in ("off", "reentrant", "non-reentrant"):
            (made,) = [m for m in _of(records, "F2", f"memory: {layers} layers, {kind}") if m["era"] == "today"]
            line.append(f"{made['figures']['peak_mib']:.0f} MiB, {made['figures']['seconds']:.2f} s")
        body.append(line)
    return _markdown(["layers", "checkpointing off", "reentrant", "non-reentrant"], body)


def imports(records: list[Record]) -> str:
    """Where the seconds of an import go."""
    body = []
    for made in _of(records, "ground", "import GRPOTrainer"):
        found = made["figures"]
        parts = ", ".join(f"{name.removeprefix('of which ')} {value}" for name, value in found.items() if "of " in name)
        body.append([made["era"], found["seconds"], found["seconds_without_byte_code"], parts])
    return _markdown(["era", "seconds", "without compiled byte code", "of which (own seconds)"], body)


def names(records: list[Record]) -> str:
    """What each transformers calls the argument for the last rows of logits, and what it does with the other name."""
    (made,) = _of(records, "F3a", "read in wheels")
    lines = zip(*(made["figures"][column] for column in ("transformers", "takes", "other_name")))
    return _markdown(["transformers", "Qwen2 takes", "the other name is"], [list(line) for line in lines])


def misalignment(records: list[Record]) -> str:
    """One run with right and with wrong log-probabilities: the scores, the first step, and the reward."""
    body = []
    for name, era, runs in _misaligned(records):
        first, last = ([run["rewards"][place] for run in runs] for place in (0, -1))
        prompts = "equal, bit by bit" if all(run["equal_to_prompt_positions"] for run in runs) else "other"
        body.append(
            [
                f"{era}, {name}",
                f"{max(run['largest_error'] for run in runs):.2g}",
                prompts,
                _spread((abs(run["first_kl"]) + abs(run["first_loss"]) for run in runs), 0).split()[0],
                _spread(first),
                _spread(last),
                f"{sum(b > a for a, b in zip(first, last))} up, {sum(b < a for a, b in zip(first, last))} down",
            ]
        )
    head = ["run", "error of scores, nats", "against scores at the prompt", "first loss, KL"]
    return _markdown([*head, "reward, first 10 steps", "last 10", "seeds"], body)


def _misaligned(records: list[Record]) -> Iterable[tuple[str, str, list[dict]]]:
    """Yield name, era and figures of each kind of run, in the order in which they are told."""
    for era, name in (
        ("trl-0.14", "as released"),
        ("trl-0.14-tf-4.52", "as released"),
        ("trl-0.14-tf-4.52", "argument passed on"),
    ):
        runs = [made for made in _of(records, "F3b", f"misalignment: {name}") if made["era"] == era]
        yield name, era, [made["figures"] for made in sorted(runs, key=lambda made: made["seed"])]


def log_probs(records: list[Record]) -> str:
    """Ways to score a completion: time and memory against kept logits in the same run, and errors."""
    made = {r["case"].removeprefix("log-probs: "): r["figures"] for r in records if r["case"].startswith("log-probs: ")}
    body = []
    for case in sorted(made, key=lambda case: (MAIN_SHAPE not in case, case.partition(", 2 x")[1:], case)):
        way, _, shape = case.replace(", selective", "; selective").partition(", ")
        if MAIN_SHAPE not in case and way != "completion_logps":
            continue
        run = made[case]
        body.append(
            [
                shape,
                way.replace("; selective", ", selective"),
                f"{run['time_to_kept']:.2f}",
                f"{run['beyond_gradients_mib']:.0f}",
                f"{run['memory_to_kept']:.2f}",
                f"{run['gradients_mib']:.0f}",
                f"{run['score_error']:.0e}",
                f"{run['gradient_error']:.0e}",
            ]
        )
    head = ["batch x (prompt + completion)", "way", "time, to kept", "MiB beyond gradients", "to kept"]
    return _markdown([*head, "floor: gradients, MiB", "error, nats", "of gradients"], body)


MAIN_SHAPE = "4 x (256+64), width 256, tied, float32"


def zero3_generation(records: list[Record]) -> str:
    """How long generation takes under ZeRO-3, as a multiple of what it takes with the engine handed over."""
    ways = (
        "without DeepSpeed",
        "engine handed over, hooks off",
        "bare model handed over, hooks on",
        "model.generate by itself",
    )
    body = []
    for way in ways:
        found = {made["era"]: made["figures"] for made in _of(records, "F4", f"generation: {way}")}
        hooks = {figures["hooks"] for figures in found.values()}
        shown = [f"{found[era]['ratio']:.1f}" if era in found else "not recorded" for era in _ZERO3]
        body.append([way, *map(str, sorted(hooks)), *shown])
    return _markdown(["generation", "hooks meanwhile", *_ZERO3], body)


def zero3_parity(records: list[Record]) -> str:
    """How far gathered parameters end from those of the run without DeepSpeed, on fixed completions."""
    body = []
    for stage in range(4):
        found = {made["era"]: made["figures"] for made in _of(records, "F4", f"parity: stage {stage}")}
        shown = [f"{found[era]['largest_difference']:.0e}" if era in found else "not recorded" for era in _ZERO3]
        body.append([f"stage {stage}", *shown])
    moved = [made["figures"]["largest_change"] for made in records if made["case"].startswith("parity: stage")]
    body.append(["for scale: the largest change", *[f"{max(moved, default=0):.0e}"] * len(_ZERO3)])
    return _markdown(["largest difference of a parameter", *_ZERO3], body)


def zero3_shards(records: list[Record]) -> str:
    """What one of two processes holds at each stage."""
    body = []
    for stage in range(4):
        for made in _of(records, "F4", f"held by one of two: stage {stage}"):
            found = made["figures"]
            body.append([f"stage {stage}", *(f"{found[key]:,}" for key in ("parameters", "gradients", "state"))])
    return _markdown(["elements held by one of two", "parameters", "gradients", "optimizer state"], body)


SIMULATED = ("Qwen2-0.5B, bf16", "Qwen2-7B, bf16", "Qwen2-7B, 4 bit and LoRA", "Qwen2.5-72B, bf16")


def simulated(records: list[Record]) -> str:
    """Peak memory of one step of known shapes on simulated devices, beside what can be worked out by hand."""
    rows = []
    for name in SIMULATED:
        (made,) = [each for each in _of(records, "F5", f"simulated step: {name}") if each["era"] == "today"]
        found = made["figures"]
        by_hand = found["weights_by_hand"]
        rows.append(
            [
                name,
                *(f"{found[key] / 2**30:.1f}" for key in ("peak_bytes", "weights_bytes")),
                "" if by_hand is None else f"{by_hand / 2**30:.1f}",
                f"{found['activations_bytes'] / 2**30:.1f}",
                f"{found['decomposed_bytes'] / 2**30:.1f}",
                f"{(found['decomposed_bytes'] - found['peak_bytes']) / found['scores_by_hand']:.1f}",
            ]
        )
    columns = ["GiB at the peak", "all", "weights", "weights by hand", "activations", "attention decomposed"]
    return _markdown([*columns, "difference / one score matrix a layer"], rows)


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "zero3-generation": zero3_generation,
    "zero3-parity": zero3_parity,
    "zero3-shards": zero3_shards,
    "learning": learning,
    "faces": faces,
    "generation": generation,
    "curves": curves,
    "suspects": suspects,
    "cures": cures,
    "depth": depth,
    "imports": imports,
    "simulated": simulated,
    "names": names,
    "misalignment": misalignment,
    "log-probs": log_probs,
}


def update(text: str, records: list[Record]) -> str:
    """Return `text` with each block between `<!-- table: NAME -->` and `<!-- end table -->` made anew.

    Raises:
        EvidenceError: a block names a table that does not exist.
    """

    def made(match: re.Match) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise evidence.EvidenceError(f"unknown table {name!r}: the tables are {', '.join(TABLES)}")
        return f"<!-- table: {name} -->\n{TABLES[name](records)}\n<!-- end table -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end table -->", made, text, flags=re.DOTALL)


def picture_digest(records: list[Record]) -> str:
    """Return a digest of what the picture shows, which the picture carries, so that a stale one is found."""
    shown = [
        [made["case"], made["seed"], made["figures"]]
        for name in CURVES
        for made in _of(records, "F7", f"curve: {name}")
    ]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def picture(records: list[Record], path: pathlib.Path) -> None:
    """Draw the learning curves of the run that is broken twice: the median over seeds, and all seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from . import notebook

    with pyplot.style.context(notebook.STYLE):
        figure, axes = pyplot.subplots(figsize=(7.5, 4))
        for number, name in enumerate(CURVES):
            runs = [made["figures"] for made in _of(records, "F7", f"curve: {name}")]
            columns = list(zip(*(run["rewards"] for run in runs)))
            wide = {"linewidth": 7, "alpha": 0.35} if number == 0 else {}
            (line,) = axes.plot(runs[0]["steps"], [statistics.median(c) for c in columns], label=name, **wide)
            low, high = ([pick(column) for column in columns] for pick in (min, max))
            axes.fill_between(runs[0]["steps"], low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, 0.9))
        axes.set_title("The same run, broken twice: one repair alone does not heal")
        axes.legend(loc="upper left", ncol=2)
        figure.savefig(path, metadata={"Software": None, "Description": picture_digest(records)})
        pyplot.close(figure)


def misalignment_digest(records: list[Record]) -> str:
    """Return a digest of what the picture of the misaligned runs shows."""
    shown = [[name, era, runs] for name, era, runs in _misaligned(records)]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def misalignment_picture(records: list[Record], path: pathlib.Path) -> None:
    """Draw the learning curves with right and wrong log-probabilities: the median over seeds, and all as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from . import notebook

    with pyplot.style.context(notebook.STYLE):
        figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
        for number, (name, era, runs) in enumerate(_misaligned(records)):
            columns = list(zip(*(run["rewards"] for run in runs)))
            wide = {"linewidth": 7, "alpha": 0.35} if number == 0 else {}
            middle = [statistics.median(column) for column in columns]
            (line,) = axes.plot(runs[0]["steps"], middle, label=f"{era}, {name}", **wide)
            low, high = ([pick(column) for column in columns] for pick in (min, max))
            axes.fill_between(runs[0]["steps"], low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(xlabel="step", ylabel="reward, mean of 10 steps", ylim=(0, 1))
        axes.set_title("One upgrade, no error: what the trainer scores are other tokens")
        axes.legend(loc="center right")
        figure.savefig(path, metadata={"Software": None, "Description": misalignment_digest(records)})
        pyplot.close(figure)
