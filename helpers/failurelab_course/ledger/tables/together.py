"""The tables of notebook 08: four failures at once, and GRPO on 4-bit weights."""

from failurelab_course.ledger.format import markdown, of, spread
from failurelab_course.ledger.records import Record

FOUR = {
    "broken": "broken",
    "placement": "+ a map that each rank makes",
    "gradients": "+ gradients",
    "rollouts": "+ rollouts",
    "logits": "+ logits",
}


def four(records: list[Record]) -> str:
    """Four failures at once: what is measured before the first step, and the reward, after each repair."""
    maps = ("as the script makes it", "as each rank makes it")
    (early,), (each_rank,) = (of(records, "F5", f"four at once: placement {name}") for name in maps)
    body = []
    for count, (case, name) in enumerate(FOUR.items()):
        runs = [made["figures"] for id in ("F2", "F7") for made in of(records, id, f"four at once: {case}")]
        (without,) = {f"{run['without_gradient']} of {run['trainable']}" for run in runs}
        refused = (each_rank if count else early)["figures"]
        wide = [run["rows_made"] / run["rows_needed"] for run in runs]
        trained = [run for run in runs if "rewards" in run]
        body.append(
            [
                name,
                f"{refused['refused']} of {refused['ranks']}",
                without,
                f"{sum(run['rollouts_agree'] for run in runs)} of {len(runs)}",
                spread(wide, 1) if any(wide) else "none kept",
                spread(run["rewards"][-1] for run in trained) if trained else "an error in step 1",
                spread(run["accuracy_after"] for run in trained) if trained else "-",
            ]
        )
    able = spread(run["accuracy_before"] for run in trained).split()[0]
    head = ["run", "ranks refused (simulated)", "without gradient", "seeds with sane rollouts"]
    head += ["rows of logits, times needed", "reward, last 10 steps", f"accuracy after ({able} before)"]
    return markdown(head, body)


def qlora(records: list[Record]) -> str:
    """GRPO on 4-bit weights: what they and the adapters are after training, and whether it learns."""
    body = []
    for name in ("4 bit", "float32", "4 bit, learning rate 0"):
        runs = [made["figures"] for made in of(records, "ground", f"QLoRA: {name}")]
        kept = sum(run["quantized_unchanged"] for run in runs)
        total = sum(run["quantized"] for run in runs)
        body.append(
            [
                name,
                spread(run["greedy_before"] for run in runs),
                spread(run["sampled_before"] for run in runs),
                spread(run["sampled_after"] for run in runs),
                f"{sum(run['sampled_after'] >= run['sampled_before'] + 0.15 for run in runs)} of {len(runs)}",
                f"{kept} of {total}" if total else "-",
                f"{sum(run['adapters_changed'] for run in runs)} of {sum(run['adapters'] for run in runs)}",
            ]
        )
    head = ["weights", "greedy accuracy before", "sampled before", "sampled after", "gain of 0.15 or more"]
    return markdown([*head, "4-bit weights unchanged, bit for bit", "adapter tensors changed"], body)
