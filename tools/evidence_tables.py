"""The tables of README.md and of docs/: each public function makes the one of its name, from a benchmark's file."""

import statistics
from collections.abc import Callable
from typing import Any

import pandas
from evidence import (
    CPU,
    count,
    find_cards,
    fold,
    grid,
    group_runs,
    list_runs,
    markdown,
    median,
    read_runs,
    spread,
    table,
    version_heads,
)

CURVES = ("checkpointing off", "broken", "gradients repaired", "rollouts repaired", "both repaired")
MISALIGNED = ("trl-0.14, as released", "trl-0.14-tf-4.52, as released", "trl-0.14-tf-4.52, argument passed on")
ERAS = ("trl-0.14", "today")
KINDS = ("off", "reentrant", "non-reentrant")
NO_CARD = "No evidence of a GPU yet: on a card this is NOT RUN."


# Gradients, rollouts and learning: F1, F2, F7 and the healthy ground


def learning() -> str:
    """GRPO on the small Qwen2: sampled accuracy before and after, in each era."""
    return table(
        ["era"],
        group_runs(read_runs("learning"), ERAS, "era").items(),
        ("sampled accuracy before", "sampled_before"),
        ("after", "sampled_after"),
        ("gain of 0.2 or more", lambda runs: f"{count(runs['sampled_after'] - runs['sampled_before'] >= 0.2)} seeds"),
        ("seconds", "seconds", ".0f"),
    )


def comes_back() -> str:
    """Frozen embeddings, no adapter: tensors that change in three steps, by what was asked for, cure and release."""
    eras = ("trl-0.14", "trl-0.15", "trl-0.22", "today")
    runs = read_runs("reentrant_comes_back", "comes back, (?P<asked>.+)")
    head = ["asked for, or cure beside reentrant", *version_heads(runs, eras, "trl", "transformers")]
    asked = list(dict.fromkeys(runs["asked"]))
    return grid(head, runs, lambda run: f"{_changed(run)}, {run['in_force']}", asked=asked, era=eras)


def generation() -> str:
    """Greedy accuracy of generation, by set-up and version."""
    labels = {
        "eval mode, checkpointing reentrant, cache, mixed lengths, sdpa": "evaluation",
        "train mode, checkpointing off, cache, mixed lengths, sdpa": "train mode, checkpointing off",
        "train mode, checkpointing reentrant, cache, mixed lengths, sdpa": "train mode, reentrant",
        "train mode, checkpointing non-reentrant, cache, mixed lengths, sdpa": "train mode, non-reentrant",
        "train mode, checkpointing non-reentrant, no cache, mixed lengths, sdpa": "non-reentrant, `use_cache=False`",
        "train mode, checkpointing non-reentrant, cache, equal lengths, sdpa": "non-reentrant, prompts of equal length",
        "train mode, checkpointing non-reentrant, cache, equal lengths, eager": "the same with eager attention",
    }
    eras = ("trl-0.14", "trl-0.14-tf-4.52", "today")
    runs = read_runs("generation_matrix", "|".join(labels))
    runs["label"] = runs["case"].map(labels)
    head = ["generation in", *version_heads(runs, eras, "transformers")]
    return grid(head, runs, lambda run: f"{run['greedy_accuracy']:.2f}", label=labels.values(), era=eras)


def curves() -> str:
    """The run that is broken twice: what each repair does, k of n seeds."""
    runs = group_runs(read_runs("rollout_curves", "curve: (?P<name>.+)"), CURVES, "name")
    return table(
        ["run"],
        runs.items(),
        ("reward, first 10 steps", "first"),
        ("last 10", "last"),
        (f"accuracy after ({median(runs[CURVES[0]]['accuracy_before'])} before)", "accuracy_after"),
        ("rollouts sane", lambda runs: count(runs["first"] > runs["accuracy_before"] - 0.08)),
        ("learned", lambda runs: count(runs["accuracy_after"] > runs["accuracy_before"] + 0.1)),
    )


def suspects() -> str:
    """Which suspects of "element 0" change anything: tensors that a gradient reaches, by set-up, in trl 0.14."""
    places = [f"{kind}, {trained}" for trained in ("full", "LoRA") for kind in KINDS]
    pattern = rf"(matrix: )?(?P<name>.+?), (?P<place>{'|'.join(places)})"
    runs = pandas.concat([read_runs(name, pattern, "trl-0.14") for name in ("peft_matrix", "peft_zero")])
    labels = {name: f"Qwen2, float32, DeepSpeed {name}" for name in ("ZeRO-2", "ZeRO-3")}
    dtypes = ("float32", "bf16 autocast", "bf16 weights")
    names = [*(f"{family}, {dtype}" for family in ("Qwen2", "Llama") for dtype in dtypes), *labels.values()]
    runs["label"] = runs["name"].map(lambda name: labels.get(name, name))

    def reached(run: Any) -> str:
        return f"{_reached(run)}{', ' if run['error'] else ''}{run['error'].split(':')[0]}"

    head = ["trl 0.14", *(f"{trained}, {kind}" for kind, trained in (place.split(", ") for place in places))]
    return grid(head, runs, reached, label=names, place=places)


def cures() -> str:
    """Every cure of "element 0": gradients, rewards alone and with the rollouts repaired."""
    body = []
    runs = read_runs("peft_cures", "cure: (?P<name>.+?)(?P<repair>, rollouts repaired)?")
    for name, group in runs.groupby("name"):
        alone, both = group[group["repair"].isna()], group[group["repair"].notna()]
        ends = (spread(part[end], missing="-") for part in (alone, both) for end in ("first", "last"))
        gradients = f"{alone['reached'].min()} of {alone['trainable'].iloc[0]}"
        accuracy = spread((alone if both.empty else both)["accuracy_after"])
        body.append([name, gradients, *ends, accuracy])
    head = ["cure", "tensors with a gradient", "reward, first 10 steps", "last 10"]
    return markdown([*head, "rollouts repaired too: first 10", "last 10", "accuracy after"], fold(body))


def checkpoint_errors() -> str:
    """LoRA under ZeRO-3 with non-reentrant checkpointing, by DeepSpeed's version and with its repair switched off."""
    body = []
    runs = read_runs("peft_zero", "ZeRO-3, non-reentrant, LoRA(?P<off>, DeepSpeed's repair off)?")
    for run in runs.to_dict("records"):
        off = ", its repair switched off" if run["off"] else ""
        name = f"DeepSpeed {run['versions']['deepspeed']}{off}"
        body.append([name, _reached(run), run["error"].split(":")[0] or "no error"])
    return markdown(["ZeRO-3", "tensors with a gradient", "raised"], sorted(body))


def guards() -> str:
    """What guards cost: milliseconds added to the first step, which they judge, and the share added to later ones."""
    runs = read_runs("guards", "overhead of guards: (?P<guard>.+Guard|all six)")

    def cost(run: Any) -> str:
        return f"{1000 * run['first_step_added_seconds']:+.0f} ms, {run['later_step_added_share']:+.0%}"

    names = [*sorted(set(runs["guard"]) - {"all six"}), "all six"]
    return grid(["added to the first step, to later ones", *ERAS], runs, cost, guard=names, era=ERAS)


# Log-probabilities, memory and devices: F3 to F6


def names() -> str:
    """What each transformers calls the argument for the last rows of logits, and what it does with the other name."""
    (figures,) = [each for each in read_runs("signatures")["figures"] if "takes" in each]
    lines = zip(*(figures[column] for column in ("transformers", "takes", "other_name")))
    return markdown(["transformers", "Qwen2 takes", "the other name is"], lines)


def misalignment() -> str:
    """One run with right and with wrong log-probabilities: the scores, the first step, and the reward."""

    def seeds(runs: pandas.DataFrame) -> str:
        return f"{(runs['last'] > runs['first']).sum()} up, {(runs['last'] < runs['first']).sum()} down"

    return table(
        ["run"],
        group_runs(read_runs("misalignment", "misalignment: (?P<name>.+)"), MISALIGNED, "era", "name").items(),
        ("error of scores, nats", lambda runs: f"{runs['largest_error'].max():.2g}"),
        (
            "against scores at the prompt",
            lambda runs: "equal, bit by bit" if all(runs["equal_to_prompt_positions"]) else "other",
        ),
        ("first loss, KL", lambda runs: median(runs["first_kl"].abs() + runs["first_loss"].abs(), ".0f")),
        ("reward, first 10 steps", "first"),
        ("last 10", "last"),
        ("seeds", seeds),
    )


def predicted() -> str:
    """Peak memory as simulated and as measured, for the CPU and for each card."""

    def make_part(device: str) -> str:
        runs = read_runs("predicted", "predicted: (?P<step>.+)", device=device)
        runs["step"] = runs["step"].str.replace(", checkpointing off|, float32", "", regex=True)
        rows = table(
            ["MiB beyond the weights"],
            list_runs(runs, "step"),
            ("simulated", "predicted_mib", ".1f"),
            ("measured", lambda run: _not_run(run) or f"{run['measured_mib']:.1f}"),
            ("simulated / measured", "ratio", ".3f"),
        )
        return _measured_on(runs, rows)

    cards = find_cards("predicted")
    return "\n\n".join([*map(make_part, [CPU, *cards]), *([] if cards else [NO_CARD])])


# Dtypes, two policies


def paths() -> str:
    """What holds on each way from a model to a trainer, asked before the trainer is made and after, by era."""
    runs = read_runs("adapter_paths", r"paths: (?P<question>.+), (?P<path>[^,]+), (?P<when>before|after)")
    eras = tuple(dict.fromkeys(runs["era"]))

    def cell(part: pandas.DataFrame) -> str:
        holds = part.groupby("path", sort=False)["holds"].all()
        lost = ", ".join(holds[~holds.astype(bool)].index)
        text = f"{int(holds.sum())} of {len(holds)}" + (f"; not: {lost}" if lost else "")
        return text if part["needed"].any() else f"{text} (not needed here)"

    lines = [
        [f"`{question}`" if "." in question else question, *(cell(part[part["era"] == era]) for era in eras)]
        for question, part in runs.groupby("question", sort=False)
    ]
    return markdown(["paths on which it holds", *version_heads(runs, eras, "trl", "transformers", "peft")], lines)


def qlora_adapters() -> str:
    """QLoRA with adapters in bfloat16, as trl casts them, and cast back to float32: accuracy, and what a step moves."""
    runs = read_runs("qlora_adapters", r"QLoRA: adapters in (?P<dtype>\w+), learning rate (?P<rate>\S+)")

    def at(name: str, look: int) -> Callable[[pandas.DataFrame], str]:
        return lambda part: _percent(pandas.Series([shares[look] for shares in part[name]]))

    return table(
        ["learning rate", "adapters in"],
        runs.groupby(["rate", "dtype"], sort=False),
        ("accuracy after 600 steps", "accuracy_after", ".3f"),
        ("of A changed in step 20", at("share_a", 0)),
        ("in step 600", at("share_a", -1)),
        ("of B in step 20", at("share_b", 0)),
        ("in step 600", at("share_b", -1)),
        ("seeds", lambda part: len(part)),
    )


def rounding_shares() -> str:
    """What a share of elements that a step changes means for learning: bfloat16 against float32 at the same rate."""
    runs = read_runs("rounding", r"share: (?P<dtype>\w+), learning rate (?P<rate>\S+)")
    lines = []
    for (rate, steps), part in runs.groupby(["rate", "steps"], sort=False):
        low, whole = (part[part["dtype"] == dtype] for dtype in ("bfloat16", "float32"))
        gains = [
            statistics.fmean(each["accuracy_after"]) - statistics.fmean(each["accuracy_before"])
            for each in (low, whole)
        ]
        lines.append(
            [rate, steps, _percent(low["first_step"]), spread(low["accuracy_after"], ".3f"),
             spread(whole["accuracy_after"], ".3f"), f"{gains[0] / gains[1]:.0%}", len(low)]
        )  # fmt: skip
    head = ["learning rate", "steps", "changed by the first step, bfloat16", "accuracy after, bfloat16", "float32"]
    return markdown([*head, "of float32's gain", "seeds"], lines)


def rounding() -> str:
    """Elements changed, predicted and real, by what is trained, dtype and learning rate, in today's stack."""
    runs = read_runs("rounding", r"(?P<trained>(full|LoRA).*), (?P<dtype>\w+), learning rate (?P<rate>\S+)")
    return table(
        ["what is trained", "model in", "learning rate"],
        runs[runs["era"] == "today"].groupby(["trained", "dtype", "rate"], sort=False),
        ("predicted", lambda runs: _percent(runs["predicted"])),
        ("first step, real", lambda runs: _percent(runs["first_step"])),
        ("changed in the end", lambda runs: _percent(runs["changed"] / runs["elements"])),
        ("grad_norm", lambda runs: median(runs["grad_norm"])),
        ("accuracy after", "accuracy_after"),
    )


def rounding_cures() -> str:
    """Each cure at the same learning rate: what changed, and accuracy against no cure."""
    runs = read_runs("rounding", "cure: (?P<cure>.+)")
    groups = dict(list(runs.groupby("cure", sort=False)))
    none = groups["none"]["accuracy_after"]

    def verdict(runs: pandas.DataFrame) -> str:
        if len(runs) < 2:
            return "one seed, 20 steps"
        noise = 3 * max(statistics.stdev(runs["accuracy_after"]), statistics.stdev(none))
        gain = runs["accuracy_after"].mean() - none.mean()
        return "better" if gain > noise else "worse" if gain < -noise else "no difference"

    return table(
        ["cure"],
        groups.items(),
        ("changed in the end", lambda runs: _percent(runs["changed"] / runs["elements"])),
        ("accuracy after", "accuracy_after"),
        ("against none", verdict),
    )


def update_guard() -> str:
    """Runs with the failure and without, and what the guard said of them."""
    runs = read_runs("rounding", "(?!share).*").astype({"lost": bool, "alarm": bool})
    lines = [
        [era, count(part[part["lost"]]["alarm"]), count(part[~part["lost"]]["alarm"])]
        for era, part in runs.groupby("era")
    ]
    return markdown(["era", "runs with the failure that it found", "healthy runs that it warned of"], lines)


def weights() -> str:
    """Rounding alone: what one weight for a sequence, and one for each token, leave of a batch, by length."""
    runs = read_runs("two_policies", "weights: (?P<engine>.+), (?P<tokens>\\d+) tokens")
    runs = runs.assign(tokens=runs["tokens"].astype(int)).sort_values(["engine", "tokens"])
    runs = runs[runs["tokens"] != 64]  # between those of 16 and 256 tokens in every column
    return table(
        ["engine", "tokens"],
        list_runs(runs, "engine", "tokens"),
        ("mean gap, nats", "gap", ".3f"),
        (
            "weight: smallest, median, largest",
            lambda run: f"{run['smallest']:.3f}, {run['median']:.2f}, {run['largest']:.2f}",
        ),
        ("left out (above 3)", lambda run: f"{round(run['masked'] * run['sequences'])} of {run['sequences']}"),
        ("effective sample size", "effective"),
        ("with one for each token", "effective_token", ".3f"),
    )


def engine_guard() -> str:
    """EngineMismatchGuard on runs with a fault, by kind, and on runs in which nothing is wrong."""
    runs = read_runs("two_policies", "guard: (?P<name>.+)")
    runs["is"] = runs["expected"].where(runs["expected"] != "", "healthy")
    return table(
        ["the run is"],
        runs.groupby("is"),
        ("runs", lambda runs: str(len(runs))),
        ("the guard trips", lambda runs: count(runs["told"].astype(bool))),
        ("and names the kind", lambda runs: count(runs["told"].astype(bool) & (runs["looks_like"] == runs["is"]))),
        ("mean gap at the end, at most", lambda runs: f"{runs['gap_last'].max():.3f}"),
    )


# Labs, preflight, and how long it takes


def lab_cures() -> str:
    """How many cures of each lab that its author did not have in mind the checker passes; their names would tell."""
    runs = read_runs("lab_cures", r"cures of lab (?P<lab>\d+)").sort_values("lab")
    passing = ("other cures that pass", lambda run: f"{run['results'].count('PASS')} of {len(run['results'])}")
    return table(["lab"], list_runs(runs, "lab"), passing)


def lab_thresholds() -> str:
    """The thresholds nearest to what a solution measures, beside broken scripts; and how many are farther."""
    runs = read_runs("lab_thresholds", r"threshold of lab (?P<lab>\d+): .*").sort_values("case")
    near = runs["spreads_to_solution"] < 1.5

    def side(name: str) -> tuple:
        return name, lambda run: f"{min(run[name]):.3g} to {max(run[name]):.3g}" if run[name] else "-"

    rows = table(
        ["lab"],
        list_runs(runs[near], "lab"),
        ("threshold", lambda run: f"`{run['check']}`"),
        side("broken"),
        side("solution"),
        ("spreads between", "spreads_to_solution", ".1f"),
    )
    passed, tried = runs["solutions_that_pass"].sum(), runs["seeds"].sum()
    return f"{rows}\n\n{(~near).sum()} more are farther. Of all figures of solutions {passed} of {tried} pass."


def preflight() -> str:
    """What preflight said of the corpus: an outcome for each broken script, by part; the healthy ones; and chains."""
    runs = read_runs("preflight_corpus", "preflight: (?P<name>.+)")
    outcomes = ("named right", "suspected", "silent", "not judged")
    is_broken, body = runs["expected"] != "none", []
    broken, healthy = runs[is_broken], runs[~is_broken]
    for half, part in broken.groupby("half"):
        counts = [int((part["outcome"] == outcome).sum()) for outcome in outcomes]
        body.append([half, part["rules"].iloc[0], len(part), *counts, count(part["first"])])
    accused = (~healthy["outcome"].isin(["silent", "not judged"])).sum()
    chains = broken[broken["expected"].str.contains(",")]
    clean = runs["patched_clean"].dropna()
    return "\n".join([
        markdown(["broken", "rules", "scripts", *outcomes, "cause first"], body), "",
        f"- Named wrong: {(broken['outcome'] == 'named wrong').sum()} of {len(broken)}.",
        f"- Healthy: {accused} of {len(healthy)} accused, {(healthy['outcome'] == 'not judged').sum()} not judged.",
        f"- Several failures, all named in order: {count(chains['in_order'])}.",
        f"- Patched by `--diff`, and nothing is found: {count(clean) if len(clean) else 'NOT RUN'}.",
        f"- Seconds, all runs of a script, median: {median(runs['seconds'], '.0f')}.",
    ])  # fmt: skip


def preflight_judges() -> str:
    """How often each judge of preflight accused, held, and could not say, over the corpus' scripts that were run.

    And how often it held, before it had a control, where it cannot say now.
    """
    runs = read_runs("preflight_corpus", "preflight: (?P<name>.+)")
    counts = pandas.DataFrame({
        state: runs[state].dropna().str.split(", ").explode().value_counts()
        for state in ("named", "suspected", "held", "not_checked")
    }).drop(index=["", "none"], errors="ignore").fillna(0).astype(int)  # fmt: skip
    order = sorted(counts.index, key=lambda name: (name[0] != "F", len(name), name))
    before = read_runs("preflight_before", "before: (?P<name>.+)").set_index("name")["held"]
    both = runs[runs["name"].isin(before.index)].set_index("name")["not_checked"].str.split(", ")

    def once(judge: str) -> str:
        blind = [name for name, judges in both.items() if judge in judges]
        return f"{sum(judge in before[name].split(', ') for name in blind)} of {len(blind)}"

    body = [
        [
            name,
            counts.at[name, "named"] + counts.at[name, "suspected"],
            *counts.loc[name, ["held", "not_checked"]],
            once(name),
        ]
        for name in order
        if counts.at[name, "not_checked"]
    ]
    always = [name for name in order if not counts.at[name, "not_checked"]]
    counted = markdown(["judge of", "accused", "held", "not checked", "of these held before"], body)
    return (
        f"{counted}\n\nThe last column is of {len(both)} scripts that preflight judged without controls too, at commit "
        f"{read_runs('preflight_before')['rules'].iloc[0]}. Always with an answer: {', '.join(always)}."
    )


def preflight_time() -> str:
    """What one run of preflight costs as a whole process, beside the imports that the script itself needs, by stack.

    Medians of five runs.
    """
    runs = read_runs("preflight_time").to_dict("records")
    form = (
        "- {stack}: one run {seconds_of_one_run:g} seconds and {peak_mib_of_one_run} MiB, with its repairs {seconds:g} "
        "and {peak_mib} (imports: {seconds_of_imports_alone:g} seconds)"
    )
    return "\n".join(form.format(**run) for run in runs)


def minutes() -> str:
    """How long each whole command takes on an idle machine: the median, and the range."""
    names = {
        "course": "`failurelab run`: all notebooks",
        "verify": "`failurelab verify`: all labs in three states",
        "fast": "`make test-fast`, once set up",
        "suite": "`make test`, once set up",
    }
    runs = read_runs("minutes").to_dict("records")
    body = [[names[run["case"]], spread([each / 60 for each in run["seconds_of_each"]], ".1f")] for run in runs]
    return markdown([f"on {runs[0]['cores']} cores", "minutes"], body)


def textbook_fresh() -> str:
    """Mistakes and healthy trainers by people who had not read the rules: how many were found."""
    runs = read_runs("textbook_fresh", r"(?P<kind>mistake|healthy): (?P<name>.+)")
    runs["missed"] = runs["verdict"].isin(["held", "not checked"])
    parts = list(dict.fromkeys(runs["part"]))
    mistakes, healthy = (
        [runs[(runs["kind"] == kind) & (runs["part"] == part)] for part in parts] for kind in ("mistake", "healthy")
    )
    body = [
        ["mistakes: found", *(count(~part["missed"].astype(bool)) for part in mistakes)],
        ["of these, rightly named", *((part["verdict"] == "named").sum() for part in mistakes)],
        ["named wrongly", *((part["verdict"] == "named wrongly").sum() for part in mistakes)],
        ["healthy trainers: accused", *(count(~part["missed"].astype(bool)) for part in healthy)],
    ]
    return markdown(["", *(f"{part} part" for part in parts)], body)


def reward_functions() -> str:
    """Reward functions by somebody who had not read the judge: what is said of broken and of sound ones."""
    runs = read_runs("reward_functions", r"(?P<part>\w+): (?P<name>.+)")
    states = {"named": "named, the cause undone", "found": "found", "read": "NOT CHECKED, with the cause",
              "wrong one": "another one accused", "missed": "missed"}  # fmt: skip
    broken, sound = runs[runs["part"] != "sound"], runs[runs["part"] == "sound"]
    said = "; ".join(f"{(broken['verdict'] == state).sum()} {text}" for state, text in states.items())
    accused = count(sound["verdict"] == "accused")
    return f"{len(broken)} dead, blind or inverted reward functions: {said}. Sound, but odd: {accused} accused."


def textbook() -> str:
    """One step beside the textbook, by release: what held, what was found, and how near it lay."""
    pattern = r"(?P<part>kind|option|combination|mixed|planted)( \d+)?: (?P<name>.+)"
    runs = read_runs("textbook", pattern)
    eras = list(dict.fromkeys(runs["era"]))
    parts = {
        "kind": "kinds of training: held",
        "option": "one option varied: held",
        "combination": "combinations of two to four: held",
        "mixed": "healthy set-ups drawn at random: held",
        "planted": "planted bugs: found",
    }

    def cells(of: Callable[[pandas.DataFrame], str], part: str = "kind|option|combination|mixed") -> list[str]:
        chosen = runs[runs["part"].str.fullmatch(part)]
        return [of(chosen[chosen["era"] == era]) for era in eras]

    def held(part: pandas.DataFrame) -> str:
        if part.empty:
            return "NOT RUN"
        states = part["verdict"].value_counts()
        others = [f"{states[state]} {state}" for state in states.index if state != "held"]
        return ", ".join([f"{states.get('held', 0)} of {len(part)}", *others])

    def found(part: pandas.DataFrame) -> str:
        if part.empty:
            return "NOT RUN"
        states = part["verdict"].value_counts()
        right, wrong = states.get("named", 0), states.get("named wrongly", 0)
        return f"{right + wrong + states.get('found', 0)} of {len(part)}, {right} named, {wrong} named wrongly"

    def least(part: pandas.DataFrame) -> str:
        exact = part[(part["verdict"] == "held") & (part["floor_cosine"] == 0)]
        if exact.empty:
            return "NOT RUN"
        return f"{exact['cosine'].min():.5f}, {(exact['size'] - 1).abs().max():.4f}"

    body = [[label, *cells(found if part == "planted" else held, part)] for part, label in parts.items()]
    body.append(["float32 without dropout: lowest cosine, size's distance from 1", *cells(least)])
    table = markdown(["", *version_heads(runs, eras, "trl")], body)
    wrong = runs[runs["verdict"].isin(["found", "named wrongly", "not found"])].fillna({"named": "nothing"})
    wrong["release"] = [run["trl"] for run in wrong["versions"]]
    lines = [
        f"- trl {release}, {part}, {verdict}, named {named}: {'; '.join(cases['name'])}"
        for (release, part, verdict, named), cases in wrong.groupby(["release", "part", "verdict", "named"], sort=False)
    ]
    return "\n".join([table, "", "What did not hold, and what was not named:", "", *lines])


def step_guard() -> str:
    """What a compared step costs beside the same step without StepGuard."""
    runs = read_runs("textbook", "cost: (?P<model>.+)")
    if runs.empty:
        return "NOT RUN."
    return table(
        ["step", "era"],
        list_runs(runs, "model", "era"),
        ("seconds", "step_seconds", ".3g"),
        ("compared", "guarded_seconds", ".3g"),
        ("peak, MiB", "peak_mib", ".0f"),
        ("compared, MiB", "guarded_mib", ".0f"),
    )


def diagnose() -> str:
    """What diagnose and rldoctor said of broken and of healthy runs, by part and by what was handed in."""
    figures = {"broken": "faulty", "named, right": "named_first", "named, wrong": "wrongly_named",
               "abstained, looks tell": "abstained_with_the_cause", "nothing found": "called_healthy",
               "healthy": "healthy", "accused": "false_alarms", "abstained": "healthy_abstained"}  # fmt: skip
    rows = [
        [run["part"], run["tool"] if run["tool"] != "diagnose" else run["level"]]
        + [f"{run[figure]:.0f}" for figure in figures.values()]
        for run in read_runs("diagnose_grading", "(diagnose|rldoctor): .+").fillna(0).to_dict("records")
    ]
    return markdown(["part", "handed in", *figures], fold(rows, 1))


def offline() -> str:
    """What a bundle takes, and what installing it took with the network cut."""
    (run,) = read_runs("offline").to_dict("records")
    return markdown(
        ["", f"Python {run['python']}, {run['platform']}, torch {run['torch']}"],
        [
            ["bundle", f"{run['bundle_mb']:.0f} MB, {run['wheels']} wheels of {run['eras']} eras"],
            ["`install.sh`", f"it computed for {run['install_processor_minutes']:.1f} minutes"],
            ["disk after it", f"{run['installed_gb']:.1f} GB"],
        ],
    )


def faults() -> str:
    """Faults by exit status; nothing was lost or left, or a test had failed."""
    found: dict[str, list[str]] = {}
    for run in read_runs("faults", "fault: (?P<what>.+)").to_dict("records"):
        found.setdefault(_not_run(run) or run["status"], []).append(run["what"])
    return markdown(["exit status", "fault"], [[status, "; ".join(faults)] for status, faults in found.items()])


def _reached(run: Any) -> str:
    return f"{run['reached']} of {run['trainable']}"


def _changed(run: Any) -> str:
    return f"{run['changed']} of {run['trainable']}"


def _percent(values: pandas.Series) -> str:
    return spread([100 * value for value in values], ".2f") + " %"


def _not_run(run: dict) -> str:
    return f"NOT RUN: {run['not_run']}" if isinstance(run.get("not_run"), str) else ""


def _measured_on(runs: pandas.DataFrame, rows: str) -> str:
    first = runs.iloc[0]
    return f"Measured on: {first['device']} (tier: {first['tier']})\n\n{rows}"
