"""On every way from a model to a trainer, in this stack: repairs hold, and measurements measure what is trained.

A repair that works on a plain model may be lost where a trainer or PEFT wraps it. Each question is a function of what
makes a fresh `Way`, and of whether the repair is called before the trainer is made; it returns whether that holds.
"""

import dataclasses
import importlib.util
import itertools
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from small import alternate

from failurelab import gradients, logits, rollouts
from failurelab._unwrap import unwrap
from failurelab.handles import eval_mode
from failurelab_course.experiments import models, trainers

# 4-bit weights on a CPU need transformers 5 and bitsandbytes.
FOUR_BIT = Version(transformers.__version__).major >= 5 and importlib.util.find_spec("bitsandbytes")
WAYS = ["plain", "peft_config", "wrapped by hand", "PeftModel.from_pretrained", *["quantized"] * bool(FOUR_BIT)]
ROWS = 3


@dataclasses.dataclass
class Way:
    """A model as a script has it before the trainer is made, and the trainer, of a few completions."""

    model: Any
    tokenizer: Any
    peft_config: Any = None

    def trainer(self, **options):
        given = {"steps": 1, "prompts_per_step": 2, "num_generations": 2, "learning_rate": 1e-3, "reward": alternate}
        return trainers.grpo(self.model, self.tokenizer, peft_config=self.peft_config, **given | options)


def make(name, folder):
    """Return one of WAYS; `folder` is empty, for an adapter that is saved and loaded."""
    model, tokenizer = models.load_four_bit() if name == "quantized" else models.load()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    if name == "wrapped by hand":
        model = peft.get_peft_model(model, config)
    elif name == "PeftModel.from_pretrained":
        moved(peft.get_peft_model(model, config)).save_pretrained(folder)
        model = peft.PeftModel.from_pretrained(models.load()[0], folder, is_trainable=True)
    return Way(model, tokenizer, config if name in ("peft_config", "quantized") else None)


def moved(model):
    """Give an adapter numbers of its own: B begins at zero, and what is wrong with it would not show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.05)
    return model


def asks_for_rows(make, before):
    """`logits.repair`: the trainer's model, asked by the name it does not know, returns the last rows alone."""

    def rows(model):
        (other,) = {"logits_to_keep", "num_logits_to_keep"} - {logits.keep_argument(model)}
        with torch.no_grad(), eval_mode(model):
            return model(input_ids=torch.arange(3, 11)[None], **{other: ROWS}).logits.shape[1]

    without, way = rows(make().trainer().model), make()
    handle = logits.repair(way.model) if before else None
    model = way.trainer().model
    handle = handle or logits.repair(model)
    made = rows(model)
    handle.remove()
    return made == ROWS and rows(model) == without


def generates(make, before):
    """`rollouts.repair`: under checkpointing, in train mode, generation draws from the policy."""
    way = make()
    if before:
        rollouts.repair(way.model)
    model = way.trainer().model
    if not before:
        rollouts.repair(model)
    gradients.enable_checkpointing(unwrap(model), {"use_reentrant": False})
    return rollouts.check(model, way.tokenizer, ["3+4=", "12+19=", "5+13="], max_new_tokens=4).agrees


def reaches(make, before):
    """`gradients.require_input_grads`: every trainable tensor gets a gradient under reentrant checkpointing."""
    way = make()
    if way.peft_config is None and not hasattr(way.model, "peft_config"):
        way.model.get_input_embeddings().requires_grad_(False)
    if before:
        gradients.require_input_grads(way.model)
    trainer = way.trainer(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    if not before:
        gradients.require_input_grads(trainer.model)
    with gradients.watch(trainer.model) as watched:
        trainer.train()
    return not watched.report().without_gradient


def measures(make, before):
    """`gradients.watch` and `snapshot`: as many tensors with a gradient as change in a step, or an error that says why.

    Before the trainer is made, what PEFT is still to wrap is told as such: those tensors are not what is trained.
    """
    way = make()
    trainer = None if before else way.trainer()
    model = way.model if before else trainer.model
    watched, kept = gradients.watch(model), gradients.snapshot(model)
    trainer = trainer or way.trainer()
    trainer.train()
    watched.stop()
    try:
        report, changed = watched.report(), kept.changed(trainer.model)
    except gradients.GradientError:
        return True
    return report.learns and len(changed) == sum(name not in report.zero_gradient for name in report.trainable)


def scores(make, before):
    """`logits.completion_logps`: the scores are those of the model's own logits, and so are the gradients."""
    way = make()
    model = moved(way.model if before else way.trainer().model)
    ids = way.tokenizer(["3+4=7", "8+1=9"], return_tensors="pt").input_ids

    def scored(plain):
        model.zero_grad()
        model.train()  # in eval mode bitsandbytes packs 4-bit weights for good, and no gradient passes them
        if plain:
            rows = model(input_ids=ids, use_cache=False).logits[:, -2:-1].float().log_softmax(-1)
            got = rows.gather(-1, ids[:, -1:, None])[..., 0]
        else:
            got = logits.completion_logps(model, ids, torch.ones_like(ids), 1)
        got.sum().backward()
        return got.detach(), [p.grad.float().clone() for p in model.parameters() if p.requires_grad]

    (wanted, slopes), (got, others) = scored(True), scored(False)
    slope = max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-9)) for a, b in zip(slopes, others))
    low = any(p.requires_grad and p.itemsize < 4 for p in model.parameters())
    return float((wanted - got).abs().max()) < 1e-4 and slope < (0.02 if low else 1e-3)


QUESTIONS = [asks_for_rows, generates, reaches, measures, scores]
# Every question on every way; asked before the trainer is made and after it in turn, so that each way has both.
CASES = [
    (question, way, (row + column) % 2 == 0)
    for row, question in enumerate(QUESTIONS)
    for column, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("question", "way", "before"), CASES)
def test_it_holds(question, way, before, tmp_path):
    folders = (tmp_path / str(number) for number in itertools.count())
    assert question(lambda: make(way, next(folders)), before)
