"""GRPO, RLOO and Online DPO trainers for one step, alike in every release, and mistakes planted in them."""

import copy

import datasets
import packaging.version
import torch
import trl

try:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
except ImportError:
    from trl import OnlineDPOConfig, OnlineDPOTrainer

from failurelab import guards, textbook
from failurelab.textbook import reading
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
    """Return a GRPO trainer: 32 completions a step in two micro-batches, groups of four, float32, no dropout.

    Its rows (prompt, answer) are those of SUMS with such lengths, or `data` its columns; `more` is for the trainer,
    options for its config.
    """
    rows = rows or [(prompt, answer) for prompt, answer in SUMS.items() if len(prompt) in lengths]
    given = {
        "max_steps": 1,
        "learning_rate": 1e-6,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4 if before("0.15") else 16,  # 0.14 counts prompts
        "max_completion_length": 6,
        "beta": 0.0,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    torch.manual_seed(0)
    return (kind or trl.GRPOTrainer)(
        model=model,
        args=trl.GRPOConfig(str(folder), **given | options),
        train_dataset=datasets.Dataset.from_dict(
            data or {"prompt": [p for p, _ in rows], "answer": [a for _, a in rows]}
        ),
        processing_class=tokenizer,
        reward_funcs=list(rewards),
        **({"peft_config": config} if config else {}),
        **dict(more),
    )


def planted(loss=None, inputs=None):
    """Return a trainer class whose loss, or whose inputs of the loss, are changed by a function."""

    class Planted(trl.GRPOTrainer):
        def compute_loss(self, model, given, *rest, **options):
            if inputs is not None:
                given = inputs(dict(given))
            value = super().compute_loss(model, given, *rest, **options)
            return value if loss is None else loss(value)

    return Planted


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


def compare_steps(made, steps, **options):
    """Train; return the comparisons of some steps."""
    with textbook.compare(made, steps, **options) as watched:
        made.train()
    return watched.reports


def compare(made, steps=(1,), **options):
    """Train; return the comparison of a step, or of the last of some."""
    with textbook.compare(made, steps, **options) as watched:
        made.train()
    return watched.report


def guarded_and_not(make, model, **options):
    """Train copies of a model with StepGuard and without; return the guard, and whether both end at equal weights."""
    ended = []
    for guarded in (False, True):
        made = make(copy.deepcopy(model))
        if guarded:
            made.add_callback(guard := guards.StepGuard(made, **options))
        made.train()
        ended.append(made.model.state_dict())
    return guard, all(torch.equal(weights, ended[1][name]) for name, weights in ended[0].items())


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


def rloo(model, tokenizer, folder, kind=None, rewards=(right, ones), lengths=(4, 5), config=None, **options):
    """Return an RLOO trainer of 32 completions a step in two micro-batches, groups of four."""
    rows = [(prompt, answer) for prompt, answer in SUMS.items() if len(prompt) in lengths]
    given = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_generations": 4}
    given |= {"max_completion_length": 6, **SHORT}
    torch.manual_seed(0)
    return (kind or trl.RLOOTrainer)(
        model=model,
        args=trl.RLOOConfig(str(folder), **given | options),
        train_dataset=datasets.Dataset.from_dict({"prompt": [p for p, _ in rows], "answer": [a for _, a in rows]}),
        processing_class=tokenizer,
        reward_funcs=list(rewards),
        peft_config=config,
    )


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
