"""RLOO and Online DPO by their definitions, in every release: healthy steps hold, planted mistakes are named."""

import dataclasses
import math
import tempfile

import pytest
import torch
import transformers
import trl
from small import lora_config, reward_model
from steps import (
    Asks,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    before,
    compare,
    holds,
    judges,
    needs_online_dpo,
    needs_rloo,
    online_dpo,
    rloo,
    rows_of_pairs,
)

from failurelab import textbook
from failurelab.textbook import (
    algorithms,
    definition_online_dpo,
    fields,
)
from failurelab.textbook.definition_online_dpo import prefer


@pytest.fixture
def pairs(model, tokenizer, tmp_path):
    return lambda **options: online_dpo(options.pop("model", model), tokenizer, tmp_path, **options)


@pytest.fixture
def groups(model, tokenizer, tmp_path):
    return lambda **options: rloo(options.pop("model", model), tokenizer, tmp_path, **options)


MOVED = {"learning_rate": 1e-3, "max_steps": 4}
PAIRS = {
    "ipo": (MOVED | {"loss_type": "ipo", "beta": 0.5}, 4),
    "adapters": ({"config": lora_config(), "max_steps": 3, "learning_rate": 1e-2}, 3),
    "bf16": ({"bf16": True}, 1),
    "sampling at 0.7": ({"temperature": 0.7, "gradient_checkpointing": True} | MOVED, 4),
    "prompts that are cut": ({"max_length": 9}, 1),
}


@needs_online_dpo
@pytest.mark.parametrize("case", PAIRS)
def test_healthy_online_dpo_holds(case, pairs):
    options, step = PAIRS[case]
    report = compare(pairs(**options), (step,))
    assert holds(report), report
    assert ("ties" in report.reason) is not judges(), "a judge says no tie"


GROUPS = {
    "two iterations": MOVED | {"num_iterations": 2, "beta": 0.2, "epsilon": 0.05},
    "two steps from a generation": MOVED | {"steps_per_generation": 4, "learning_rate": 3e-3},
    "normalized, rewards clipped": MOVED
    | {"normalize_advantages": True, "beta": 0.2, "reward_clip_range": (-0.5, 0.5)},
    "truncated completions": MOVED | {"mask_truncated_completions": True, "max_completion_length": 2, "beta": 0.2},
    "adapters": MOVED | {"config": lora_config(), "learning_rate": 1e-2, "beta": 0.2},
    "bf16": {"bf16": True},
    "sampling at 0.7, weights of rewards": {"temperature": 0.7, "reward_weights": [3.0, 0.5]},
}


@needs_rloo
@pytest.mark.parametrize("case", GROUPS)
def test_healthy_rloo_holds(case, groups):
    step = GROUPS[case].get("max_steps", 1)
    report = compare(groups(**GROUPS[case]), (step,))
    assert holds(report), report
    assert case != "two iterations" or not any("clipping" in line for line in report.not_shown)


def test_rloo_with_a_loop_of_its_own_is_not_checked():
    kind = type("RLOOTrainer", (transformers.Trainer,), {"train": lambda self: None})
    assert "its training loop is its own" in algorithms.no_textbook(object.__new__(kind))
    assert bool(algorithms.no_textbook(object.__new__(trl.RLOOTrainer))) >= before("0.22")


@needs_online_dpo
def test_a_reward_model_gives_preferences(model, tokenizer, pairs):
    """Its rewards are no text's: before 0.24 trl asks the model's parts, and takes the penalty off the answer."""
    judge = reward_model(tokenizer)
    asked = {"reward": judge, "more": {"reward_processing_classes": tokenizer}}
    if judges():
        asked = {"more": {"reward_model": judge, "reward_processing_class": tokenizer}}
    made = pairs(missing_eos_penalty=0.5, max_new_tokens=2, **asked)
    forward = vars(judge).get("forward")
    report = compare(made)
    assert report.verdict == "HELD" and report.apart.cosine > 0.999
    assert vars(judge).get("forward") is forward


@needs_online_dpo
def test_micro_batches_are_added(pairs):
    """Each release divides none of its losses by their number, which transformers' own step would do."""
    report = compare(pairs(gradient_accumulation_steps=2, per_device_train_batch_size=8))
    assert report.verdict == "FOUND" and report.named == "accumulation" and abs(report.apart.size - 2) < 0.01


def scored(change):
    """Return a trainer whose log-probabilities (rows, tokens) are changed by a function of them and of the mask."""

    class Scored(OnlineDPOTrainer):
        def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, *rest):
            given = (model, prompt_ids, prompt_mask, completion_ids, completion_mask, *rest)
            return change(super()._forward(*given), completion_mask, given)

    return Scored


class Unmasked(OnlineDPOTrainer):
    """Trains on the padding."""

    def _generate(self, *given):
        prompt_ids, prompt_mask, ids, mask, *rest = super()._generate(*given)
        return (prompt_ids, prompt_mask, ids, torch.ones_like(mask), *rest)


def shifted(logps, mask, given):
    model, prompt_ids, prompt_mask, ids, own, *_ = given
    logits = model(torch.cat([prompt_ids, ids], 1), attention_mask=torch.cat([prompt_mask, own], 1)).logits
    return logits[:, prompt_ids.shape[1] :].log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def without_reference(logps, mask, given):
    return logps if torch.is_grad_enabled() else torch.zeros_like(logps)


PLANTED = {
    "reference left out": (scored(without_reference), {}, None, None),
    "shifted by one": (scored(shifted), {}, None, "scores shifted by one"),
    "padding": (Unmasked, {}, None, None),
    "swapped": (None, {}, -0.1, "opposite sign"),
    "beta": (None, MOVED | {"beta": 2.0}, 4.0, None),
}


def stirred(model):
    """Return the model with noise in its matrices, of a tenth of their deviation."""
    torch.manual_seed(3)
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim > 1):
            matrix.add_(0.1 * matrix.std() * torch.randn_like(matrix))
    return model


@needs_online_dpo
@pytest.mark.parametrize("case", PLANTED)
def test_a_mistake_planted_in_online_dpo_is_named(case, model, pairs):
    kind, options, beta, named = PLANTED[case]
    if case == "beta":  # of what a trained model is sure of nothing is learned
        model = stirred(model)
    made = pairs(model=model, kind=kind, **options)
    if beta is not None:
        made._beta = beta
    report = compare(made, (options.get("max_steps", 1),))
    assert report.verdict == "FOUND" and report.named == named, report


@needs_online_dpo
def test_a_pair_that_nothing_was_said_of_has_no_gradient(pairs):
    """A judge that fails says -1, a reward function None for both; trl trains on either as on any other answer."""

    def sometimes(completions, **_):
        return [None if "1" in text else float(len(text)) for text in completions]

    report = compare(pairs(reward=sometimes))
    assert report.verdict == "FOUND" and "nothing was said" in report.reason


def advantages(change):
    class Changed(trl.RLOOTrainer):
        def _generate_and_score_completions(self, inputs):
            made = super()._generate_and_score_completions(inputs)
            return made | {"advantages": change(made["advantages"])}

    return Changed


@needs_rloo
@pytest.mark.parametrize(
    "change, named",
    [
        (lambda worth: worth * 3 / 4, "constant factor"),  # the completion itself is in its baseline
        (lambda worth: -worth, "opposite sign"),
    ],
)
def test_a_mistake_planted_in_rloo_is_named(change, named, groups):
    report = compare(groups(kind=advantages(change)))
    assert report.verdict == "FOUND" and report.named == named, report


@needs_rloo
def test_a_divergence_that_the_rewards_lack_is_found(groups):
    made = groups(**MOVED | {"beta": 0.5, "learning_rate": 3e-3})
    made.beta = 0.0
    report = compare(made, (4,))
    assert (report.verdict, report.named) == ("FOUND", None) and "other weights" in report.reason, report


# Each suspect as a trainer would make it: its gradient is held against the definition's, on rows made by hand.
OPTIONS = {
    "GRPO": textbook.Options(temperature=0.7, asked_temperature=0.5, epsilon=0.2, epsilon_high=0.6, beta=0.5),
    "Online DPO": textbook.Options(
        beta=0.5, loss_type="sigmoid", missing_eos_penalty=5.0, asked_temperature=0.7, max_length=64
    ),
}


SUSPECTS = [
    (definition, suspect)
    for definition in (textbook.GRPO, textbook.ONLINE_DPO)
    for search in [Asks(definition, OPTIONS[definition.name]).search()]
    for suspect in (*search.scores, *search.others)
    if suspect.when(rows_of_pairs(), OPTIONS[definition.name])
]


@pytest.mark.parametrize(
    "definition, suspect",
    SUSPECTS,
    ids=[f"{definition.name}: {each.name} {each.line}" for definition, each in SUSPECTS],
)
def test_each_suspect_is_named(definition, suspect):
    names = {field.name for field in dataclasses.fields(definition)}
    assert len(suspect.change) == 1 and set(suspect.change) <= names
    explanation = Asks(definition, OPTIONS[definition.name]).explain(suspect.replace(definition))
    assert explanation.named == suspect.name or (suspect.name in explanation.text and explanation.named is None)


def test_what_is_no_mistake_of_these_is_not_named():
    asked = Asks(textbook.ONLINE_DPO, OPTIONS["Online DPO"])
    weights = torch.linspace(1, 2, 16)
    other = dataclasses.replace(textbook.ONLINE_DPO, advantages=lambda *given: prefer(*given) * weights)
    assert asked.explain(other).named is None


def test_ties_and_pairs_without_a_preference_are_counted():
    total = torch.tensor([[1.0], [1.0], [math.nan], [2.0], [0.1 + 0.2], [0.3]])
    group = torch.block_diag(*[torch.ones(2, 2)] * 3).bool()
    cut = torch.zeros(6)
    signs = textbook.ONLINE_DPO.advantages(total, group, group, cut, textbook.Options())
    assert signs.tolist() == [1, -1, 0, 0, 1, -1], "the first of equally good ones is chosen, in float32"
    said = definition_online_dpo.say_ties(total, cut, textbook.Options())
    assert said.startswith("2 of 3 pairs are ties") and "of 1 of 3 pairs nothing was said" in said


def test_beta_of_an_epoch():
    args = OnlineDPOConfig(tempfile.gettempdir(), beta=[0.1, 0.2], use_cpu=True, bf16=False, report_to=[])
    for epoch, beta in ((None, 0.1), (0.9, 0.1), (1.0, 0.2), (7.5, 0.2)):
        state = type("State", (), {"epoch": epoch})()
        trainer = type("Trainer", (), {"args": args, "state": state})()
        assert algorithms.ALGORITHMS["OnlineDPOTrainer"].options(trainer, 0.9).beta == beta


def test_a_prompt_of_which_nothing_is_left_is_told():
    asked = Asks(textbook.ONLINE_DPO, dataclasses.replace(OPTIONS["Online DPO"], max_length=6))
    with pytest.raises(ValueError, match="leaves no token of a prompt"):
        asked.gradient(asked.options)


@needs_online_dpo
@pytest.mark.parametrize("name", ["fp16", "use_vllm", "neftune_noise_alpha"])
def test_what_is_compared_with_grpo_alone_is_no_finding(name, monkeypatch, pairs):
    """Also where GRPO's definition has it, and the common table lists it no more."""
    made = pairs()
    monkeypatch.delitem(fields.NOT_HERE, name, raising=False)
    assert not textbook.why_not_here(made)
    setattr(made.args, name, 5)
    assert any(line.startswith(name) for line in textbook.why_not_here(made))


def test_loss_types_are_those_of_the_algorithm(monkeypatch):
    monkeypatch.setattr(fields, "NOT_HERE", {})
    args = OnlineDPOConfig(tempfile.gettempdir(), loss_type="sigmoid", use_cpu=True, bf16=False, report_to=[])
    trainer = type("OnlineDPOTrainer", (), {"args": args})()
    assert not any("loss_type" in line for line in fields.why_not(trainer, ("sigmoid", "ipo")))
    assert any("loss_type" in line for line in fields.why_not(trainer))
