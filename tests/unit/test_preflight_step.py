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
from failurelab.textbook import suspects
from failurelab.textbook.rows import Row
from failurelab_preflight.finding import RELEASE, SCRIPT, Verdict
from failurelab_preflight.judges import textbook as textbook_judge
from failurelab_preflight.judges.textbook import SHORT_ENDS, StepJudge
from failurelab_preflight.stage import cuts
from failurelab_preflight.stage.rewards import differing_rewards, substitute_rewards
from failurelab_preflight.training import Training

FOUND, HELD, NOTED, NOT_CHECKED = Verdict.FOUND, Verdict.HELD, Verdict.NOTED, Verdict.NOT_CHECKED
ALONE = {"gradient_accumulation_steps": 1, "max_steps": 3}


def all_of(made, missing=False, differing=False, dataset=None, own=False, small=True, **asked):
    """Train under the judge, with rewards that differ if so asked; return all that it answers."""
    training = Training(made, asked, dataset=dataset, small=small, own=lambda file: own and file == __file__)
    step = StepJudge(training, lambda: missing)
    with differing_rewards(training) if differing else contextlib.nullcontext(), step.listening():
        made.train()
    return list(step.answers())


def judge(made, **more):
    """Return the judge's answers by failure."""
    return {answer.failure: answer for answer in all_of(made, **more)}


def ranked(completions, **_):
    return substitute_rewards(len(completions), 4, 0)


def equal(completions, **_):
    return [1.0] * len(completions)


class EqualAtFirst:
    """Rewards that are equal in the first step."""

    __name__ = "equal_at_first"

    def __init__(self):
        self.calls = 0

    def __call__(self, completions, **_):
        self.calls += 1
        return [float(self.calls > 1) * number for number in range(len(completions))]


def reshaping(change):
    """Return a trainer whose own method changes the advantages that the library's has made."""
    name = "_generate_and_score_completions"
    name = name if hasattr(trl.GRPOTrainer, name) else "_prepare_inputs"  # of trl 0.15

    def own(self, inputs):
        made = getattr(trl.GRPOTrainer, name)(self, inputs)
        return made | {"advantages": change(made["advantages"])}

    return type("Reshaped", (trl.GRPOTrainer,), {name: own})


class Caches(trl.GRPOTrainer):
    """A speed-up that somebody wrote."""

    kept = None

    def _prepare_inputs(self, inputs):
        self.kept = self.kept or super()._prepare_inputs(inputs)
        return self.kept


def loses_a_micro_batch(made):
    backward, calls = made.accelerator.backward, itertools.count(1)
    made.accelerator.backward = lambda loss, **more: backward(loss * (next(calls) % 4 != 0), **more)


def draws_cooler(made):
    """Give the drawing a processor that no argument tells of."""
    plain, cooler = made.model.generate, transformers.LogitsProcessorList([lambda ids, scores: scores / 0.5])
    made.model.generate = lambda *args, **more: plain(*args, logits_processor=cooler, **more)


def draws_one_token(made):
    made.generation_config.top_k = 1  # is left to draw, whatever it is divided by


def ends_never(made):
    """Let no completion end by itself; each token is about as likely."""
    made.generation_config.suppress_tokens = [made.processing_class.eos_token_id]
    with torch.no_grad():
        made.model.lm_head.weight *= 0.05


def rolled(given):
    return given | {"completion_mask": given["completion_mask"].roll(1, 1)}


SCALED = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
CUT = {"mask_truncated_completions": True, "max_completion_length": 7, "rewards": [ranked]}
ONE_LENGTH = {"max_completion_length": 3, "rewards": [ranked]}
NEGATIVE = planted(loss=torch.neg)
BOUNDED = reshaping(lambda own: torch.where(own < 0, 0.5 * own.clamp(min=-1), own))
# What is made of a step, from which release on, what is done to the trainer, what is asked, and what is said.
STEPS = {
    "healthy": ({}, "0", None, {}, {"F21": HELD, "F3b": HELD}, "32 completions"),
    "opposite_sign": ({"kind": NEGATIVE}, "0", None, {}, {"F21": FOUND, "F3b": None}, "Planted.compute_loss"),
    # F1 or F2; what else is wrong with the gradient is asked again without that.
    "without_a_gradient": ({"kind": NEGATIVE}, "0", None, {"missing": True}, {"F21": NOT_CHECKED}, "cosine -1"),
    # Its name is that of a size that Adam forgives, and its direction is wrong: it was HELD.
    "a lost micro-batch": (SCALED, "0.15", loses_a_micro_batch, {}, {"F21": FOUND}, "accumulation"),
    # A bound on the library's own advantages may be meant; those without a sign are not.
    "bounded": ({"kind": BOUNDED}, "0.15", None, {}, {"F21": NOT_CHECKED}, "Is that meant?"),
    "without a sign": ({"kind": reshaping(torch.abs)}, "0.15", None, {}, {"F21": FOUND}, ""),
    # A generate of the script's own drew at 0.5, scores were at 1, and F15 was HELD.
    "drawn cooler": ({}, "0", draws_cooler, {}, {"F15": FOUND}, ""),
    "one token drawn": ({}, "0.16", draws_one_token, {}, {"F15": NOT_CHECKED, "F21": HELD}, ""),
    # A small random model draws no end: masks and truncation would not show.
    "cut": (CUT, "0.18", ends_never, {}, {"F21": HELD}, ""),
    # They are ended at other places then: a mask of ones, rolled by one, was HELD.
    "shifted": (
        {"kind": planted(inputs=rolled), **ONE_LENGTH},
        "0.15",
        ends_never,
        {"small": False},
        {"F21": FOUND},
        "",
    ),
    "equal rewards": ({"rewards": [equal]}, "0", None, {}, {"F21": NOT_CHECKED}, "F10"),
    "an engine": ({}, "0", None, {"use_vllm": True}, {"F21": NOT_CHECKED}, "use_vllm is cut away"),
    # The second step holds, and not without its controls.
    "equal at first": ({"rewards": [EqualAtFirst()], **ALONE}, "0", None, {}, {"F21": HELD}, "step 2"),
    # The first step is as it should be, and nothing was said.
    "completions kept": ({"kind": Caches, **ALONE}, "0.15", None, {}, {"F21": NOT_CHECKED}, "drawn in step 1 alone"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_judged(name, model, tokenizer, tmp_path):
    options, since, change, asked, expected, said = STEPS[name]
    if before(since) or (name == "cut" and not has("mask_truncated_completions")):
        pytest.skip("another release")
    made = trainer(model, tokenizer, tmp_path, **options)
    if change:
        change(made)
    answers = judge(made, **asked)
    told = {failure: answers[failure].verdict if failure in answers else None for failure in expected}
    assert told == expected, answers
    of_first = answers[next(iter(expected))]
    assert said in of_first.evidence + of_first.why
    if of_first.failure == "F21" and of_first.verdict is HELD:
        assert "opposite sign: cosine -1" in of_first.control
        assert "mask_truncated" not in of_first.evidence.partition("does not show")[2]
    elif of_first.failure == "F21" and of_first.verdict is NOT_CHECKED:
        assert not [answer for answer in answers.values() if answer.accuses]
    elif name == "opposite_sign":
        assert (of_first.origin, of_first.undo) == (SCRIPT, None)


def test_a_stock_trainer_of_no_release_is_accused(model, tokenizer, tmp_path):
    """F21 of trl 0.14, which scores without a mask of the prompts' padding, and F15 before 0.16 were NAMED."""
    answers = judge(trainer(model, tokenizer, tmp_path, lengths=(4, 5), temperature=0.7), differing=True)
    assert not [answer for answer in answers.values() if answer.accuses], answers
    noted = {name for name, answer in answers.items() if answer.verdict is NOTED}
    assert noted == ({"F21"} if before("0.15") else {"F15"} if before("0.16") else set())


def test_online_dpo_holds_and_its_micro_batches_are_added(model, tokenizer, tmp_path):
    """The library's own constant factor accuses nobody's script for sure; no mistake of GRPO's scores is told of."""
    held = judge(online_dpo(model, tokenizer, tmp_path))
    assert held["F21"].verdict is HELD and "F15" not in held
    added = judge(online_dpo(model, tokenizer, tmp_path, gradient_accumulation_steps=2))["F21"]
    assert added.verdict is NOTED and (added.harm, added.origin) == ("slows", RELEASE)
    found = judge(online_dpo(model, tokenizer, tmp_path, gradient_accumulation_steps=2, optim="sgd"))["F21"]
    assert found.verdict is Verdict.SUSPECTED and "micro-batches are added" in found.evidence
    assert "gradient_accumulation_steps=1" in found.repair


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
    options = asked | ALONE | {"steps_per_generation": 1, "per_device_train_batch_size": 8}
    for kind, verdict in ((trl.GRPOTrainer, HELD), (without(names), FOUND)):
        answer = judge(trainer(copy.deepcopy(model), tokenizer, tmp_path, kind=kind, **options), differing=True)["F21"]
        assert answer.verdict is verdict, answer


@pytest.mark.parametrize(
    ("sizes", "stream", "verdict"),
    [((4,), False, HELD), ((4,), True, NOT_CHECKED), ((4, 5), False, NOT_CHECKED)],
    ids=["of one length", "of a stream", "of several"],
)
def test_padding_that_may_come_is_not_held(sizes, stream, verdict, model, tokenizer, tmp_path):
    """What is trained on has one length: what the whole dataset has is asked, where it can be."""
    made = trainer(model, tokenizer, tmp_path, lengths=sizes)
    whole = made.train_dataset
    made.train_dataset = whole.filter(lambda row: len(row["prompt"]) == 4)
    answer = judge(made, dataset=whole.to_iterable_dataset() if stream else whole)["F21"]
    assert answer.verdict is verdict and (verdict is HELD) == ("no prompt is padded" in answer.evidence), answer


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
        ((4, 4, 4, 5), True, FOUND),  # the second step's batch is padded
        ((4, 4, 5, 5), False, NOT_CHECKED),  # none is, though the prompts differ
        ((4, 4, 4, 5), False, HELD),
    ],
)
def test_a_batch_without_padding_does_not_show_what_padding_does(sizes, learned, verdict, model, tokenizer, tmp_path):
    """TRL #6800: Online DPO gives no positions. Two prompts of one length were drawn in the cut batch, and it held."""
    rows = [next(prompt for prompt in list(SUMS)[40 * at :] if len(prompt) == size) for at, size in enumerate(sizes)]
    options = {"kind": InOrder, "per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 1e-3}
    made = online_dpo(with_learned_positions(tokenizer) if learned else model, tokenizer, tmp_path, **options)
    made.train_dataset = made.train_dataset.from_dict({"prompt": rows})
    assert judge(made)["F21"].verdict is verdict


def test_rewards_and_ends_differ_by_row_group_function_and_rank():
    """Of two ranks that were alike, one that divides by its own tokens made the same gradient."""
    for rows in (2, 4, 8):
        long, short = (sum(1 + end for end in (order * 2)[:rows]) for order in (textbook_judge.ENDS, SHORT_ENDS))
        assert long >= 2 * short
    for generations in (2, 4):
        assert len({tuple(substitute_rewards(4, generations, 0, rank)) for rank in range(3)}) == 3
    pairs = [one < two for one, two in (substitute_rewards(2, 2, 0, rank) for rank in (0, 1))]
    assert pairs == [True, False]  # whose advantages would be the same
    one, two = (substitute_rewards(8, 4, function) for function in (0, 1))
    assert len(set(one[:4])) == len(set(two[:4])) == 4 and one[:4] != one[4:] and one != two
    for functions in (1, 2, 3):
        totals = [sum(each) for each in zip(*(substitute_rewards(8, 2, function) for function in range(functions)))]
        assert all(totals[place] != totals[place + 1] for place in range(0, 8, 2))


@pytest.mark.parametrize(
    ("tokens", "own", "lengths"),  # that were drawn, the place of their own end, and what is left
    [
        (8, 8, [8, 6, 4, 2]),
        (3, 3, [3, 3, 3, 2]),
        (8, 1, [2, 2, 1, 2]),
        (80, 80, [80, 51, 31, 11]),
    ],
)
def test_completions_end_at_several_places_however_long_they_are(tokens, own, lengths, tokenizer):
    """A mask of ones, rolled by one, was HELD where all completions had one length."""
    drawn = torch.full((4, 2 + tokens), 7)
    drawn[:, 2 + own : 3 + own] = end = tokenizer.eos_token_id
    drawn[:, 3 + own :] = tokenizer.pad_token_id
    trainer = types.SimpleNamespace(processing_class=tokenizer, state=types.SimpleNamespace(global_step=0))
    ended = StepJudge(Training(trainer, {}))._end(lambda ids: drawn, drawn[:, :2])[:, 2:].tolist()
    assert [row.index(end) + 1 if end in row else tokens for row in ended] == lengths


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
    assert answer.verdict is NOT_CHECKED and "scores shifted by one planted it looks the same" in answer.why


@pytest.mark.skipif(before("0.15") or not has("generation_kwargs"), reason="another release")
def test_scores_at_another_temperature_than_the_sampling_s_are_f15(model, tokenizer, tmp_path):
    """What generation_kwargs say reaches the sampling alone, in every release."""
    answers = judge(trainer(model, tokenizer, tmp_path, temperature=1.0, generation_kwargs={"temperature": 0.7}))
    assert answers["F15"].verdict is FOUND and answers["F15"].undo.values == {"temperature": 0.7}
    assert "F21" not in answers


OF_GENERATION = "divided by the tokens of the generation"


@pytest.mark.parametrize(
    ("named", "changed", "told"),
    [
        (OF_GENERATION, False, ("F20", RELEASE)),
        (OF_GENERATION, True, ("F20", SCRIPT)),
        ("no attention mask", False, ("F21", RELEASE)),
        ("temperature", False, ("F15", RELEASE)),
        ("opposite sign", False, ("F21", "")),
        ("opposite sign", True, ("F21", SCRIPT)),
    ],
)
def test_what_a_release_does_is_told_by_the_registry_s_versions(named, changed, told, monkeypatch):
    """F20 is trl's from 0.22 to 1.9, F15 up to 0.15, the missing mask 0.14's; elsewhere nobody knows whose it is.

    Micro-batches are added by transformers 4.46 and 4.47.
    """
    for version, failure in (("4.47.1", "F20"), ("4.48.0", "F21")):
        monkeypatch.setattr(importlib.metadata, "version", {"trl": "0.14.0", "transformers": version}.get)
        assert textbook_judge._failure(textbook_judge._ACCUMULATION, False, scaled=True) == (failure, RELEASE)
    affected = {"F20": "1.5.0", "F15": "0.15.2", "F21": "0.14.0"}[told[0]]
    elsewhere = ("F15" if told[0] == "F15" else "F21", SCRIPT * changed)
    for release, expected in ((affected, told), ("1.16.0", elsewhere)):
        monkeypatch.setattr(importlib.metadata, "version", {"trl": release, "transformers": "4.56.2"}.get)
        assert textbook_judge._failure(named, changed, scaled=not changed) == expected


def test_a_trainer_that_is_not_in_the_textbook_is_not_checked(model, tokenizer):
    assert "no textbook here for LateScores" in judge(late_scores(model, tokenizer))["F21"].why


class State(transformers.TrainerCallback):
    def __init__(self, trainer, states):
        self.trainer, self.states = trainer, states

    def on_pre_optimizer_step(self, args, state, control, **_):
        parameters = list(self.trainer.model.parameters())
        grads = [None if p.grad is None else p.grad.clone() for p in parameters]
        self.states.append((torch.get_rng_state(), [p.requires_grad for p in parameters], grads))


def test_the_step_is_afterwards_what_it_was(model, tokenizer, tmp_path):
    """Random state, gradients and requires_grad, also where an explanation is searched for."""
    made, states = trainer(model, tokenizer, tmp_path, kind=NEGATIVE), []
    first, step = State(made, states), StepJudge(Training(made, {}))
    made.add_callback(first)
    with step.listening():
        made.add_callback(State(made, states))
        made.train()
    (draws, required, grads), (draws_after, required_after, grads_after) = states
    assert step.reports[0].verdict == "FOUND" and torch.equal(draws, draws_after) and required == required_after
    assert all(one is other or torch.equal(one, other) for one, other in zip(grads, grads_after))


ONE = {"num_generations": 8, "gradient_accumulation_steps": 1, "num_iterations": 1, "steps_per_generation": None}


@pytest.mark.parametrize(
    ("batch", "asked", "launch", "prompts", "cut"),
    [  # the batch of a device, what else is asked for, processes, and the batch and the accumulation when cut
        (8, {}, 1, 1, (4, 1)),
        (32, {}, 1, 2, (8, 1)),
        (1, {"gradient_accumulation_steps": 8}, 1, 2, (2, 2)),
        (8, {"num_iterations": 5, "steps_per_generation": 4}, 1, 2, (4, 1)),
        # Two processes have half a group each where those of the launch have a part; a whole group stays on one.
        (2, {}, 4, 2, (2, 1)),
        (8, {}, 4, 2, (4, 1)),
        (1, {"num_generations": 16}, 8, 2, (2, 1)),
    ],
)
def test_a_batch_is_cut_to_the_script_s_own_kind(batch, asked, launch, prompts, cut, monkeypatch):
    """One prompt a generation stays one, for a batch without padding has no failures of padding."""
    monkeypatch.setattr(cuts, "counts_prompts", lambda: False)
    ranks = cuts.Processes(launch, min(launch, 2))
    made = cuts._cut_batch(ONE | {"generation_batch_size": None, "per_device_train_batch_size": batch} | asked, ranks)
    assert (made["per_device_train_batch_size"], made["gradient_accumulation_steps"]) == cut
    together = cut[0] * cut[1] * ranks.real
    assert together % made["num_generations"] == 0 and together // made["num_generations"] <= prompts
    if "num_iterations" in asked:
        assert (made["num_iterations"], made["steps_per_generation"]) == (2, 2)


# Rollouts and loops of the script's own.
WITH_ROLLOUTS = pytest.mark.skipif(
    "rollout_func" not in trl.GRPOTrainer.__init__.__code__.co_varnames, reason="no rollouts of one's own"
)


def drawn_by_generate(prompts, trainer, cut=True):
    """Draw completions as `model.generate` gives them: rows of one length, unless they are cut."""
    tokenizer = trainer.processing_class
    asked = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    drawn = trainer.model.generate(**asked, max_new_tokens=6, do_sample=True, return_dict_in_generate=True)
    rows = [row.tolist() for row in drawn.sequences[:, asked["input_ids"].shape[1] :]]
    end = tokenizer.eos_token_id
    rows = [row[: row.index(end) + 1] if cut and end in row else row for row in rows]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}


def padded(prompts, trainer):
    return drawn_by_generate(prompts, trainer, cut=False)


def encoded_again(prompts, trainer):
    """Return the texts, which have no end, encoded."""
    made, tokenizer = drawn_by_generate(prompts, trainer), trainer.processing_class
    texts = tokenizer.batch_decode(made["completion_ids"], skip_special_tokens=True)
    return made | {"completion_ids": [tokenizer(text or " ", add_special_tokens=False).input_ids for text in texts]}


def hinted(prompts, trainer):
    """Draw behind another prompt than the one that is returned."""
    own = [trainer.processing_class(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    return drawn_by_generate([f"1+{prompt}" for prompt in prompts], trainer) | {"prompt_ids": own}


class Engine:
    """An object that draws with a copy of the policy as it was at first, or that gets its weights."""

    def __init__(self, model, synchronizes=False):
        self.model, self.synchronizes = copy.deepcopy(model), synchronizes

    def __call__(self, prompts, trainer):
        """Draw completions."""
        if self.synchronizes:
            self.model.load_state_dict(trainer.model.state_dict())
        return drawn_by_generate(
            prompts, types.SimpleNamespace(model=self.model, processing_class=trainer.processing_class)
        )


MOVED, MASKS = {"max_steps": 2, "learning_rate": 1e-2}, {"mask_truncated_completions": True}


@WITH_ROLLOUTS
@pytest.mark.parametrize(
    ("rollout", "options", "expected"),
    [
        (drawn_by_generate, {}, {"F13": HELD, "F13:end": HELD, "F18": HELD, "F21": HELD}),
        (padded, {}, {"F13": FOUND, "F21": NOT_CHECKED}),  # of one length: another divisor would not show
        (encoded_again, MASKS, {"F13:end": FOUND}),  # each completion was masked as a cut one
        (encoded_again, {}, {"F13:end": Verdict.SUSPECTED}),
        (hinted, {}, {"F18": FOUND}),  # the ids were those that were drawn, so nothing was said
        (Engine, MOVED, {"F16": Verdict.SUSPECTED}),  # it never gets the weights, and nothing was said
        (functools.partial(Engine, synchronizes=True), MOVED, {"F16": HELD}),
        (Engine, MOVED | {"learning_rate": 0.0}, {"F16": NOT_CHECKED}),
    ],
)
def test_a_rollout_function_is_read_by_the_ledger(rollout, options, expected, model, tokenizer, tmp_path):
    rollout = rollout(model) if "F16" in expected else rollout
    made = trainer(model, tokenizer, tmp_path, more=[("rollout_func", rollout)], rewards=[ranked], **options)
    answers = {f"{each.failure}:{each.fault}".removesuffix(":"): each for each in all_of(made, own=True)}
    answers |= {"F18": answers.get("F18:context")}
    assert {name: answers[name].verdict for name in expected} == expected, answers
    if rollout is hinted:
        apart, count = answers["F18"].figures
        assert apart.value > 0.1 and 4 <= count.value <= count.scale
    if options is MASKS:
        assert "none of its tokens is trained on" in answers["F13:end"].evidence


class OwnMask(trl.GRPOTrainer):
    """A trainer whose mask of the completions is the script's own; `whole` is what it does with the padding."""

    whole = False

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        mask = batch["completion_mask"]
        return batch | {"completion_mask": torch.ones_like(mask) if self.whole else mask.clone()}


@pytest.mark.skipif(before("0.16"), reason="rows are generated elsewhere")
@pytest.mark.parametrize(("whole", "verdict"), [(True, FOUND), (False, HELD)])
def test_a_mask_of_the_script_s_own_that_has_the_padding_in_it(whole, verdict, model, tokenizer, tmp_path):
    """F13 was held by the tokenizer's end alone."""
    made = trainer(model, tokenizer, tmp_path, kind=type("Kind", (OwnMask,), {"whole": whole}))
    verdicts = [each.verdict for each in all_of(made, own=True) if each.failure == "F13"]
    assert verdicts[0] is verdict and set(verdicts) <= {verdict, NOT_CHECKED}


class OtherColumns(trl.GRPOTrainer):
    """A trainer that pays each completion by another row's answer."""

    def _calculate_rewards(self, inputs, *rest):
        answers = [row["answer"] for row in inputs[4:] + inputs[:4]]
        return super()._calculate_rewards([row | {"answer": own} for row, own in zip(inputs, answers)], *rest)


@pytest.mark.skipif(not hasattr(trl.GRPOTrainer, "_calculate_rewards"), reason="rewards are computed elsewhere")
def test_columns_of_another_row_are_found_where_the_script_draws_nothing(model, tokenizer, tmp_path):
    answers = all_of(trainer(model, tokenizer, tmp_path, kind=OtherColumns))
    (of_pairs,) = [answer for answer in answers if answer.failure == "F14"]
    assert of_pairs.verdict is FOUND and of_pairs.origin == SCRIPT
    assert 2 * of_pairs.figures[0].value > of_pairs.figures[0].scale
