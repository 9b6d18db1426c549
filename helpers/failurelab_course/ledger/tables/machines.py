"""The tables about log-probabilities, engines and devices: failures F3 to F6."""

from collections.abc import Iterable

from failurelab_course.ledger.format import markdown, of, spread
from failurelab_course.ledger.records import Record

_ZERO3 = ("trl-0.14", "trl-0.15", "today")
MAIN_SHAPE = "4 x (256+64), width 256, tied, float32"
SIMULATED = ("Qwen2-0.5B, bf16", "Qwen2-7B, bf16", "Qwen2-7B, 4 bit and LoRA", "Qwen2.5-72B, bf16")


def names(records: list[Record]) -> str:
    """What each transformers calls the argument for the last rows of logits, and what it does with the other name."""
    (made,) = of(records, "F3a", "read in wheels")
    lines = zip(*(made["figures"][column] for column in ("transformers", "takes", "other_name")))
    return markdown(["transformers", "Qwen2 takes", "the other name is"], [list(line) for line in lines])


def misalignment(records: list[Record]) -> str:
    """One run with right and with wrong log-probabilities: the scores, the first step, and the reward."""
    body = []
    for name, era, runs in misaligned(records):
        first, last = ([run["rewards"][place] for run in runs] for place in (0, -1))
        prompts = "equal, bit by bit" if all(run["equal_to_prompt_positions"] for run in runs) else "other"
        body.append(
            [
                f"{era}, {name}",
                f"{max(run['largest_error'] for run in runs):.2g}",
                prompts,
                spread((abs(run["first_kl"]) + abs(run["first_loss"]) for run in runs), 0).split()[0],
                spread(first),
                spread(last),
                f"{sum(b > a for a, b in zip(first, last))} up, {sum(b < a for a, b in zip(first, last))} down",
            ]
        )
    head = ["run", "error of scores, nats", "against scores at the prompt", "first loss, KL"]
    return markdown([*head, "reward, first 10 steps", "last 10", "seeds"], body)


def misaligned(records: list[Record]) -> Iterable[tuple[str, str, list[dict]]]:
    """Yield name, era and figures of each kind of run, in the order in which they are told."""
    for era, name in (
        ("trl-0.14", "as released"),
        ("trl-0.14-tf-4.52", "as released"),
        ("trl-0.14-tf-4.52", "argument passed on"),
    ):
        runs = [made for made in of(records, "F3b", f"misalignment: {name}") if made["era"] == era]
        yield name, era, [made["figures"] for made in sorted(runs, key=lambda made: made["seed"])]


def log_probs(records: list[Record]) -> str:
    """Ways to score a completion: time and memory against kept logits in the same run, and errors; `-` for none."""
    made = {r["case"].removeprefix("log-probs: "): r["figures"] for r in records if r["case"].startswith("log-probs: ")}
    body = []
    for case in sorted(made, key=lambda case: (MAIN_SHAPE not in case, case.partition(", 2 x")[1:], case)):
        way, _, shape = case.replace(", selective", "; selective").replace(", GRPO", "; GRPO").partition(", ")
        if MAIN_SHAPE not in case and way != "completion_logps":
            continue
        run = made[case]
        if "not_run" in run:
            body.append([shape, way.replace(";", ","), "NOT RUN", *[""] * 5])
            continue
        body.append(
            [
                shape,
                way.replace(";", ","),
                f"{run['time_to_kept']:.2f}",
                f"{run['beyond_gradients_mib']:.0f}",
                f"{run['memory_to_kept']:.2f}",
                f"{run['gradients_mib']:.0f}",
                *(f"{run[name]:.0e}" if name in run else "-" for name in ("score_error", "gradient_error")),
            ]
        )
    head = ["batch x (prompt + completion)", "way", "time, to kept", "MiB beyond gradients", "to kept"]
    return markdown([*head, "floor: gradients, MiB", "error, nats", "of gradients"], body)


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
        found = {made["era"]: made["figures"] for made in of(records, "F4", f"generation: {way}")}
        hooks = {figures["hooks"] for figures in found.values()}
        shown = [f"{found[era]['ratio']:.1f}" if era in found else "not recorded" for era in _ZERO3]
        body.append([way, *map(str, sorted(hooks)), *shown])
    return markdown(["generation", "hooks meanwhile", *_ZERO3], body)


def zero3_parity(records: list[Record]) -> str:
    """How far gathered parameters end from those of the run without DeepSpeed, on fixed completions."""
    body = []
    for stage in range(4):
        found = {made["era"]: made["figures"] for made in of(records, "F4", f"parity: stage {stage}")}
        shown = [f"{found[era]['largest_difference']:.0e}" if era in found else "not recorded" for era in _ZERO3]
        body.append([f"stage {stage}", *shown])
    moved = [made["figures"]["largest_change"] for made in records if made["case"].startswith("parity: stage")]
    body.append(["for scale: the largest change", *[f"{max(moved, default=0):.0e}"] * len(_ZERO3)])
    return markdown(["largest difference of a parameter", *_ZERO3], body)


def zero3_shards(records: list[Record]) -> str:
    """What one of two processes holds at each stage."""
    body = []
    for stage in range(4):
        for made in of(records, "F4", f"held by one of two: stage {stage}"):
            found = made["figures"]
            body.append([f"stage {stage}", *(f"{found[key]:,}" for key in ("parameters", "gradients", "state"))])
    return markdown(["elements held by one of two", "parameters", "gradients", "optimizer state"], body)


def simulated(records: list[Record]) -> str:
    """Peak memory of one step of known shapes on simulated devices, beside what can be worked out by hand."""
    rows = []
    for name in SIMULATED:
        (made,) = [each for each in of(records, "F5", f"simulated step: {name}") if each["era"] == "today"]
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
    return markdown([*columns, "difference / one score matrix a layer"], rows)
