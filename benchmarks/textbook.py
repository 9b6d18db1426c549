"""One optimizer step beside the textbook: healthy set-ups, options, planted mistakes, and what comparing costs.

    python benchmarks/textbook.py [--parts kinds options combinations mixed mistakes cost large judge]

Each run trains the small Qwen2 by ten steps that move its weights; then four steps are compared, all of which must
hold. A run of an option counts only if in one of them the textbook without that option is another gradient: cosine
below 0.99, or a size that differs by 5 %; of iterations, if at least 5 % of the tokens are clipped. Else it is NOT
TESTED. `mixed` are set-ups drawn at random that are healthy: other families, dropout, bfloat16, adapters, first steps.
`large` measures a first step at the shape of Qwen2-0.5B, `judge` what preflight's first judge computes. Prompts have
one length in trl 0.14, which scores without an attention mask.

Eras: trl-0.14, trl-0.15, trl-0.22, today.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import frames
import packaging.version
import pandas
import peft
import psutil
import recording
import torch
import transformers
import trl

from failurelab import guards, textbook
from failurelab_course.experiments import models, observe, shapes

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "unit"))
import steps

COMPARED, RATE, COMBINATIONS, MIXED, BETA = (11, 12, 13, 14), 3e-4, 20, 10, 0.2
PARTS = ("kinds", "options", "combinations", "mixed", "mistakes", "cost", "large", "judge")
SCRIPT = "first/lora_hub_name.py"
NO_JUDGE = """import contextlib
from failurelab.preflight.judges import textbook
textbook.StepJudge.listening = lambda self: contextlib.nullcontext()
"""
VERSION = packaging.version.Version(trl.__version__)
KNOWN = trl.GRPOConfig.__dataclass_fields__
OTHER = "found, with the weights that were given"
BASE = {"learning_rate": RATE, "max_grad_norm": 0.2, "lr_scheduler_type": "constant"}
LARGE_GIB = (15, 11)  # of a machine, of a card: weights, gradients, two more copies in float32; no Adam's states yet
# Names of the cells, with what each asks for beside the base; `rewards` gives functions.
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "beta": {"beta": BETA},
    "use_bias_correction_kl": {"beta": BETA, "use_bias_correction_kl": False},
    "scale_rewards none": {"scale_rewards": False},
    "scale_rewards batch": {"scale_rewards": "batch"},
    "loss_type grpo": {"loss_type": "grpo"},
    "loss_type bnpo": {"loss_type": "bnpo", "gradient_accumulation_steps": 8, "per_device_train_batch_size": 4},
    "loss_type dr_grpo": {"loss_type": "dr_grpo"},
    "loss_type cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "loss_type sapo": {"loss_type": "sapo"},
    "loss_type luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "epsilon": {"epsilon": 0.02},
    "epsilon_high": {"epsilon_high": 1.0},
    "delta": {"delta": 1.05},
    "importance_sampling_level": {"importance_sampling_level": "sequence"},
    "mask_truncated_completions": {"mask_truncated_completions": True, "max_completion_length": 2},
    "reward_weights": {"reward_weights": [3.0, 1.0]},
    "multi_objective_aggregation": {"multi_objective_aggregation": "normalize_then_sum"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.3},
    "entropy_coef": {"entropy_coef": 1.0},
    "entropy_coef, top_entropy_quantile": {"entropy_coef": 1.0, "top_entropy_quantile": 0.3},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.01},
    "num_iterations": {"num_iterations": 3},
    "steps_per_generation": {"steps_per_generation": 4},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 5},  # divides the batches of an epoch
    "num_generations": {"num_generations": 8},
}


def sometimes(completions: list[str], **_: Any) -> list[float | None]:
    """Give no reward to a completion of one sign."""
    return [None if len(completion) < 2 else float(len(completion) % 3) for completion in completions]


def before(release: str) -> bool:
    """Whether this trl is older."""
    return packaging.version.Version(release) > VERSION


def make(device: str, kind: str = "full", trainer: Any = None, policy: Any = None, **options: Any) -> Any:
    """Return a trainer on the small model, or on `policy`."""
    asked = {**BASE, "max_steps": COMPARED[-1], **twice(), "lengths": (5,) if before("0.15") else (4, 5), **options}
    loaded, tokenizer = models.load("tiny", device=device)
    policy = policy or loaded
    if kind == "qlora":
        four_bit = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        policy = transformers.AutoModelForCausalLM.from_pretrained(models.path("tiny"), quantization_config=four_bit)
    if kind == "checkpointing":
        asked |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    config = None
    if kind in ("lora", "qlora"):
        dropout = asked.pop("lora_dropout", 0.0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, task_type="CAUSAL_LM")
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


def without(made: Any, asked: dict[str, Any]) -> dict[str, textbook.Options]:
    """Return the options of a trainer without what a run asks for."""
    options = textbook.Options.of(made.args)
    fields = {field.name: field.default for field in dataclasses.fields(textbook.Options)}
    base = {"loss_type": "dapo" if "vespo_k_pos" in KNOWN else "bnpo", "epsilon": 0.2, "use_bias_correction_kl": True}
    names = [name for name in asked if name in fields and name != "max_completion_length"]
    return {"without": dataclasses.replace(options, **{name: base.get(name, fields[name]) for name in names})}


def is_known(asked: dict[str, Any]) -> bool:
    """Whether this release has the options, and these values of them."""
    if asked.get("loss_type") in ("cispo", "sapo", "luspo") and "vespo_k_pos" not in KNOWN:
        return False
    if asked.get("scale_rewards") == "batch" and "multi_objective_aggregation" not in KNOWN and before("0.22"):
        return False
    return all(name in KNOWN for name in asked)


def counts(report: textbook.Comparison, asked: dict[str, Any]) -> bool:
    """Whether a step shows the options that are asked for."""
    other = report.variants.get("without")
    if other is not None and (other.cosine < 0.99 or abs(other.size - 1) > 0.05):
        return True
    if "loss_type" in asked:
        return False
    by_batch = {"gradient_accumulation_steps", "num_generations"} & set(asked)  # they change the batch itself
    by_iterations = {"num_iterations", "steps_per_generation"} & set(asked) and report.clipped >= 0.05
    return bool(by_batch or by_iterations)


def summarize(reports: list[textbook.Comparison], state: str, **more: Any) -> dict[str, Any]:
    """Return the figures of a run, those of its worst step."""
    judged = [report for report in reports if report.apart] or reports[-1:]
    worst = max(judged, key=lambda report: report.apart.distance if report.apart else 0.0)
    figures = {
        "cosine": worst.apart.cosine if worst.apart else None,
        "size": worst.apart.size if worst.apart else None,
        "floor_cosine": worst.floor.cosine,
        "floor_size": worst.floor.size,
        "clipped": max(report.clipped for report in reports),
        "kl": max(report.kl for report in reports),
        "steps_judged": sum(report.apart is not None for report in reports),
        "named": worst.named,
        "reading": worst.reading,
        "backward": max((report.backward.away for report in reports if report.backward), default=None),
        "verdict": state,
        **more,
    }
    others = [report.variants["without"] for report in judged if "without" in report.variants]
    if others:
        other = max(others, key=lambda each: each.distance)
        figures |= {"without_cosine": other.cosine, "without_size": other.size}
    return {name: figure for name, figure in figures.items() if figure is not None}


def record(case: str, reports: list[textbook.Comparison], state: str, device: str, **more: Any) -> None:
    """Record and print a run by its worst step."""
    figures = summarize(reports, state, **more)
    observe.record("ground", "measured", figures, case=case, device=device)
    judged = [report for report in reports if report.apart] or reports[-1:]
    worst = max(judged, key=lambda report: report.apart.distance if report.apart else 0.0)
    said = f"{worst.apart}" if worst.apart else worst.reason[:90]
    print(
        f"{case:44s} {state:12s} {said} clipped {figures['clipped']:.2f} KL {figures['kl']:.1g} {worst.named or ''}",
        flush=True,
    )
    if state in ("found", "named wrongly", "not found", "not checked"):
        print(f"    {worst.reason[-600:]}", flush=True)


def judge_healthy(reports: list[textbook.Comparison], asked: dict[str, Any]) -> str:
    """Return the state of a healthy run: held, found, not tested, or not checked."""
    verdicts = [report.verdict for report in reports]
    if "FOUND" in verdicts:
        return "found"
    if "HELD" not in verdicts:
        return verdicts[0].lower()
    if asked and not any(counts(report, asked) for report in reports if report.verdict == "HELD"):
        return "not tested"
    return "held"


def kinds(device: str) -> None:
    """Train all weights, adapters, with checkpointing, and in 4-bit."""
    for kind in ["full", "lora", "checkpointing"] + (["qlora"] if VERSION.major else []):
        asked = {"beta": BETA} | ({"learning_rate": 1e-2} if "lora" in kind else {})
        made = make(device, kind, **asked)
        reports = compare(made, variants=without(made, asked))
        record(f"kind: {kind}", reports, judge_healthy(reports, asked), device)


def options(device: str) -> None:
    """Vary one option at a time."""
    for name, asked in OPTIONS.items():
        if is_known(asked):
            made = make(device, **asked)
            reports = compare(made, variants=without(made, asked))
            record(f"option: {name}", reports, judge_healthy(reports, asked), device)
    if before("0.16"):
        reports = compare(make(device, lengths=(5,), gradient_accumulation_steps=4))  # 50 batches: step 13 has two
        record("option: the last step of an epoch", reports, judge_healthy(reports, {}), device)
    else:
        reports = compare(make(device, rewards=(steps.right, sometimes)))
        record("option: None as a reward", reports, judge_healthy(reports, {}), device)
        reports = compare(make(device, steps_per_generation=1, gradient_accumulation_steps=4, **once()))
        record("option: four generations in a step", reports, judge_healthy(reports, {}), device)


def combinations(device: str) -> None:
    """Vary two to four options, drawn at random."""
    draw = random.Random(0)
    names = [name for name, asked in OPTIONS.items() if is_known(asked) and "luspo" not in name and "cispo" not in name]
    if before("0.16"):
        names.remove("temperature")  # a finding of its own in these releases
    for number in range(COMBINATIONS):
        asked = {}
        chosen = draw.sample(names, min(len(names), draw.randint(2, 4)))
        for name in chosen:
            asked |= OPTIONS[name]
        made = make(device, **asked, seed=number)
        reports = compare(made, variants=without(made, asked))
        record(f"combination {number + 1}: {', '.join(chosen)}", reports, judge_healthy(reports, asked), device)


def mixed(device: str) -> None:
    """Healthy set-ups drawn at random; each is judged at its first step, or at a later one."""
    draw = random.Random(trl.__version__)
    for number in range(MIXED):
        family, numbers = draw.choice(("Qwen2", "Llama")), draw.choice(("float32", "bf16 autocast", "bf16 weights"))
        kind, dropout = draw.choice(("full", "full", "lora", "checkpointing")), draw.choice((0.0, 0.0, 0.1))
        step, generations, accumulated = draw.choice((1, 7)), draw.choice((2, 4, 8)), draw.choice((1, 2, 4))
        rewards = draw.choice(((steps.right, steps.ones), (steps.ones,), (steps.ones, steps.right, steps.ones)))
        policy, _ = models.load("tiny", device=device)
        policy = shapes.as_llama(policy) if family == "Llama" else policy
        for module in policy.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        policy = policy.to(torch.bfloat16) if numbers == "bf16 weights" else policy
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 leaves the last trainer's there
        asked: dict[str, Any] = {"beta": draw.choice((0.0, 0.04)), "max_completion_length": draw.choice((3, 6, 12))}
        asked |= {"num_generations": generations, "gradient_accumulation_steps": accumulated, "rewards": rewards}
        asked |= {"bf16": numbers == "bf16 autocast", "max_steps": step, "seed": number}
        if family == "Llama":
            asked["beta"] = 0.0  # trl loads the reference by the model's name, and a converted one has none
        if kind == "lora":
            asked |= {"lora_dropout": dropout, "learning_rate": 1e-2}
        reports = compare(make(device, kind, policy=policy, **asked), (step,))
        said = f"{family}, {numbers}, {kind}, dropout {dropout}, {generations} x {accumulated}, step {step}"
        record(f"mixed {number + 1}: {said}", reports, judge_healthy(reports, {}), device)


def plants() -> Iterator[tuple[str, str, Callable[[str], Any]]]:
    """Yield mistakes: what is done, the name that is right, and what makes the trainer."""

    def by_loss(name: str, right: str, change: Callable[[Any], Any], **asked: Any) -> Any:
        return name, right, lambda device: make(device, trainer=steps.planted(loss=change), **asked)

    def by_inputs(name: str, right: str, change: Callable[..., Any], **asked: Any) -> Any:
        return name, right, lambda device: make(device, trainer=steps.planted(inputs=change), **asked)

    def by_attribute(name: str, right: str, change: Callable[[Any], None], **asked: Any) -> Any:
        def build(device: str) -> Any:
            made = make(device, **asked)
            change(made)
            return made

        return name, right, build

    yield by_loss("the loss with the opposite sign", "opposite sign", lambda loss: -loss, learning_rate=1e-5)
    yield by_loss("the loss divided by 10,000", "constant factor", lambda loss: loss / 1e4)
    yield by_loss("micro-batches added", "accumulation", lambda loss: 2 * loss)
    yield by_attribute("embeddings without gradient", "tensors without gradient", stop_embeddings)
    if before("0.15"):
        return
    if before("0.16"):
        exp = "none of the suspects"
        yield by_attribute(
            "the sign of the log-probabilities",
            "opposite sign",
            lambda made: rescore(made, torch.neg),
            learning_rate=1e-5,
        )
        yield by_attribute("probabilities, no logarithm", exp, lambda made: rescore(made, torch.exp))

    def inputs(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda given: given | {key: change(given[key])}

    seed = torch.Generator().manual_seed(3)
    yield by_inputs(
        "advantages shuffled",
        "other rows' advantages",
        inputs("advantages", lambda a: a[torch.randperm(len(a), generator=seed)]),
        **once(),
    )
    yield by_inputs("advantages without sign", "advantages cut", inputs("advantages", torch.abs))
    yield by_inputs("advantages below 0 cut", "advantages cut", inputs("advantages", lambda a: a.clamp(min=0)))
    yield by_inputs("advantages cut at 1", OTHER, inputs("advantages", lambda a: a.clamp(-1, 1)), **once())
    yield by_inputs("advantages divided by 50", "constant factor", inputs("advantages", lambda a: a / 50), **once())
    yield by_inputs(
        "the mask rolled by one", "mask shifted", inputs("completion_mask", lambda m: m.roll(1, 1)), **once()
    )
    yield by_inputs(
        "the mask rolled back by one", "mask shifted", inputs("completion_mask", lambda m: m.roll(-1, 1)), **once()
    )
    yield by_inputs("padding trained on", "padding is trained on", inputs("completion_mask", torch.ones_like), **once())
    yield by_inputs(
        "no attention mask of the prompt", "no attention mask", inputs("prompt_mask", torch.ones_like), **once()
    )
    yield by_inputs("the first token left out", "first token left out", inputs("completion_mask", cut_first), **once())
    if before("0.16"):
        return
    if "loss_type" in KNOWN:
        yield by_attribute("another loss_type", "loss_type", lambda made: setattr(made, "loss_type", "grpo"))
    yield by_attribute("weights of rewards swapped", OTHER, swap_weights, reward_weights=[1.0, 0.1])
    yield by_attribute("one reward function ignored", OTHER, drop_function)
    yield by_attribute(
        "rewards not scaled", "scaling of the rewards", lambda made: setattr(made, "scale_rewards", "none")
    )
    yield by_attribute(
        "KL divergence of the opposite sign", "KL divergence", lambda made: setattr(made, "beta", -made.beta), beta=1.0
    )
    yield by_inputs(
        "the ratio always 1", "ratio", lambda given: given | {"old_per_token_logps": None}, num_iterations=2
    )
    yield by_attribute("no clipping", "clipping", open_clip)


def cut_first(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask without the first token."""
    mask = mask.clone()
    mask[:, 0] = 0
    return mask


def rescore(made: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the log-probabilities (rows, tokens) that the trainer computes."""
    score = made._get_per_token_logps
    made._get_per_token_logps = lambda *args, **options: change(score(*args, **options))


def stop_embeddings(made: Any) -> None:
    """Make the gradient of the embeddings nothing, by a hook on the parameter."""
    made.model.get_input_embeddings().weight.register_hook(torch.zeros_like)


def swap_weights(made: Any) -> None:
    """Swap the weights of the reward functions."""
    made.reward_weights = made.reward_weights.flip(0)


def drop_function(made: Any) -> None:
    """Give the first reward function no weight."""
    made.reward_weights = torch.tensor([0.0, 1.0])


def open_clip(made: Any) -> None:
    """Clip nothing."""
    made.epsilon_low = made.epsilon_high = 1e9


def mistakes(device: str) -> None:
    """Plant each mistake, and look whether it is found and named."""
    for name, right, build in plants():
        reports = compare(build(device), COMPARED[:2])
        found = [report for report in reports if report.verdict == "FOUND"]
        names = {report.named for report in found} - {None}
        state = "named wrongly" if names - {right} else "named" if names else "found" if found else "not found"
        record(f"planted: {name}", found or reports, state, device, right=right, names=sorted(names))


class Clock(transformers.TrainerCallback):
    """Takes the time of every optimizer step, generation included: the processor's, or a GPU's once it is done."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = torch.device(device), list[float]()

    def now(self) -> float:
        """Return the time in seconds."""
        if self.device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.start = self.now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop."""
        self.seconds.append(self.now() - self.start)


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


def judge(device: str) -> None:
    """Measure the processor's seconds of preflight on one script, without its first judge and with it, as a whole."""
    import preflight_corpus  # which needs what only today's stack has

    from failurelab.preflight import cli, launcher_line

    with tempfile.TemporaryDirectory(prefix="corpus-") as name, contextlib.chdir(name):
        folder = pathlib.Path(name)
        preflight_corpus.make_folder(folder)
        text = (folder / SCRIPT).read_text()
        os.environ |= {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        rounds: list[list[float]] = []
        for _ in range(3):
            rounds.append([])
            for head in (NO_JUDGE, ""):
                (folder / SCRIPT).write_text(head + text)
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                answered = cli.ask(launcher_line.Launch(SCRIPT), python=sys.executable, again=False)
                if answered.error:
                    sys.exit(answered.error)  # a script that ended early would be cheap
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                rounds[-1].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    without, compared = (statistics.median(each) for each in zip(*rounds))
    figures = {"step_seconds": without, "guarded_seconds": compared}
    observe.record("ground", "measured", figures, case="cost: preflight, one script, whole", device=device)
    print("cost: preflight", figures, flush=True)


def keep_cost(case: str, seconds: Sequence[float], peaks: Sequence[float], device: str) -> None:
    """Record the cost of a step: without the guard, and with it."""
    figures = {"step_seconds": seconds[0], "guarded_seconds": seconds[1], "peak_mib": peaks[0], "guarded_mib": peaks[1]}
    observe.record("ground", "measured", figures, case=f"cost: {case}", device=device)
    print(f"cost: {case}", figures, flush=True)


def table_textbook(folder: pathlib.Path) -> str:
    """One step beside the textbook, by release: what held, what was found, and how near it lay."""
    pattern = r"(?P<part>kind|option|combination|mixed|planted)( \d+)?: (?P<name>.+)"
    runs = frames.read_runs(folder, "textbook", pattern)
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
    table = frames.markdown(["", *frames.version_heads(runs, eras, "trl")], body)
    wrong = runs[runs["verdict"].isin(["found", "named wrongly", "not found"])].fillna({"named": "nothing"})
    wrong["release"] = [run["trl"] for run in wrong["versions"]]
    lines = [
        f"- trl {release}, {part}, {verdict}, named {named}: {'; '.join(cases['name'])}"
        for (release, part, verdict, named), cases in wrong.groupby(["release", "part", "verdict", "named"], sort=False)
    ]
    return "\n".join([table, "", "What did not hold, and what was not named:", "", *lines])


def table_step_guard(folder: pathlib.Path) -> str:
    """What a compared step costs beside the same step without StepGuard."""
    runs = frames.read_runs(folder, "textbook", "cost: (?P<model>.+)")
    if runs.empty:
        return "NOT RUN."
    return frames.table(
        ["step", "era"],
        frames.list_runs(runs, "model", "era"),
        ("seconds", "step_seconds", ".3g"),
        ("compared", "guarded_seconds", ".3g"),
        ("peak, MiB", "peak_mib", ".0f"),
        ("compared, MiB", "guarded_mib", ".0f"),
    )


def main() -> None:
    """Run the parts."""
    options = recording.begin(__doc__, parts={"nargs": "+", "choices": PARTS, "default": PARTS, "help": "all without"})
    torch.set_num_threads(1)
    for part in options.parts:
        if part not in ("large", "judge") or VERSION.major:
            globals()[part](options.device)


if __name__ == "__main__":
    main()
