"""The tables about gradients, rollouts and learning: failures F1, F2 and F7, and the healthy ground."""

from failurelab_course.ledger.format import ERAS, markdown, of, spread
from failurelab_course.ledger.records import Record

CURVES = ("checkpointing off", "broken", "gradients repaired", "rollouts repaired", "both repaired")


def learning(records: list[Record]) -> str:
    """GRPO on the small Qwen2: sampled accuracy before and after, in each era."""
    body = []
    for era in ERAS:
        runs = [made["figures"] for made in of(records, "ground", "GRPO learns sums") if made["era"] == era]
        if not runs:
            continue
        gains = [run["sampled_after"] - run["sampled_before"] for run in runs]
        body.append(
            [
                era,
                spread(run["sampled_before"] for run in runs),
                spread(run["sampled_after"] for run in runs),
                f"{sum(gain >= 0.2 for gain in gains)} of {len(runs)} seeds",
                spread((run["seconds"] for run in runs), 0),
            ]
        )
    return markdown(["era", "sampled accuracy before", "after", "gain of 0.2 or more", "seconds"], body)


def faces(records: list[Record]) -> str:
    """The three faces of the warning in trl 0.14, both trainers, and the cures."""
    body = []
    for setup in ("full", "embeddings frozen", "LoRA"):
        for kind in ("reentrant", "reentrant, require_input_grads", "non-reentrant", "off"):
            line = [setup, kind]
            for trainer in ("GRPO", "Online DPO"):
                (made,) = [r for r in of(records, "F1", f"{trainer}, {setup}, {kind}") if r["era"] == "trl-0.14"]
                found = made["figures"]
                warned = "warning" if found["warnings"] else "no warning"
                raised = ", RuntimeError" if found["error"] else ""
                line.append(f"{found['changed']} of {found['trainable']}, {warned}{raised}")
            body.append(line)
    return markdown(["what is trained", "checkpointing", "GRPO: tensors that change", "Online DPO"], body)


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
            (made,) = [record for record in of(records, "F7", case) if record["era"] == era]
            versions[era] = made["versions"]["transformers"]
            line.append(f"{made['figures']['greedy_accuracy']:.2f}")
        body.append(line)
    return markdown(["generation in", *(f"transformers {versions[era]}" for era in eras)], body)


def curves(records: list[Record]) -> str:
    """The run that is broken twice: what each repair does, k of n seeds."""
    body = []
    for name in CURVES:
        runs = [made["figures"] for made in of(records, "F7", f"curve: {name}")]
        sane = sum(run["rewards"][0] > run["accuracy_before"] - 0.08 for run in runs)
        learned = sum(run["accuracy_after"] > run["accuracy_before"] + 0.1 for run in runs)
        body.append(
            [
                name,
                spread(run["rewards"][0] for run in runs),
                spread(run["rewards"][-1] for run in runs),
                spread(run["accuracy_after"] for run in runs),
                f"{sane} of {len(runs)}",
                f"{learned} of {len(runs)}",
            ]
        )
    before = spread(made["figures"]["accuracy_before"] for made in of(records, "F7", f"curve: {CURVES[0]}"))
    head = ["run", "reward, first 10 steps", "last 10", f"accuracy after ({before.split()[0]} before)"]
    return markdown([*head, "rollouts sane", "learned"], body)


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
            found = next(made["figures"] for made in of(records, "F2", case) if made["era"] == "trl-0.14")
            raised = f", {found['error'].split(':')[0]}" if found["error"] else ""
            line.append(f"{found['reached']} of {found['trainable']}{raised}")
        body.append(line)
    return markdown(["trl 0.14", *(f"{trained}, {kind}" for trained, kind in places)], body)


def cures(records: list[Record]) -> str:
    """Every cure of "element 0": gradients, rewards alone and with the rollouts repaired, memory of a step."""
    names = {made["case"].removeprefix("cure: ") for made in records if made["case"].startswith("cure: ")}
    body = []
    for name in sorted(name for name in names if "rollouts repaired" not in name):
        alone, both = (
            [made["figures"] for made in of(records, "F2", f"cure: {name}{more}")]
            for more in ("", ", rollouts repaired")
        )
        peak = spread((m["figures"]["peak_mib"] for m in of(records, "F2", f"one step: {name}")), 0).split()[0]
        body.append(
            [
                name,
                f"{min(run['reached'] for run in alone)} of {alone[0]['trainable']}",
                *(
                    spread(run["rewards"][place] for run in runs if run.get("rewards")) if runs else "-"
                    for runs in (alone, both)
                    for place in (0, -1)
                ),
                spread(run["accuracy_after"] for run in both or alone),
                "-" if peak == "not" else peak,
                f"{min(run['seconds'] for run in both or alone):.1f}",
            ]
        )
    head = ["cure", "tensors with a gradient", "reward, first 10 steps", "last 10"]
    more = ["rollouts repaired too: first 10", "last 10", "accuracy after", "peak MiB of a step", "seconds, fastest"]
    return markdown([*head, *more], [[("-" if c == "not recorded" else c) for c in line] for line in body])


def depth(records: list[Record]) -> str:
    """Peak memory and seconds of a training step with LoRA, over the model's depth."""
    body = []
    for layers in (2, 4, 8, 16):
        line: list = [layers]
        for kind in ("off", "reentrant", "non-reentrant"):
            (made,) = [m for m in of(records, "F2", f"memory: {layers} layers, {kind}") if m["era"] == "today"]
            line.append(f"{made['figures']['peak_mib']:.0f} MiB, {made['figures']['seconds']:.2f} s")
        body.append(line)
    return markdown(["layers", "checkpointing off", "reentrant", "non-reentrant"], body)


def imports(records: list[Record]) -> str:
    """Where the seconds of an import go."""
    body = []
    for made in of(records, "ground", "import GRPOTrainer"):
        found = made["figures"]
        parts = ", ".join(f"{name.removeprefix('of which ')} {value}" for name, value in found.items() if "of " in name)
        body.append([made["era"], found["seconds"], found["seconds_without_byte_code"], parts])
    return markdown(["era", "seconds", "without compiled byte code", "of which (own seconds)"], body)
