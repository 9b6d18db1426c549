"""The tables of notebook 08: four failures at once, and GRPO on 4-bit weights."""

import pandas

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import count, group_runs, median, select_runs, spread, table

FOUR = {
    "broken": "broken",
    "placement": "+ a map that each rank makes",
    "gradients": "+ gradients",
    "rollouts": "+ rollouts",
    "logits": "+ logits",
}


def four(records: list[Record]) -> str:
    """Four failures at once: what is measured before the first step, and the reward, after each repair."""
    runs = pandas.concat([select_runs(records, failure, "four at once: (?P<name>.+)") for failure in ("F2", "F7")])
    maps = select_runs(records, "F5", "four at once: placement as (?P<maker>.+) makes it").set_index("maker")

    def refused(runs):
        run = maps.loc["the script" if (runs["name"] == "broken").all() else "each rank"]
        return f"{run['refused']} of {run['ranks']}"

    def without(runs):
        ((missing, trainable),) = set(zip(runs["without_gradient"], runs["trainable"]))
        return f"{missing} of {trainable}"

    def rows(runs):
        times = runs["rows_made"] / runs["rows_needed"]
        return spread(times if times.any() else [], ".1f", "none kept")

    return table(
        ["run"],
        ((FOUR[name], of_name) for name, of_name in group_runs(runs, FOUR, "name").items()),
        ("ranks refused (simulated)", refused),
        ("without gradient", without),
        ("seeds with sane rollouts", lambda runs: count(runs["rollouts_agree"])),
        ("rows of logits, times needed", rows),
        ("reward, last 10 steps", lambda runs: spread(runs["last"], missing="an error in step 1")),
        (
            f"accuracy after ({median(runs['accuracy_before'])} before)",
            lambda runs: spread(runs["accuracy_after"], missing="-"),
        ),
    )


def qlora(records: list[Record]) -> str:
    """GRPO on 4-bit weights: what they and the adapters are after training, and whether it learns."""
    runs = select_runs(records, "ground", "QLoRA: (?P<name>.+)")

    def unchanged(runs):
        total = runs["quantized"].sum()
        return f"{runs['quantized_unchanged'].sum()} of {total}" if total else "-"

    return table(
        ["weights"],
        group_runs(runs, ("4 bit", "float32", "4 bit, learning rate 0"), "name").items(),
        ("greedy accuracy before", "greedy_before"),
        ("sampled before", "sampled_before"),
        ("sampled after", "sampled_after"),
        ("gain of 0.15 or more", lambda runs: count(runs["sampled_after"] >= runs["sampled_before"] + 0.15)),
        ("4-bit weights unchanged, bit for bit", unchanged),
        ("adapter tensors changed", lambda runs: f"{runs['adapters_changed'].sum()} of {runs['adapters'].sum()}"),
    )
