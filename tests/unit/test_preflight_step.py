"""Preflight's judge of the gradient: a step beside the textbook, its controls, and what is cut for it."""

import contextlib
import copy
import functools
import importlib.metadata
import itertools
import types

import pytest
import torch
import transformers
import trl
from injected import late_scores
from steps import SUMS, OnlineDPOTrainer, before, has, online_dpo, planted, trainer

from failurelab import textbook
from failurelab.handles import keep_random_state
from failurelab.textbook import suspects
from failurelab.textbook.rows import Row
from failurelab_preflight.finding import RELEASE, SCRIPT, Verdict
from failurelab_preflight.judges import settled
from failurelab_preflight.judges import textbook as textbook_judge
from failurelab_preflight.judges.textbook import SHORT_ENDS, StepJudge
from failurelab_preflight.stage import cuts
from failurelab_preflight.stage.rewards import differing_rewards, substitute_rewards
from failurelab_preflight.training import Training


def judge(made, small=True, missing=False, differing=False, **asked):
    """Train under the judge, with rewards that differ if so asked; return its answers by failure."""
    training = Training(made, asked, small=small)
    step = StepJudge(training, lambda: missing)
    with differing_rewards(training) if differing else contextlib.nullcontext(), step.listening():
        made.train()
    return {answer.failure: answer for answer in step.answers()}


def test_a_healthy_step_holds_with_planted_mistakes_seen(model, tokenizer, tmp_path):
    """Scores at prompt positions too, which are F3b."""
    answers = judge(trainer(model, tokenizer, tmp_path))
    assert answers["F21"].verdict is Verdict.HELD and answers["F3b"].verdict is Verdict.HELD
    assert "opposite sign: cosine -1" in answers["F21"].control and "32 completions" in answers["F21"].evidence


def test_a_stock_trainer_of_no_release_is_accused(model, tokenizer, tmp_path):
    """F21 of trl 0.14, which scores without a mask of the prompts' padding, and F15 before 0.16 were NAMED."""
    answers = judge(trainer(model, tokenizer, tmp_path, lengths=(4, 5), temperature=0.7), differing=True)
    assert not [answer for answer in answers.values() if answer.accuses], answers
    noted = {name for name, answer in answers.items() if answer.verdict is Verdict.NOTED}
    assert noted == {"F21", "F15"} if before("0.15") else noted == {"F15"} if before("0.16") else not noted


@pytest.mark.skipif(before("0.15"), reason="this release has no micro-batches of completions")
def test_a_micro_batch_that_is_lost_is_no_constant_size(model, tokenizer, tmp_path):
    """Its name is that of a size that Adam forgives, and its direction is wrong: it was HELD."""
    made = trainer(model, tokenizer, tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    backward, calls = made.accelerator.backward, itertools.count(1)
    made.accelerator.backward = lambda loss, **more: backward(loss * (next(calls) % 4 != 0), **more)
    found = judge(made)["F21"]
    assert found.verdict is Verdict.FOUND and "accumulation" in found.evidence, found


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda own: torch.where(own < 0, 0.5 * own.clamp(min=-1), own), Verdict.NOT_CHECKED),
        (lambda own: own.roll(1), Verdict.FOUND),
        (lambda own: own.abs(), Verdict.FOUND),
    ],
    ids=["bounded and scaled", "other rows'", "without a sign"],
)
def test_advantages_that_a_script_reshapes_are_a_question(change, verdict, model, tokenizer, tmp_path):
    """A bound on the library's own advantages may be meant; those of other rows, or without a sign, are not."""
    if before("0.15"):
        pytest.skip("advantages are made within compute_loss")

    class Reshaped(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            made = super()._generate_and_score_completions(inputs)
            return made | {"advantages": change(made["advantages"])}

    class OfOneMethod(trl.GRPOTrainer):  # trl 0.15
        def _prepare_inputs(self, inputs):
            made = super()._prepare_inputs(inputs)
            return made | {"advantages": change(made["advantages"])}

    kind = Reshaped if hasattr(trl.GRPOTrainer, "_generate_and_score_completions") else OfOneMethod
    assert judge(trainer(model, tokenizer, tmp_path, kind=kind))["F21"].verdict is verdict


def test_online_dpo_holds_and_its_micro_batches_are_added(model, tokenizer, tmp_path):
    """The library's own constant factor accuses nobody's script for sure; no mistake of GRPO's scores is told of.

    Its repair keeps the batch of a step.
    """
    held = judge(online_dpo(model, tokenizer, tmp_path))
    assert held["F21"].verdict is Verdict.HELD and "F15" not in held
    added = judge(online_dpo(model, tokenizer, tmp_path, gradient_accumulation_steps=2))["F21"]
    assert added.verdict is Verdict.NOTED and (added.harm, added.origin) == ("slows", RELEASE)
    options = {"gradient_accumulation_steps": 2, "optim": "sgd"}
    found = judge(online_dpo(model, tokenizer, tmp_path, **options))["F21"]
    assert found.verdict is Verdict.SUSPECTED and "micro-batches are added" in found.evidence
    assert dict(found.undo.values) == {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}


@pytest.mark.parametrize(
    ("transformers_version", "failure"),
    [("4.47.1", "F20"), ("4.48.0", "F21")],
    ids=["release adds", "release divides"],
)
def test_batches_that_a_release_adds_are_its_own(
    transformers_version, failure, model, tokenizer, tmp_path, monkeypatch
):
    """As trl 0.14 with transformers 4.46 and 4.47: F20, of which the registry has the releases, and no script's fault.

    The temperature that this trl leaves out is noted beside it, and not held to be there.
    """
    installed = {"trl": "0.14.0", "transformers": transformers_version}
    made = trainer(model, tokenizer, tmp_path, kind=planted(loss=lambda loss: 2 * loss))
    made.args.temperature = made.generation_config.temperature = 0.7  # tokens are drawn at it, and scored at 1
    monkeypatch.setattr(textbook_judge, "_overridden", lambda trainer: [])
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or version(name))
    found = judge(made)
    assert found[failure].verdict is found["F15"].verdict is Verdict.NOTED


@pytest.mark.parametrize("way", ["config", "processor"])
def test_a_temperature_that_the_arguments_do_not_tell(way, model, tokenizer, tmp_path):
    """A generate of the script's own drew at 0.5, scores were at 1, and F15 was HELD."""
    made = trainer(model, tokenizer, tmp_path, temperature=1.0)
    plain = made.model.generate

    def cooler(*args, generation_config=None, **kwargs):
        config, processors = copy.deepcopy(generation_config), transformers.LogitsProcessorList()
        if way == "config":
            config.temperature = 0.5
        else:
            processors.append(lambda ids, scores: scores / 0.5)
        return plain(*args, generation_config=config, logits_processor=processors, **kwargs)

    made.model.generate = cooler
    assert judge(made)["F15"].verdict is Verdict.FOUND


@pytest.mark.skipif(before("0.16"), reason="this release scores at another temperature")
def test_a_temperature_that_was_not_seen_is_not_held(model, tokenizer, tmp_path):
    """One token is left to draw, whatever it is divided by."""
    made = trainer(model, tokenizer, tmp_path, temperature=1.0)
    made.generation_config.top_k = 1
    answers = judge(made)
    assert answers["F15"].verdict is Verdict.NOT_CHECKED and answers["F21"].verdict is Verdict.HELD


def without(names):
    """Return a trainer whose loss does not know some of its own attributes."""

    class Without(trl.GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            kept = {name: getattr(self, name) for name in names}
            vars(self).update(names)
            try:
                return super().compute_loss(*args, **kwargs)
            finally:
                vars(self).update(kept)

    return Without


@pytest.mark.skipif(before("0.22"), reason="completions are made and used otherwise in this release")
@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"beta": 0.001}, {"beta": 0.0}),
        ({"beta": 0.0, "num_iterations": 2}, {"epsilon_low": 1e6, "epsilon_high": 1e6}),
    ],
    ids=["penalty", "bounds"],
)
def test_what_a_small_rate_does_not_show_is_asked_for(asked, names, model, tokenizer, tmp_path):
    """The policy was still its reference, or every ratio about 1, and a loss without either was HELD."""
    options = asked | {"max_steps": 3, "learning_rate": 1e-6, "steps_per_generation": 1}
    options |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    for kind, verdict in ((trl.GRPOTrainer, Verdict.HELD), (without(names), Verdict.FOUND)):
        made = trainer(copy.deepcopy(model), tokenizer, tmp_path, kind=kind, **options)
        answer = judge(made, differing=True)["F21"]
        assert answer.verdict is verdict, answer


@pytest.mark.parametrize(
    ("sizes", "stream", "verdict"),
    [((4,), False, Verdict.HELD), ((4,), True, Verdict.NOT_CHECKED), ((4, 5), False, Verdict.NOT_CHECKED)],
    ids=["of one length", "of a stream", "of several"],
)
def test_padding_that_may_come_is_not_held(sizes, stream, verdict, model, tokenizer, tmp_path):
    """What is trained on has one length: what the whole dataset has is asked, where it can be."""
    made = trainer(model, tokenizer, tmp_path, lengths=sizes)
    whole = made.train_dataset
    made.train_dataset = whole.filter(lambda row: len(row["prompt"]) == 4)
    whole = whole.to_iterable_dataset() if stream else whole
    step = StepJudge(Training(made, {}, dataset=whole))
    with step.listening():
        made.train()
    (answer,) = [each for each in step.answers() if each.failure == "F21"]
    assert answer.verdict is verdict and (verdict is Verdict.HELD) == ("no prompt is padded" in answer.evidence), answer


def test_completions_end_at_several_lengths_and_one_is_cut(model, tokenizer, tmp_path):
    """A small random model draws no end: masks and truncation would not show."""
    if not has("mask_truncated_completions"):
        return
    with torch.no_grad():
        model.lm_head.weight *= 0.05  # each token is about as likely, so that an end is rarely drawn
    rewards = [lambda completions, **_: substitute_rewards(len(completions), 4, 0)]
    options = {"mask_truncated_completions": True, "max_completion_length": 7}
    answer = judge(trainer(model, tokenizer, tmp_path, rewards=rewards, **options))["F21"]
    assert answer.verdict is Verdict.HELD and "mask_truncated" not in answer.evidence.partition("does not show")[2]


def test_a_mask_that_is_shifted_shows_where_completions_had_one_length(model, tokenizer, tmp_path):
    """They are ended at other places then: a mask of ones, rolled by one, was HELD."""

    def roll(given):
        return given | {"completion_mask": given["completion_mask"].roll(1, 1)}

    if before("0.15"):  # there the loss makes the mask itself
        return
    with torch.no_grad():
        model.lm_head.weight *= 0.05  # each token is about as likely
    rewards = [lambda completions, **_: substitute_rewards(len(completions), 4, 0)]
    for kind, verdict in ((trl.GRPOTrainer, Verdict.HELD), (planted(inputs=roll), Verdict.FOUND)):
        made = trainer(model, tokenizer, tmp_path, kind=kind, rewards=rewards, max_completion_length=3)
        made.generation_config.suppress_tokens = [tokenizer.eos_token_id]  # so none ends by itself
        assert judge(made, small=False)["F21"].verdict is verdict


def test_a_wrong_gradient_is_found(model, tokenizer, tmp_path):
    made = trainer(model, tokenizer, tmp_path, kind=planted(loss=torch.neg))
    answers = judge(made)
    assert answers["F21"].verdict is Verdict.FOUND and "opposite sign" in answers["F21"].evidence
    assert "Planted.compute_loss" in answers["F21"].evidence
    assert answers["F21"].undo is None and answers["F21"].origin == SCRIPT
    assert "F3b" not in answers, "of a wrong gradient nothing else is held"


def with_learned_positions(tokenizer):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(tokenizer), **sizes | ends | rates))


class InOrder(OnlineDPOTrainer):
    """Takes its prompts in the order of the dataset."""

    def _get_train_sampler(self, dataset=None):
        return torch.utils.data.SequentialSampler(dataset or self.train_dataset)


@pytest.mark.skipif(before("1.16"), reason="other releases count positions otherwise")
@pytest.mark.parametrize(
    ("sizes", "learned", "verdict"),
    [
        ((4, 4, 4, 5), True, Verdict.FOUND),  # the second step's batch is padded
        ((4, 4, 5, 5), False, Verdict.NOT_CHECKED),  # none is, though the prompts differ
        ((4, 4, 4, 5), False, Verdict.HELD),
        ((4, 4, 4, 4), False, Verdict.HELD),  # as in all of this script's batches
    ],
)
def test_a_batch_without_padding_does_not_show_what_padding_does(sizes, learned, verdict, model, tokenizer, tmp_path):
    """TRL #6800: Online DPO gives no positions. Two prompts of one length were drawn in the cut batch, and it held."""
    rows = [next(prompt for prompt in list(SUMS)[40 * at :] if len(prompt) == size) for at, size in enumerate(sizes)]
    options = {"kind": InOrder, "per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 1e-3}
    made = online_dpo(with_learned_positions(tokenizer) if learned else model, tokenizer, tmp_path, **options)
    made.train_dataset = made.train_dataset.from_dict({"prompt": rows})
    assert judge(made)["F21"].verdict is verdict


def test_every_second_rank_has_half_as_many_tokens_and_its_own_rewards():
    """Of two ranks that were alike, one that divides by its own tokens made the same gradient."""
    for rows in (2, 4, 8):
        long, short = (sum(1 + end for end in (order * 2)[:rows]) for order in (textbook_judge.ENDS, SHORT_ENDS))
        assert long >= 2 * short
    for generations in (2, 4):
        of_ranks = [substitute_rewards(4, generations, 0, rank) for rank in range(3)]
        assert len({tuple(own) for own in of_ranks}) == 3
    pairs = [one < two for one, two in (substitute_rewards(2, 2, 0, rank) for rank in (0, 1))]
    assert pairs == [True, False]  # whose advantages would be the same


@pytest.mark.parametrize(("lengths", "blind"), [((6, 6), True), ((8, 4), False)])
def test_what_a_rank_can_do_wrong_shows_where_ranks_are_unlike(lengths, blind, model, tokenizer):
    def rows_of(rank):
        for place, (prompt, tokens) in enumerate(itertools.product((0, 1), (0, 1))):
            length = lengths[rank] - tokens
            ids = tuple(5 + (7 * at + 3 * tokens + rank * (not blind)) % 20 for at in range(length))
            reward = (float(place % 2 if rank == 0 or blind else 1 - place % 2),)
            told = {"rewards": reward, "group": 2 * rank + prompt, "micro": rank, "rank": rank}
            yield Row((3, 4 + prompt), ids, True, **told, padded=(2, 8))

    rows = [row for rank in (0, 1) for row in rows_of(rank)]
    options = textbook.Options(loss_type="dapo", beta=0.0, temperature=1.0)
    gradient = functools.partial(textbook.expected_gradient, model, rows)
    ours, ranks = gradient(options), types.SimpleNamespace(count=2)
    search = suspects.Search(rows, options, textbook.GRPO, ours, textbook.Floor(), gradient, ranks=ranks)
    report = textbook.Comparison("HELD", "", controls=search.plant(ours))
    assert set(report.blind) == ({suspects.OWN_TOKENS, suspects.BETWEEN} if blind else set()), report.controls


def test_a_blind_measurement_does_not_hold(model, tokenizer, tmp_path, monkeypatch):
    """A planted shift that makes the same gradient, as where no token depends on the one before."""
    monkeypatch.setattr(textbook.Comparison, "sees", lambda self, mistake: mistake != "scores shifted by one")
    answer = judge(trainer(model, tokenizer, tmp_path))["F21"]
    assert answer.verdict is Verdict.NOT_CHECKED and "scores shifted by one planted it looks the same" in answer.why


@pytest.mark.parametrize("last_bit", [0.0, 2.0**-22])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_penalty_is_compared_once_the_policy_has_left_its_reference(sign, last_bit, model, tokenizer, tmp_path):
    """At the first step its gradient is 0, whatever it is multiplied by, or rounding."""
    options = {"beta": 0.4, "max_steps": 3, "learning_rate": 1e-3}
    made = trainer(model, tokenizer, tmp_path, kind=trl.GRPOTrainer, **options)
    made.beta *= sign
    with torch.no_grad():
        noise = torch.randn(made.ref_model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        made.ref_model.lm_head.weight.mul_(1 + last_bit * noise)
    answer = judge(made, differing=True)["F21"]
    assert answer.verdict is (Verdict.HELD if sign > 0 else Verdict.FOUND)
    assert ("step 1 and 2" if sign > 0 else "step 2") in answer.evidence.lower()
    assert "beta" not in answer.evidence.partition("does not show")[2]


def test_mistakes_are_planted_in_the_step_that_holds(model, tokenizer, tmp_path):
    """The first step shows nothing where all rewards are equal: the second one holds, and not without its controls."""
    calls = []

    def rewards(completions, **_):
        calls.append(len(completions))
        return [float(len(calls) > 1) * number for number in range(len(completions))]

    answer = judge(trainer(model, tokenizer, tmp_path, rewards=[rewards], max_steps=3, gradient_accumulation_steps=1))[
        "F21"
    ]
    assert answer.verdict is Verdict.HELD and answer.evidence.startswith("step 2") and "opposite sign" in answer.control


def test_tensors_without_a_gradient_are_another_judge_s_finding(model, tokenizer, tmp_path):
    """F1 or F2; what else is wrong with the gradient is asked again without that."""
    answers = judge(trainer(model, tokenizer, tmp_path, kind=planted(loss=lambda loss: -loss)), missing=True)
    assert answers["F21"].verdict is Verdict.NOT_CHECKED and "cosine -1" in answers["F21"].why
    assert not [answer for answer in answers.values() if answer.accuses]


@pytest.mark.skipif(before("0.15"), reason="rows are generated within compute_loss")
@pytest.mark.parametrize("asked, drawn", [(0.7, 0.7), (1.0, 0.7), (0.8, 0.5)])
def test_scores_at_another_temperature_than_the_sampling_s_are_f15(asked, drawn, model, tokenizer, tmp_path):
    """Before 0.16 scores leave it out; what generation_kwargs say reaches the sampling alone, in every release."""
    if not has("generation_kwargs") and asked != drawn:
        pytest.skip("this release has no generation_kwargs")
    more = {"generation_kwargs": {"temperature": drawn}} if asked != drawn else {}
    answers = judge(trainer(model, tokenizer, tmp_path, temperature=asked, **more))
    own = Verdict.NOTED if before("0.16") else Verdict.HELD  # where the arguments are what is drawn at
    assert answers["F15"].verdict is (own if asked == drawn else Verdict.FOUND), answers
    if asked != drawn:
        assert answers["F15"].undo.values == {"temperature": drawn}
        assert "F21" not in answers  # prompts of one length: a missing mask would not show


@pytest.mark.parametrize(
    ("named", "changed", "told"),
    [
        ("divided by the tokens of the generation", False, ("F20", RELEASE)),
        ("divided by the tokens of the generation", True, ("F20", SCRIPT)),
        ("no attention mask", False, ("F21", RELEASE)),
        ("temperature", False, ("F15", RELEASE)),
        ("opposite sign", False, ("F21", "")),
        ("opposite sign", True, ("F21", SCRIPT)),
    ],
)
def test_what_a_release_does_is_told_by_the_registry_s_versions(
    named, changed, told, model, tokenizer, tmp_path, monkeypatch
):
    """F20 is trl's from 0.22 to 1.9, F15 up to 0.15, the missing mask 0.14's; elsewhere nobody knows whose it is."""
    judged = StepJudge(Training(trainer(model, tokenizer, tmp_path), {}))
    affected = {"F20": "1.5.0", "F15": "0.15.2", "F21": "0.14.0"}[told[0]]
    for trl_version, expected in (
        (affected, told),
        ("1.16.0", ("F15" if told[0] == "F15" else "F21", SCRIPT * changed)),
    ):
        monkeypatch.setattr(settled.importlib.metadata, "version", {"trl": trl_version, "transformers": "4.56.2"}.get)
        assert judged._failure(named, changed=changed, aligned=True) == expected


def test_what_cannot_be_compared_is_not_checked(model, tokenizer, tmp_path):
    equal = trainer(model, tokenizer, tmp_path, rewards=[lambda completions, **_: [1.0] * len(completions)])
    assert "F10" in judge(equal)["F21"].why
    answer = judge(trainer(model, tokenizer, tmp_path), use_vllm=True)["F21"]
    assert answer.verdict is Verdict.NOT_CHECKED and "use_vllm is cut away" in answer.why and "cosine +1" in answer.why
    assert "no textbook here for LateScores" in judge(late_scores(model, tokenizer))["F21"].why


class Caches(trl.GRPOTrainer):
    """A speed-up that somebody wrote, where `cached` is true."""

    cached, kept = True, None

    def _prepare_inputs(self, inputs):
        self.kept = self.kept or super()._prepare_inputs(inputs)
        kept = self.kept
        self.kept = kept if self.cached else None
        return kept


@pytest.mark.skipif(before("0.15"), reason="completions are drawn in compute_loss")
@pytest.mark.parametrize("cached", [True, False])
def test_completions_that_are_kept_from_step_to_step(cached, model, tokenizer, tmp_path):
    """Nothing was said: the first step is as it should be."""
    kind = type("Kind", (Caches,), {"cached": cached})
    made = trainer(model, tokenizer, tmp_path, kind=kind, max_steps=3, gradient_accumulation_steps=1)
    step = StepJudge(Training(made, {}))
    with step.listening():
        made.train()
    assert ("F21:rollouts" in [answer.key for answer in step.answers() if answer.accuses]) is cached


SEEN = {"opposite sign": textbook.Apart(-1.0, 1.0, 2.0), "scores shifted by one": textbook.Apart(0.0, 1.0, 1.0)}


class State(transformers.TrainerCallback):
    def __init__(self, trainer, states):
        self.trainer, self.states = trainer, states

    def on_pre_optimizer_step(self, args, state, control, **_):
        parameters = list(self.trainer.model.parameters())
        grads = [None if p.grad is None else p.grad.clone() for p in parameters]
        self.states.append((torch.get_rng_state(), [p.requires_grad for p in parameters], grads))


def test_the_step_is_afterwards_what_it_was(model, tokenizer, tmp_path):
    """Random state, gradients and requires_grad, also where an explanation is searched for."""
    made, states = trainer(model, tokenizer, tmp_path, kind=planted(loss=lambda loss: -loss)), []
    first, step = State(made, states), StepJudge(Training(made, {}))
    made.add_callback(first)
    with step.listening():
        made.add_callback(State(made, states))
        made.train()
    (draws, required, grads), (draws_after, required_after, grads_after) = states
    assert step.reports[0].verdict == "FOUND" and torch.equal(draws, draws_after) and required == required_after
    assert all(one is other or torch.equal(one, other) for one, other in zip(grads, grads_after))


def test_substitute_rewards_differ_by_row_group_and_function():
    with keep_random_state():
        one, two = (substitute_rewards(8, 4, function) for function in (0, 1))
    assert len(set(one[:4])) == len(set(two[:4])) == 4 and one[:4] != one[4:] and one != two
    for functions in (1, 2, 3):
        table = [substitute_rewards(8, 2, function) for function in range(functions)]
        totals = [sum(column) for column in zip(*table)]
        assert all(totals[place] != totals[place + 1] for place in range(0, 8, 2))


ONE = {"num_generations": 8, "gradient_accumulation_steps": 1, "num_iterations": 1}


@pytest.mark.parametrize(
    ("asked", "completions", "accumulated"),
    [
        ({"per_device_train_batch_size": 8}, 4, 1),
        ({"per_device_train_batch_size": 32}, 8, 1),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}, 2, 2),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, 4, 2),
        ({"per_device_train_batch_size": 6, "num_generations": 3, "gradient_accumulation_steps": 2}, 3, 2),
        ({"per_device_train_batch_size": 3, "num_generations": 6, "gradient_accumulation_steps": 2}, 2, 2),
    ],
)
def test_a_batch_is_cut_to_the_script_s_own_kind(asked, completions, accumulated, monkeypatch):
    """One prompt a generation stays one, for a batch without padding has no failures of padding."""
    monkeypatch.setattr(cuts, "counts_prompts", lambda: False)
    cut = cuts._cut_batch(ONE | {"steps_per_generation": None, "generation_batch_size": None} | asked)
    assert (cut["per_device_train_batch_size"], cut["gradient_accumulation_steps"]) == (completions, accumulated)
    together = completions * accumulated
    assert together % cut["num_generations"] == 0 and together // cut["num_generations"] <= 2


def test_iterations_and_steps_of_a_generation_are_kept(monkeypatch):
    monkeypatch.setattr(cuts, "counts_prompts", lambda: False)
    more = {"per_device_train_batch_size": 8, "num_iterations": 5, "steps_per_generation": 4}
    cut = cuts._cut_batch(ONE | more)
    assert (cut["num_iterations"], cut["steps_per_generation"], cut["gradient_accumulation_steps"]) == (2, 2, 1)
    monkeypatch.setattr(cuts, "counts_prompts", lambda: True)
    cut = cuts._cut_batch(ONE | {"per_device_train_batch_size": 1})
    assert cut["per_device_train_batch_size"] == 1


@pytest.mark.parametrize(
    ("device", "generations", "launch", "rows"), [(2, 8, 4, 2), (8, 8, 4, 4), (3, 6, 3, 2), (1, 16, 8, 2)]
)
def test_a_group_that_lies_on_several_processes_does_so_when_cut(device, generations, launch, rows, monkeypatch):
    """Two processes have half a group each where those of the launch have a part; a whole group stays on one."""
    monkeypatch.setattr(cuts, "counts_prompts", lambda: False)
    asked = ONE | {"per_device_train_batch_size": device, "num_generations": generations}
    cut = cuts._cut_batch(asked | {"steps_per_generation": None}, cuts.Processes(launch, 2))
    assert cut["per_device_train_batch_size"] == rows and 2 * rows % cut["num_generations"] == 0


WITH_ROLLOUTS = pytest.mark.skipif(
    "rollout_func" not in trl.GRPOTrainer.__init__.__code__.co_varnames, reason="no rollouts of one's own"
)


def answers_to(made):
    """Train under the judge, to which this file is the script's own; return all that it answers."""
    step = StepJudge(Training(made, {}, own=lambda file: file == __file__))
    with step.listening():
        made.train()
    return list(step.answers())


def drawn_by_generate(prompts, trainer, cut):
    """Draw completions as `model.generate` gives them: rows of one length, unless they are cut."""
    tokenizer = trainer.processing_class
    asked = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    drawn = trainer.model.generate(**asked, max_new_tokens=6, do_sample=True, return_dict_in_generate=True)
    rows = [row.tolist() for row in drawn.sequences[:, asked["input_ids"].shape[1] :]]
    end = tokenizer.eos_token_id
    rows = [row[: row.index(end) + 1] if cut and end in row else row for row in rows]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}


@WITH_ROLLOUTS
@pytest.mark.parametrize(("cut", "verdict"), [(True, Verdict.HELD), (False, Verdict.FOUND)])
def test_a_rollout_function_that_returns_the_padding(cut, verdict, model, tokenizer, tmp_path):
    """It is trained on."""

    def rollout(prompts, trainer):
        return drawn_by_generate(prompts, trainer, cut)

    answers = answers_to(trainer(model, tokenizer, tmp_path, more=[("rollout_func", rollout)]))
    assert next(each for each in answers if each.failure == "F13" and each.fault != "end").verdict is verdict
    step = {each.failure: each.verdict for each in answers}["F21"]
    assert step is (Verdict.HELD if cut else Verdict.NOT_CHECKED)  # of one length: another divisor would not show


class OwnMask(trl.GRPOTrainer):
    """A trainer whose mask of the completions is the script's own; `whole` is what it does with the padding."""

    whole = False

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        mask = batch["completion_mask"]
        return batch | {"completion_mask": torch.ones_like(mask) if self.whole else mask.clone()}


@pytest.mark.skipif(before("0.16"), reason="rows are generated elsewhere")
@pytest.mark.parametrize(("whole", "verdict"), [(True, Verdict.FOUND), (False, Verdict.HELD)])
def test_a_mask_of_the_script_s_own_that_has_the_padding_in_it(whole, verdict, model, tokenizer, tmp_path):
    """F13 was held by the tokenizer's end alone."""
    kind = type("Kind", (OwnMask,), {"whole": whole})
    answers = [each for each in answers_to(trainer(model, tokenizer, tmp_path, kind=kind)) if each.failure == "F13"]
    assert [each.verdict for each in answers] == [verdict]


@WITH_ROLLOUTS
@pytest.mark.parametrize(
    ("again", "masks", "verdict"),
    [
        (1.0, True, Verdict.FOUND),
        (1.0, False, Verdict.SUSPECTED),
        (0.5, False, Verdict.SUSPECTED),
        (0, True, Verdict.HELD),
    ],
)
def test_a_rollout_function_that_loses_the_end(again, masks, verdict, model, tokenizer, tmp_path):
    """Text that is encoded again has no end: each completion was masked as a cut one, and nothing was said."""

    def rollout(prompts, trainer):
        output = drawn_by_generate(prompts, trainer, cut=True)
        if again == 0.5:
            ids = output["completion_ids"]
            output["completion_ids"] = [
                row[:-1] if place % 2 and len(row) > 1 else row for place, row in enumerate(ids)
            ]
        elif again:
            texts = tokenizer.batch_decode(output["completion_ids"], skip_special_tokens=True)
            output["completion_ids"] = [tokenizer(text or " ", add_special_tokens=False)["input_ids"] for text in texts]
        return output

    made = trainer(model, tokenizer, tmp_path, more=[("rollout_func", rollout)], mask_truncated_completions=masks)
    (answer,) = [each for each in answers_to(made) if each.fault == "end"]
    assert answer.failure == "F13" and answer.verdict is verdict
    assert verdict is not Verdict.FOUND or "none of its tokens is trained on" in answer.evidence


def two_turns(prompts, trainer, way, tokens=3):
    """Draw a second answer behind a smaller sum with the same result, and return both turns in one of several ways."""
    tokenizer = trainer.processing_class

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def draw(context):
        asked = torch.tensor([context])
        options = {"max_new_tokens": tokens, "do_sample": True, "pad_token_id": tokenizer.pad_token_id}
        drawn = trainer.model.generate(input_ids=asked, attention_mask=torch.ones_like(asked), **options)
        ids = drawn[0, len(context) :].tolist()
        return ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else ids

    rows = {"prompt_ids": [], "completion_ids": [], "env_mask": []}
    for prompt in prompts:
        one, two = encode(prompt), encode(f"{prompt[::-1].strip('=')}=")
        if way == "engine":
            first, more = encode("12"), []
            draw(encode("is it right?"))  # as a judge's word, which is returned nowhere
        elif way == "best":
            first, more = max((draw(one) for _ in range(3)), key=sum), []
        elif way == "hint":
            first, more = draw(encode("hint: ") + one), []
        else:
            first = draw(one)
            more = draw(one + first + two if way == "ids" else two)
        rows["prompt_ids"].append(one + two if way == "joined" else one)
        between = two if way == "ids" else []
        rows["completion_ids"].append(first + between + more)
        rows["env_mask"].append([1] * len(first) + [0] * len(between) + [1] * len(more))
    if way != "ids":
        del rows["env_mask"]
    return rows | {"logprobs": None}


@WITH_ROLLOUTS
@pytest.mark.parametrize(
    ("way", "tokens", "accused"),
    [("joined", 1, True), ("joined", 3, True), ("hint", 3, True), ("ids", 1, False), ("ids", 3, False),
     ("best", 3, False), ("engine", 3, False)],
)  # fmt: skip
def test_tokens_that_are_scored_in_another_context_than_they_were_drawn_in(
    way, tokens, accused, model, tokenizer, tmp_path
):
    """The ids were those that were drawn, so nothing was said: the prompts of both turns stood before both answers."""

    def rollout(prompts, trainer):
        return two_turns(prompts, trainer, way, tokens)

    def unequal(completions, **_):
        return [float(place % 4) for place in range(len(completions))]

    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "rewards": [unequal]}
    made = trainer(model, tokenizer, tmp_path, more=[("rollout_func", rollout)], **options)
    answers = [each for each in answers_to(made) if each.failure == "F18"]
    assert [each.verdict is Verdict.FOUND for each in answers] == [accused]
    for each in answers * accused:
        apart, count = each.figures
        assert apart.value > 0.1 and 4 <= count.value <= count.scale


@WITH_ROLLOUTS
@pytest.mark.parametrize(
    ("draws", "synchronizes", "rate", "verdict"),
    [
        ("other", False, 1e-2, Verdict.SUSPECTED),
        ("object", False, 1e-2, Verdict.SUSPECTED),
        ("other", True, 1e-2, Verdict.HELD),
        ("other", False, 0.0, Verdict.NOT_CHECKED),
        ("both", False, 1e-2, None),  # what the policy drew as well is nobody's alone
    ],
)
def test_a_model_that_draws_and_never_gets_the_weights(draws, synchronizes, rate, verdict, model, tokenizer, tmp_path):
    """A copy of the policy drew while the policy was trained, and nothing was said."""
    other = copy.deepcopy(model)

    def rollout(prompts, trainer):
        if synchronizes:
            other.load_state_dict(trainer.model.state_dict())
        drawer = types.SimpleNamespace(model=other, processing_class=tokenizer)
        if draws == "both":
            drawn_by_generate(prompts, trainer, cut=True)
        return drawn_by_generate(prompts, drawer, cut=True)

    engine = type("Engine", (), {"__call__": lambda self, prompts, trainer: rollout(prompts, trainer)})
    rollout_func = engine() if draws == "object" else rollout
    made = trainer(model, tokenizer, tmp_path, more=[("rollout_func", rollout_func)], max_steps=2, learning_rate=rate)
    answers = [answer for answer in answers_to(made) if answer.failure == "F16"]
    assert [answer.verdict for answer in answers] == [verdict] * (verdict is not None)


def own_loop(stacked, repeated, grouped):
    """Return a trainer that draws one completion of each prompt at a time, with rows, answers and groups in an order.

    Each is by `call` (P1 P2 .. P1 P2 ..) or by `prompt` (P1 P1 .. P2 P2 ..).
    """

    class OwnLoop(trl.GRPOTrainer):
        def _prepare_inputs(self, inputs):
            return inputs

        def compute_loss(self, model, inputs, *rest, **options):
            size, tok = self.num_generations, self.processing_class
            rows = [inputs[place] for place in range(0, len(inputs), 1 if before("0.15") else size)]
            asked = tok([row["prompt"] for row in rows], return_tensors="pt", padding=True, add_special_tokens=False)
            width, config = asked["input_ids"].shape[1], copy.deepcopy(self.generation_config)
            config.num_return_sequences = 1
            with torch.no_grad():
                calls = [model.generate(**asked, generation_config=config)[:, width:] for _ in range(size)]
            longest = max(call.shape[1] for call in calls)
            pad = tok.pad_token_id
            calls = [torch.nn.functional.pad(call, (0, longest - call.shape[1]), value=pad) for call in calls]

            def in_order(values, order):
                return [each for each in values for _ in range(size)] if order == "prompt" else list(values) * size

            drawn = torch.stack(calls, 1).flatten(0, 1) if stacked == "prompt" else torch.cat(calls)
            prompts, masks = (torch.stack(in_order(asked[name], stacked)) for name in ("input_ids", "attention_mask"))
            ended = (drawn == tok.eos_token_id).int()
            mask = (ended.cumsum(1) - ended == 0).int()
            logits = model(torch.cat([prompts, drawn], 1), attention_mask=torch.cat([masks, mask], 1)).logits
            logps = logits[:, width - 1 : -1].log_softmax(-1).gather(2, drawn[..., None])[..., 0]
            texts = tok.batch_decode(drawn, skip_special_tokens=True)
            asked_for, answer = (in_order([row[name] for row in rows], repeated) for name in ("prompt", "answer"))
            given = {"prompts": asked_for, "completions": texts, "answer": answer}
            rewards = torch.tensor([function(**given) for function in self.reward_funcs]).sum(0)
            groups = rewards.view(-1, size) if grouped != "call" else rewards.view(size, -1).T
            worth = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
            worth = (worth if grouped != "call" else worth.T).reshape(-1)
            loss = -(logps - logps.detach()).exp() * worth[:, None] * mask
            return (loss.sum(1) / mask.sum(1)).mean()

    return OwnLoop


@pytest.mark.parametrize(
    ("stacked", "repeated", "grouped", "gradient", "pairs"),
    [
        ("call", "prompt", "prompt", Verdict.NOT_CHECKED, True),
        ("prompt", "call", "prompt", Verdict.HELD, True),
        ("prompt", "prompt", "prompt", Verdict.HELD, False),
        ("call", "call", "call", Verdict.NOT_CHECKED, False),
    ],
)
def test_a_loop_of_one_s_own_that_mixes_two_orders(
    stacked, repeated, grouped, gradient, pairs, model, tokenizer, tmp_path
):
    """Completions by call, answers and groups by prompt: such groups are not judged, and the answers are."""
    options = {"loss_type": "grpo"} if has("loss_type") else {}
    options |= {"gradient_accumulation_steps": 1, "optim": "sgd"}
    made = trainer(model, tokenizer, tmp_path, kind=own_loop(stacked, repeated, grouped), **options)
    step = StepJudge(Training(made, {}))
    with step.listening():
        made.train()
    answers = list(step.answers())
    (of_gradient,) = [answer for answer in answers if answer.failure == "F21"]
    # Rounding decides whether this loss, which is 0, was ever below.
    assert of_gradient.verdict is gradient or (gradient is Verdict.HELD and "losses_negative" in of_gradient.why)
    of_pairs = [answer for answer in answers if answer.failure == "F14"]
    assert [answer.verdict for answer in of_pairs] == [Verdict.FOUND] * pairs
    assert all(2 * answer.figures[0].value > answer.figures[0].scale for answer in of_pairs)
