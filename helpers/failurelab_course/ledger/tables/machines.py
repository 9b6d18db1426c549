"""The tables about log-probabilities, engines and devices: failures F3 to F6."""

from failurelab_course.ledger.records import Record
from failurelab_course.ledger.tables import grid, group_runs, list_runs, markdown, median, select_runs, table

_ZERO3 = ("trl-0.14", "trl-0.15", "today")
_STAGES = [f"stage {stage}" for stage in range(4)]
LOG_PROBS = r"log-probs: (?P<way>.+?), (?P<shape>\d+ x \(.+)"  # the case of a run of benchmarks/logps.py
MAIN_SHAPE = "4 x (256+64), width 256, tied, float32"
MISALIGNED = ("trl-0.14, as released", "trl-0.14-tf-4.52, as released", "trl-0.14-tf-4.52, argument passed on")
SIMULATED = ("Qwen2-0.5B, bf16", "Qwen2-7B, bf16", "Qwen2-7B, 4 bit and LoRA", "Qwen2.5-72B, bf16")


def names(records: list[Record]) -> str:
    """What each transformers calls the argument for the last rows of logits, and what it does with the other name."""
    (metrics,) = select_runs(records, "F3a", "read in wheels")["figures"]
    lines = zip(*(metrics[column] for column in ("transformers", "takes", "other_name")))
    return markdown(["transformers", "Qwen2 takes", "the other name is"], lines)


def misalignment(records: list[Record]) -> str:
    """One run with right and with wrong log-probabilities: the scores, the first step, and the reward."""

    def prompts(runs):
        return "equal, bit by bit" if all(runs["equal_to_prompt_positions"]) else "other"

    def seeds(runs):
        return f"{(runs['last'] > runs['first']).sum()} up, {(runs['last'] < runs['first']).sum()} down"

    return table(
        ["run"],
        group_runs(select_runs(records, "F3b", "misalignment: (?P<name>.+)"), MISALIGNED, "era", "name").items(),
        ("error of scores, nats", lambda runs: f"{runs['largest_error'].max():.2g}"),
        ("against scores at the prompt", prompts),
        ("first loss, KL", lambda runs: median(runs["first_kl"].abs() + runs["first_loss"].abs(), ".0f")),
        ("reward, first 10 steps", "first"),
        ("last 10", "last"),
        ("seeds", seeds),
    )


def log_probs(records: list[Record]) -> str:
    """Ways to score a completion: time and memory against kept logits in the same run, and errors; `-` for none."""
    runs = select_runs(records, "F3a", LOG_PROBS)
    runs["other"] = runs["shape"] != MAIN_SHAPE  # of other shapes only our own way is shown, after the main one
    runs["small"] = runs["shape"].str.startswith("2 x")
    runs = runs[~runs["other"] | (runs["way"] == "completion_logps")].sort_values(["other", "small", "shape", "way"])

    def time(run):
        return "NOT RUN" if "not_run" in run["figures"] else f"{run['time_to_kept']:.2f}"

    def error(name):
        return lambda run: format(run["figures"][name], ".0e") if name in run["figures"] else missing(run)

    def missing(run):
        return "" if "not_run" in run["figures"] else "-"

    return table(
        ["batch x (prompt + completion)", "way"],
        list_runs(runs, "shape", "way"),
        ("time, to kept", time),
        ("MiB beyond gradients", "beyond_gradients_mib", ".0f"),
        ("to kept", "memory_to_kept"),
        ("floor: gradients, MiB", "gradients_mib", ".0f"),
        ("error, nats", error("score_error")),
        ("of gradients", error("gradient_error")),
    )


def zero3_generation(records: list[Record]) -> str:
    """How long generation takes under ZeRO-3, as a multiple of what it takes with the engine handed over."""
    ways = (
        "without DeepSpeed",
        "engine handed over, hooks off",
        "bare model handed over, hooks on",
        "model.generate by itself",
    )
    runs = select_runs(records, "F4", "generation: (?P<way>.+)")
    ratios = ((era, lambda runs, era=era: median(runs[runs["era"] == era]["ratio"], ".1f")) for era in _ZERO3)
    hooks = ("hooks meanwhile", lambda runs: runs["hooks"].iloc[0])
    return table(["generation"], group_runs(runs, ways, "way").items(), hooks, *ratios)


def zero3_parity(records: list[Record]) -> str:
    """How far gathered parameters end from those of the run without DeepSpeed, on fixed completions."""
    head = ["largest difference of a parameter", *_ZERO3]
    runs = select_runs(records, "F4", "parity: (?P<stage>stage .)")
    stages = grid(head, runs, lambda run: f"{run['largest_difference']:.0e}", stage=_STAGES, era=_ZERO3)
    moved = f" {runs['largest_change'].max():.0e} |" * len(_ZERO3)
    return f"{stages}\n| for scale: the largest change |{moved}"


def zero3_shards(records: list[Record]) -> str:
    """What one of two processes holds at each stage."""
    return table(
        ["elements held by one of two"],
        list_runs(select_runs(records, "F4", "held by one of two: (?P<stage>stage .)"), "stage"),
        ("parameters", "parameters", ","),
        ("gradients", "gradients", ","),
        ("optimizer state", "state", ","),
    )


def simulated(records: list[Record]) -> str:
    """Peak memory of one step of known shapes on simulated devices, beside what can be worked out by hand."""
    runs = select_runs(records, "F5", "simulated step: (?P<name>.+)", "today").set_index("name", drop=False)
    sizes = ["peak_bytes", "weights_bytes", "weights_by_hand", "activations_bytes", "decomposed_bytes"]
    runs["scores"] = (runs["decomposed_bytes"] - runs["peak_bytes"]) / runs["scores_by_hand"]
    runs[sizes] = runs[sizes].astype(float) / 2**30
    return table(
        ["GiB at the peak"],
        list_runs(runs.loc[list(SIMULATED)], "name"),
        ("all", "peak_bytes", ".1f"),
        ("weights", "weights_bytes", ".1f"),
        ("weights by hand", "weights_by_hand", ".1f"),
        ("activations", "activations_bytes", ".1f"),
        ("attention decomposed", "decomposed_bytes", ".1f"),
        ("difference / one score matrix a layer", "scores", ".1f"),
    )
