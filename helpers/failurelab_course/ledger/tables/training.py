"""The tables about gradients, rollouts and learning: failures F1, F2 and F7, and the healthy ground."""

from failurelab_course.ledger import tables
from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import count, grid, group_runs, list_runs, median, select_runs, spread, table

CURVES = ("checkpointing off", "broken", "gradients repaired", "rollouts repaired", "both repaired")
_KINDS = ("off", "reentrant", "non-reentrant")


def learning(records: list[Record]) -> str:
    """GRPO on the small Qwen2: sampled accuracy before and after, in each era."""
    runs = select_runs(records, "ground", "GRPO learns sums")
    eras = [era for era in ("trl-0.14", "trl-0.15", "trl-0.14-tf-4.52", "today") if era in set(runs["era"])]
    return table(
        ["era"],
        group_runs(runs, eras, "era").items(),
        ("sampled accuracy before", "sampled_before"),
        ("after", "sampled_after"),
        ("gain of 0.2 or more", lambda runs: f"{count(runs['sampled_after'] - runs['sampled_before'] >= 0.2)} seeds"),
        ("seconds", "seconds", ".0f"),
    )


def faces(records: list[Record]) -> str:
    """The three faces of the warning in trl 0.14, both trainers, and the cures."""
    trained = ("full", "embeddings frozen", "LoRA")
    kinds = ("reentrant", "reentrant, require_input_grads", "non-reentrant", "off")
    pattern = rf"(?P<trainer>GRPO|Online DPO), (?P<trained>{'|'.join(trained)}), (?P<kind>.+)"

    def changed(run):
        warned = "warning" if run["warnings"] else "no warning"
        return f"{run['changed']} of {run['trainable']}, {warned}{', RuntimeError' if run['error'] else ''}"

    head = ["what is trained", "checkpointing", "GRPO: tensors that change", "Online DPO"]
    runs = select_runs(records, "F1", pattern, "trl-0.14")
    return grid(head, runs, changed, trained=trained, kind=kinds, trainer=("GRPO", "Online DPO"))


def comes_back(records: list[Record]) -> str:
    """Frozen embeddings, no adapter: tensors that change in three steps, by what was asked for, cure and release."""
    eras = ("trl-0.14", "trl-0.15", "trl-0.22", "today")
    runs = select_runs(records, "F1", "comes back, (?P<asked>.+)")
    versions = dict(zip(runs["era"], runs["versions"]))
    head = [f"trl {versions[era]['trl']}, transformers {versions[era]['transformers']}" for era in eras]

    def changed(run):
        return f"{run['changed']} of {run['trainable']}, {run['in_force']}"

    head = ["asked for, or cure beside reentrant", *head]
    return grid(head, runs, changed, asked=list(dict.fromkeys(runs["asked"])), era=eras)


def generation(records: list[Record]) -> str:
    """Greedy accuracy of generation, by set-up and version."""
    labels = {
        "eval mode, checkpointing reentrant, cache, mixed lengths, sdpa": "evaluation",
        "train mode, checkpointing off, cache, mixed lengths, sdpa": "train mode, checkpointing off",
        "train mode, checkpointing reentrant, cache, mixed lengths, sdpa": "train mode, reentrant",
        "train mode, checkpointing non-reentrant, cache, mixed lengths, sdpa": "train mode, non-reentrant",
        "train mode, checkpointing non-reentrant, no cache, mixed lengths, sdpa": "the same, `use_cache=False`",
        "train mode, checkpointing non-reentrant, cache, equal lengths, sdpa": "train mode, prompts of equal length",
        "train mode, checkpointing non-reentrant, cache, equal lengths, eager": "the same, eager attention",
    }
    eras = ("trl-0.14", "trl-0.14-tf-4.52", "today")
    runs = select_runs(records, "F7", "|".join(labels))
    runs["label"] = runs["case"].map(labels)
    versions = dict(zip(runs["era"], runs["versions"]))
    head = ["generation in", *(f"transformers {versions[era]['transformers']}" for era in eras)]
    return grid(head, runs, lambda run: f"{run['greedy_accuracy']:.2f}", label=labels.values(), era=eras)


def curves(records: list[Record]) -> str:
    """The run that is broken twice: what each repair does, k of n seeds."""
    runs = group_runs(select_runs(records, "F7", "curve: (?P<name>.+)"), CURVES, "name")
    return table(
        ["run"],
        runs.items(),
        ("reward, first 10 steps", "first"),
        ("last 10", "last"),
        (f"accuracy after ({median(runs[CURVES[0]]['accuracy_before'])} before)", "accuracy_after"),
        ("rollouts sane", lambda runs: count(runs["first"] > runs["accuracy_before"] - 0.08)),
        ("learned", lambda runs: count(runs["accuracy_after"] > runs["accuracy_before"] + 0.1)),
    )


def suspects(records: list[Record]) -> str:
    """Which suspects of "element 0" change anything: tensors that a gradient reaches, by set-up, in trl 0.14."""
    dtypes = ("float32", "bf16 autocast", "bf16 weights")
    names = [*(f"{family}, {dtype}" for family in ("Qwen2", "Llama") for dtype in dtypes), "ZeRO-2", "ZeRO-3"]
    labels = {name: f"Qwen2, float32, DeepSpeed {name}" if name.startswith("ZeRO") else name for name in names}
    places = [f"{kind}, {trained}" for trained in ("full", "LoRA") for kind in _KINDS]

    def reached(run):
        return f"{run['reached']} of {run['trainable']}{', ' if run['error'] else ''}{run['error'].split(':')[0]}"

    pattern = rf"(matrix: )?(?P<name>{'|'.join(names)}), (?P<place>{'|'.join(places)})"
    runs = select_runs(records, "F2", pattern, "trl-0.14")
    runs["label"] = runs["name"].map(labels)
    head = ["trl 0.14", *(f"{trained}, {kind}" for kind, trained in (place.split(", ") for place in places))]
    return grid(head, runs, reached, label=labels.values(), place=places)


def cures(records: list[Record]) -> str:
    """Every cure of "element 0": gradients, rewards alone and with the rollouts repaired, memory of a step."""
    steps = select_runs(records, "F2", "one step: (?P<name>.+)")
    body = []
    for name, runs in select_runs(records, "F2", "cure: (?P<name>.+?)(?P<repair>, rollouts repaired)?").groupby("name"):
        alone, both = runs[runs["repair"].isna()], runs[runs["repair"].notna()]
        best = alone if both.empty else both
        body.append(
            [
                name,
                f"{alone['reached'].min()} of {alone['trainable'].iloc[0]}",
                *(spread(part[end], missing="-") for part in (alone, both) for end in ("first", "last")),
                spread(best["accuracy_after"], missing="-"),
                median(steps[steps["name"] == name]["peak_mib"], ".0f", missing="-"),
                f"{best['seconds'].min():.1f}",
            ]
        )
    head = ["cure", "tensors with a gradient", "reward, first 10 steps", "last 10"]
    more = ["rollouts repaired too: first 10", "last 10", "accuracy after", "peak MiB of a step", "seconds, fastest"]
    return tables.markdown([*head, *more], body)


def depth(records: list[Record]) -> str:
    """Peak memory and seconds of a training step with LoRA, over the model's depth."""
    head = ["layers", "checkpointing off", "reentrant", "non-reentrant"]
    runs = select_runs(records, "F2", r"memory: (?P<layers>\d+) layers, (?P<kind>.+)", "today")

    def price(run):
        return f"{run['peak_mib']:.0f} MiB, {run['seconds']:.2f} s"

    return grid(head, runs, price, layers=("2", "4", "8", "16"), kind=_KINDS)


def families(records: list[Record]) -> str:
    """For each family of models: tensors with a gradient, and its largest difference from one without checkpointing."""
    runs = select_runs(records, "F2", "family: (?P<name>.+)")

    def compared(run):
        return f"{run['non-reentrant']} of {run['off']}, {run['non-reentrant_error']:.1g}"

    names, eras = sorted(set(runs["name"])), ("trl-0.14", "today")
    versions = dict(zip(runs["era"], runs["versions"]))
    head = ["non-reentrant", *(f"transformers {versions[era]['transformers']}" for era in eras)]
    return grid(head, runs, compared, name=names, era=eras)


def checkpoint_errors(records: list[Record]) -> str:
    """LoRA under ZeRO-3 with non-reentrant checkpointing, by DeepSpeed's version and with its repair switched off."""
    pattern = "ZeRO-3, non-reentrant, LoRA(?P<off>, DeepSpeed's repair off)?"
    body = []
    for _, run in select_runs(records, "F2", pattern).iterrows():
        version = f"DeepSpeed {run['versions']['deepspeed']}"
        name = version if isinstance(run["off"], float) or not run["off"] else f"{version}, its repair switched off"
        body.append([name, f"{run['reached']} of {run['trainable']}", run["error"].split(":")[0] or "no error"])
    return tables.markdown(["ZeRO-3", "tensors with a gradient", "raised"], sorted(body))


def imports(records: list[Record]) -> str:
    """Where the seconds of an import go."""

    def parts(run):
        of_which = {name.removeprefix("of which "): value for name, value in run["figures"].items() if "of " in name}
        return ", ".join(f"{name} {value}" for name, value in of_which.items())

    return table(
        ["era"],
        list_runs(select_runs(records, "ground", "import GRPOTrainer"), "era"),
        ("seconds", "seconds", ""),
        ("without compiled byte code", "seconds_without_byte_code", ""),
        ("of which (own seconds)", parts),
    )


def guards(records: list[Record]) -> str:
    """What guards cost: milliseconds added to the first step, which they judge, and the share added to later ones."""
    runs = select_runs(records, "ground", "overhead of guards: (?P<guard>.+Guard|all six)")
    runs = runs.sort_values(["guard", "era"], key=lambda column: column.replace("all six", "zzz"))
    body = [
        [
            run["guard"],
            run["era"],
            f"{1000 * run['first_step_seconds']:.0f}",
            f"{1000 * run['first_step_added_seconds']:+.0f}",
            f"{run['later_step_added_share']:+.0%}",
        ]
        for run in runs.to_dict("records")
    ]
    return tables.markdown(["guard", "era", "first step, ms", "of which added, ms", "added to later steps"], body)


def guard_faults(records: list[Record]) -> str:
    """Errors raised inside each guard, and the runs that went on all the same."""
    runs = select_runs(records, "ground", "faults in guards: (?P<guard>.+)").sort_values(["guard", "era"])
    head = ["guard", "era", "lines it runs", "of which raised an error", "runs that went on", "said in one warning"]
    body = [
        [run[name] for name in ("guard", "era", "lines", "faults", "went_on", "told")]
        for run in runs.to_dict("records")
    ]
    return tables.markdown(head, body)
