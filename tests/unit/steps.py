"""GRPO, RLOO and Online DPO trainers for one step, alike in every release, and mistakes planted in them."""

import contextlib
import copy
import dataclasses
import inspect

import datasets
import packaging.version
import pytest
import torch
import transformers
import trl
from small import qwen2

try:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
except ImportError:
    from trl import OnlineDPOConfig, OnlineDPOTrainer

from failurelab import guards, textbook
from failurelab.textbook import apart, gradient, reading, suspects, weights
from failurelab.textbook.rows import Row

SUMS = {f"{a}+{b}=": f"{a + b}" for a in range(20) for b in range(20)}


def right(completions, answer, **_):
    return [float(completion.strip() == each) for completion, each in zip(completions, answer)]


def ones(completions, **_):
    """Reward ones and punish length, so that rewards differ in nearly every group."""
    return [completion.count("1") - 0.3 * len(completion) for completion in completions]


def has(option):
    return option in trl.GRPOConfig.__dataclass_fields__


def before(release):
    version = packaging.version.Version(trl.__version__)
    return version < packaging.version.Version(release)


def signature(kind):
    """Return the arguments of a method that OnlineDPOTrainer overrides and transformers calls."""
    return [*inspect.signature(kind._maybe_log_save_evaluate).parameters]


NO_ONLINE_DPO = before("1.0") and len(signature(transformers.Trainer)) != len(signature(OnlineDPOTrainer))
needs_online_dpo = pytest.mark.skipif(NO_ONLINE_DPO, reason="OnlineDPOTrainer cannot train in this stack at all")
needs_rloo = pytest.mark.skipif(before("0.22"), reason="RLOOTrainer before 0.22 has a training loop of its own")


SHORT = {
    "max_steps": 1,
    "learning_rate": 1e-6,
    "temperature": 1.0,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


def trainer(
    model,
    tokenizer,
    folder,
    kind=None,
    rewards=(right, ones),
    lengths=(5,),
    rows=None,
    data=None,
    config=None,
    more=(),
    **options,
):
    """Return a GRPO or RLOO trainer: 32 completions a step in two micro-batches, groups of four, float32, no dropout.

    Its rows (prompt, answer) are those of SUMS with such lengths, or `data` its columns; `more` is for the trainer,
    options for its config.
    """
    rows = rows or [(prompt, answer) for prompt, answer in SUMS.items() if len(prompt) in lengths]
    given = SHORT | {
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4 if before("0.15") else 16,  # 0.14 counts prompts
        "max_completion_length": 6,
    }
    of_rloo = isinstance(kind, type) and issubclass(kind, trl.RLOOTrainer)
    given |= {} if of_rloo else {"beta": 0.0}
    torch.manual_seed(0)
    return (kind or trl.GRPOTrainer)(
        model=model,
        args=(trl.RLOOConfig if of_rloo else trl.GRPOConfig)(str(folder), **given | options),
        train_dataset=datasets.Dataset.from_dict(
            data or {"prompt": [p for p, _ in rows], "answer": [a for _, a in rows]}
        ),
        processing_class=tokenizer,
        reward_funcs=list(rewards),
        **({"peft_config": config} if config else {}),
        **dict(more),
    )


def rloo(*given, **options):
    """Return an RLOO trainer of prompts of two lengths."""
    return trainer(*given, **{"kind": trl.RLOOTrainer, "lengths": (4, 5)} | options)


def one_after_another(monkeypatch):
    """Let GRPO's sampler repeat no prompt, so that each group has several."""

    def sampler(self, rows=None):
        return torch.utils.data.SequentialSampler(self.train_dataset if rows is None else rows)

    monkeypatch.setattr(trl.GRPOTrainer, "_get_train_sampler", sampler)


def planted(loss=None, inputs=None):
    """Return a trainer class whose loss, or whose inputs of the loss, are changed by a function."""

    class Planted(trl.GRPOTrainer):
        def compute_loss(self, model, given, *rest, **options):
            if inputs is not None:
                given = inputs(dict(given))
            value = super().compute_loss(model, given, *rest, **options)
            return value if loss is None else loss(value)

    return Planted


def compare_steps(made, steps, **options):
    """Train; return the comparisons of some steps."""
    with textbook.compare(made, steps, **options) as watched:
        made.train()
    return watched.reports


def compare(made, steps=(1,), **options):
    """Train; return the comparison of a step, or of the last of some."""
    return compare_steps(made, steps, **options)[-1]


def holds(report):
    """Whether a step is HELD, and near its definition as well."""
    return report.verdict == "HELD" and report.apart.cosine >= 0.999 and abs(report.apart.size - 1) <= 0.02


def step_guard(**options):
    """Return what gives a trainer a StepGuard, for `train_with_and_without`."""

    def watch(made):
        made.add_callback(guard := guards.StepGuard(made, **options))
        return contextlib.nullcontext(guard)

    return watch


def train_with_and_without(make, model, watch):
    """Train copies of a model that nobody watches and that is watched; return the watch, and whether weights are equal.

    Args:
        make: takes a copy, and returns its trainer.
        model: that is copied.
        watch: takes a trainer that has not begun, and returns a context in which it is watched.
    """
    ended = []
    for watched in (False, True):
        made = make(copy.deepcopy(model))
        with watch(made) if watched else contextlib.nullcontext() as watching:
            made.train()
        ended.append(made.model.state_dict())
    return watching, all(torch.equal(weights, ended[1][name]) for name, weights in ended[0].items())


class Judge:
    """A pairwise judge that prefers what a reward function pays more for, the first of equally good ones."""

    def __init__(self, reward):
        self.reward = reward

    def judge(self, prompts, completions, shuffle_order=True):
        paid = [self.reward(completions=list(pair)) for pair in completions]
        return [-1 if None in pair else int(pair[1] > pair[0]) for pair in paid]


def online_dpo(model, tokenizer, folder, kind=None, reward=ones, more=(), lengths=(4, 5), config=None, **options):
    """Return an Online DPO trainer of 16 pairs a step, whose preferences come from a judge where there are judges."""
    prompts = [prompt for prompt in SUMS if len(prompt) in lengths]
    given = {"per_device_train_batch_size": 16, "max_new_tokens": 6, **SHORT, **options}
    preference = {"reward_funcs": [reward]}
    if judges():
        preference = {} if "reward_model" in dict(more) else {"judge": Judge(reward)}
    torch.manual_seed(0)
    return (kind or OnlineDPOTrainer)(
        model=model,
        args=OnlineDPOConfig(str(folder), **given),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=config,
        **preference,
        **dict(more),
    )


def judges():
    """Whether this release has judges, and no reward functions for Online DPO."""
    return "judge" in OnlineDPOTrainer.__init__.__code__.co_varnames


def rows_of(prompts, completions, rewards, groups, ends=()):
    """Return the rows of a generation that a step trains on in one micro-batch."""
    columns = zip(prompts, completions, rewards, groups, strict=True)
    return [Row(tuple(prompt), tuple(ids), ids[-1] in ends, tuple(paid), group) for prompt, ids, paid, group in columns]


def passes_of(rows, given):
    """Return the forward passes of a trainer that gives each token of each row a weight."""
    passes = []
    for micro in sorted({row.micro for row in rows}):
        made = []
        for number, row in enumerate(rows):
            if row.micro == micro:
                own = given[str(number)].tolist()
                ids = (0, *row.prompt, *row.completion, *[0] * (len(own) - len(row.completion)))
                start = len(row.prompt)
                places = [(start + at, ids[start + at + 1], weight) for at, weight in enumerate(own) if weight]
                tokens = tuple(reading.Token(at + 1, token, weight, -1.0, at) for at, token, weight in places)
                made.append(reading.Trained(0, 0, number, ids[1:], tokens, padded=ids, micro=micro))
        passes.append(reading.Pass(made, []))
    return passes


def rows_of_pairs():
    generator = torch.Generator().manual_seed(1)
    rows = []
    rewards = [(1.0, 0.0), (0.5, 0.5), (None, None), (0.2, 0.9), (None, -1.0), (3.0, 2.5), (0.7, 0.0), (1.0, 1.0)]
    for group, pair in enumerate(rewards):
        prompt = tuple(torch.randint(2, 30, (2 + group % 3,), generator=generator).tolist())
        for place, reward in enumerate(pair):
            length = int(torch.randint(2, 7, (1,), generator=generator))
            completion = tuple(torch.randint(2, 30, (length,), generator=generator).tolist())
            kl, drawn_by = 0.3 * group + place, 0.3 * torch.rand(length, generator=generator) - 3.6
            row = Row(prompt, completion, (group + place) % 3 > 0, (reward,), group, padded=(4, 7), kl=kl)
            rows.append(dataclasses.replace(row, old_logps=drawn_by))
    return rows


class Asks:
    """Searches for what explains one gradient of the definition with a mistake in it."""

    def __init__(self, definition, options, model=None, other=None):
        self.model, self.rows, self.options = model or qwen2(), rows_of_pairs(), options
        self.definition, self.other = definition, other or qwen2(seed=1)

    def gradient(self, options, definition=None, tally=None, **more):
        return textbook.expected_gradient(
            self.model,
            self.rows,
            options,
            definition=definition or self.definition,
            reference=lambda: contextlib.nullcontext(self.other),
            tally=tally,
        )

    def search(self, definition=None):
        theirs = self.gradient(self.options, definition)
        passes = () if definition is None else self.passes(definition)
        given = self.rows, self.options, self.definition, theirs, textbook.Floor(), self.gradient
        return suspects.Search(*given, passes=passes)

    def passes(self, definition):
        """Return the forward pass of a trainer whose weights are those of a definition."""
        tally = gradient.Tally()
        self.gradient(self.options, tally=tally)
        step = gradient.Step(self.rows, self.options, self.definition)
        return passes_of(step.rows, weights.slopes_of(definition, step, tally, self.rows))

    def explain(self, definition):
        tally, search = gradient.Tally(), self.search(definition)
        ours = self.gradient(self.options, tally=tally)
        return search.explain(ours, apart.measure_apart(search.theirs, ours), tally)
