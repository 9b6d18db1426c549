"""Every control that the registry names is planted for real and found, and all is as before afterwards.

Of what is measured the registry makes a verdict: what is unknown, could not show, or could not be seen is never HELD.
"""

import copy
import dataclasses
import functools
import math
import re
import types

import pytest
import small
import torch
from steps import Asks

from failurelab import failures, gradients, mismatch, placement, plants, rollouts, textbook, updates, zero3
from failurelab.failures import figures, verdicts
from failurelab.handles import keep_requires_grad
from failurelab.measure import counts, differences
from failurelab.measure.alignment import check_alignment
from failurelab.measure.scores import read_scored_rows, scoring_temperature
from failurelab.textbook import balance, suspects
from failurelab.textbook.apart import Floor, measure_apart

MECHANISMS = {f"{failure.id} {each.name}": (failure, each) for failure in failures.all() for each in failure.mechanisms}
IDS = torch.tensor([[1, 5, 7, 9, 2, 8, 4, 11]])
DRAWN = IDS[0], [3, 9, 12]
OF_ROLLOUTS = ("no causal mask", "predicted from the last token alone")


def model(adapted=False):
    """Return a small model in train mode, with an adapter where one is asked for."""
    made = small.stir(small.qwen2(), "_proj", 0.3)  # else it hardly looks back
    return (small.stir(small.lora(made), "lora_", 0.3) if adapted else made).train()


def backward(made):
    """Return what a watch and its optimizer tell of one step."""
    optimizer = torch.optim.SGD([parameter for parameter in made.parameters() if parameter.requires_grad], lr=0.1)
    with gradients.watch(made) as watched:
        made(input_ids=IDS).logits.logsumexp(-1).sum().backward()
    without = len(watched.report().without_gradient)
    figures = gradients.count(made, optimizer) | {"tensors_without_gradient": without, "steps_done": 1, "error": ""}
    for parameter in made.parameters():
        parameter.grad = None
    return figures, optimizer


def scores(temperature=1.0):
    """Return logits, and the gradient of scores at a temperature by them."""
    logits = model()(input_ids=IDS).logits.detach().requires_grad_()
    chosen = (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, IDS[:, 1:, None])
    return logits.detach(), torch.autograd.grad(chosen.sum(), logits)[0]


def scored_at(made):
    logits, gradient = scores(0.7)
    healthy = mismatch.temperature_figures(scoring_temperature(logits, gradient), 0.7)
    return healthy, plants.scored_at(logits, gradient, 0.7)


def kept(made):
    rows, planted = (
        made(input_ids=IDS, **asked).logits.shape[1] for asked in ({small.logits.keep_argument(made): 3}, {})
    )
    return {"rows_made": rows, "rows_needed": 3}, {"rows_made": planted}


def probed(made):
    alignment = check_alignment(small.score, made)
    return alignment.figures, {"log_prob_error": alignment.contrast}


def drawn(made):
    """Return the figures of two prompts of different lengths, completed in eval mode."""
    tokenizer = types.SimpleNamespace(
        decode=lambda ids, **_: " ".join(map(str, ids)), eos_token_id=None, pad_token_id=0
    )
    ids = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
    report = rollouts.compare(made.eval(), tokenizer, ids, (ids > 0).long(), max_new_tokens=4)
    made.train()
    return report


class Hook:
    """A hook that ZeRO-3 seems to have made."""

    __module__ = "deepspeed.runtime.zero.parameter_offload"

    def __call__(self, *_):
        """Gather nothing."""


def bare(made):
    next(made.parameters()).ds_id = 0
    healthy = zero3.figures(made) | {"generations": 1}
    hook = made.model.register_forward_hook(Hook())
    planted = zero3.figures(made)
    hook.remove()
    return healthy, planted


def in_4bit(made):
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
    made.lm_head.weight.quant_state = types.SimpleNamespace(absmax=torch.ones(4), code=torch.ones(4))
    made.config.tie_word_embeddings = False
    return placement.check(made, "cpu").figures


def told(figure, planted, **healthy):  # what a whole run alone measures
    return healthy, {figure: planted}


def replaced(made):
    def logits():
        return made.eval()(input_ids=IDS).logits.detach()

    trained = logits()
    with keep_requires_grad(made), made.disable_adapter():
        base = logits()
    healthy, planted = (differences.of_adapter(trained, base, now) for now in (logits(), base))
    made.train()
    return healthy | {"adapter_tensors": 8}, planted


GROUPS = [[0.0, 1.0], [1.0, 1.0]]
ROWS = [[4, 5, 9], [6, 7, 8, 9]]
GRADIENTS = [{"weight": torch.tensor(row)} for row in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0])]


def engine(made):
    """Return the figures of an engine with the policy's weights, and with the first ones."""
    first = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    small.stir(made, "mlp", 0.3)

    def score():
        with torch.no_grad():
            return made(input_ids=IDS).logits[0, :-1].log_softmax(-1).gather(-1, IDS[0, 1:, None])[:, 0]

    planted = plants.first_weights(made, first, score, score())
    return {"policy_gap": 0.0, "policy_moved": planted["policy_gap"]}, planted


def weighed(made):
    policy, counted = torch.randn(64, 448), torch.ones(64, 448)
    engine = policy + 0.1 * torch.randn(64, 448)  # all log-ratios of a sequence are summed
    healthy, planted = (
        mismatch.effective_sample_size(mismatch.importance_weights(policy, other, counted, cap=None))
        for other in (policy, engine)
    )
    figures = mismatch.compare(policy, policy, counted).figures | {"effective_share": healthy}
    return figures, {"effective_share": planted, "effective_batch": planted}


def scaled(factor):
    right = {"weight": torch.tensor([1.0, 2.0])}
    figures, planted = (
        Floor().figures(measure_apart({"weight": times * right["weight"]}, right)) for times in (1, factor)
    )
    return figures | {"step_size_cut": 1.0, "loss_overridden": True, "losses_negative": 1}, planted


def of_textbook(name):
    """Return a right step, and one with a mistake in the textbook."""

    def case(made):
        asked = {"beta": 4.0, "epsilon": 0.05, "mask_truncated_completions": True}
        options = textbook.Options(loss_type="dapo", **asked)
        search = Asks(textbook.GRPO, options, made, small.stir(model(), "mlp", 0.3)).search()
        figures = Floor().figures(measure_apart(search.theirs, search.theirs))
        figures |= {"prompts_padded": True, "prompt_lengths": 3}
        figures |= dict.fromkeys(("penalty_asked", "bounds_asked", "cut_asked"), True)
        return figures, search.floor.figures(search.plant(dict(search.theirs))[name])

    return case


GROUPED = counts.of_groups("aabb", 2)
MARKED = ["<|user|>a", "<|user|>bc"]
STEPPED = torch.tensor([0.02, 0.021])  # a weight before a step and after it, which bfloat16 tells apart
# Of each control what the measurement says before and with it, on a model that is made for it.
CASES = {
    "a module cut off from the loss": lambda made: (backward(made)[0], plants.cut_off(made)),
    "a loss without a graph": lambda made: (backward(made)[0], plants.no_graph()),
    "an empty optimizer": lambda made: (backward(made)[0], plants.empty_optimizer(made)),
    "a tensor taken out of the optimizer": lambda made: (
        (measured := backward(made))[0],
        plants.taken_out(made, measured[1]),
    ),
    "logits of the whole sequence": kept,
    "rows moved by one": lambda _: (read_scored_rows(scores()[1], IDS).figures, plants.rows_moved(scores()[1], IDS)),
    "the nearest known mistake": probed,
    "scores at temperature 1": scored_at,
    "the bare model handed over": bare,
    "a device map that names GPU 0": lambda _: told(
        "placement_refused", True, placement_refused=False, models_loaded=1, models_in_4bit=1
    ),
    "tensors on another device": lambda made: (placement.check(made, "cpu").figures, plants.first_gpu(made, "cpu")),
    "scales moved to another device": lambda made: (in_4bit(made), plants.scales_moved(made, "cpu")),
    **{name: lambda made, name=name: (drawn(made).figures, rollouts.plant(made, *DRAWN)[name]) for name in OF_ROLLOUTS},
    "a new adapter": replaced,
    "the base model as the reference": lambda _: told(
        "kl_at_first_step", 1.0, kl_at_first_step=0.0, beta=0.04, adapter_effect=1.0
    ),
    "a step a thousandth as long": lambda _: (
        updates.moved(STEPPED[0], STEPPED[1], torch.float32) | {"tensors_trainable": 1},
        plants.shorter_step(STEPPED[0], STEPPED[1]),
    ),
    "equal completions": lambda _: (counts.of_draws(["ab", "aa"]), plants.equal_completions(["ab", "aa"])),
    "equal rewards": lambda _: (counts.of_rewards(GROUPS), plants.equal_rewards(GROUPS)),
    "a reward that is no number": lambda _: (counts.of_rewards(GROUPS), counts.of_rewards([[math.nan]])),
    "what it needs taken away": lambda _: told("margin", 0.0, margin=1.0, rewards_asked=2, margin_if_given=1.0),
    "a smaller limit": lambda _: (
        counts.of_completions(ROWS, {9}, {9}, 8) | {"prompt_lengths": 2, "prompts_cut": 0},
        counts.of_completions([row[:1] for row in ROWS], {9}, {9}, 1) | {"prompts_cut": 2},
    ),
    "a prompt as plain text": lambda _: (counts.of_texts(MARKED, "<|user|>"), plants.plain_text(MARKED, "<|user|>")),
    "an end of another token": lambda _: (counts.of_completions(ROWS, {9}, {9}, 8), plants.another_end(ROWS, {9}, 8)),
    "the first weights": engine,
    "the sum of all log-ratios": weighed,
    "half the loss": lambda _: scaled(0.5),
    "opposite sign": lambda _: scaled(-1),
    "the loss scaled by the way that the batch is cut": lambda _: scaled(2),
    **{name: of_textbook(name) for name in (suspects.OTHER_ROWS, suspects.NO_MASK, *suspects.LEFT_OUT)},
    "one completion more": lambda _: (GROUPED, plants.one_more("aabb", 2)),
    "one completion a prompt": lambda _: (GROUPED, plants.one_each("aabb")),
    "prompts that are not repeated": lambda _: (GROUPED, plants.not_repeated("aabb", 2)),
}


PROMPTS = ((1, 2, 3), (4, 5))


def tables(by="an engine"):
    """Return a ledger's tables of two steps, each with two completions of two prompts, and what drew them."""
    draws, trained, paid = [], [], []
    for number in range(8):
        prompt, step = PROMPTS[number % 4 // 2], number // 4
        tokens = (*range(20 + 3 * number, 22 + 3 * number + number % 2), 9)
        ids, logps = prompt + tokens, (-1.0,) * len(tokens)
        draw = balance.Draw(number, step + 1, number % 4, prompt, tokens, True, step, by, step, 1.0, logps, logps)
        draws.append(draw)
        own = tuple(balance.Token(place, ids[place], at=place - 1) for place in range(len(prompt), len(ids)))
        trained.append(balance.Trained(0, step, number % 4, ids, own, padded=ids))
        columns = {"answer": repr("xy"[number % 4 // 2])}
        more = {"columns": columns, "ids": tokens, "draw": draw}
        paid.append(balance.Paid(number % 4, step + 1, step, number % 4 // 2, (1.0,), 1.0, **more))
    rows = tuple({"prompt": say(prompt), "answer": answer} for prompt, answer in zip(PROMPTS, "xy"))
    setting = balance.Conditions(
        ends=frozenset({9}), moves={1: 0.2, 2: 0.2}, rows=rows, decode=say, weights={0: 0, 1: 1}
    )
    return balance.Tables(tuple(draws), tuple(trained), tuple(paid), setting)


@pytest.mark.parametrize(
    ("moves", "grown"), [({1: 0.5, 2: 0.06}, 0.05 / 0.06), ({1: 0.5}, None), ({1: 0.0, 2: 0.06}, None)]
)
def test_how_far_another_model_fell_behind_is_told_by_the_tokens_that_it_drew(moves, grown):
    """A sampler that got no weights was held, beside how far the policy moved on tokens of another call."""
    seen = tables()
    behind = [
        dataclasses.replace(draw, logps=tuple(logp - 0.05 for logp in draw.policy_logps)) if draw.call == 2 else draw
        for draw in seen.draws
    ]
    by_number = {draw.number: draw for draw in behind}
    paid = [dataclasses.replace(each, draw=by_number[each.draw.number]) for each in seen.paid]
    setting = dataclasses.replace(seen.setting, moves=moves)
    found = balance.measure(balance.Tables(tuple(behind), seen.trained, tuple(paid), setting))
    assert found["policy_gap"] == pytest.approx(0.05) and found["policy_gap_grown"] == (grown and pytest.approx(grown))


def say(ids):
    return " ".join(f"w{id}" for id in ids)


@functools.cache
def measured(name):
    """Return a failure with one mechanism alone, the figures of what is healthy, and what is otherwise when planted."""
    failure, mechanism = MECHANISMS[name]
    alone = dataclasses.replace(failure, mechanisms=(mechanism,))
    if mechanism.control.startswith(verdicts.NO_PLANT):  # it applies to what was found alone
        (found,) = mechanism.found
        return alone, mechanism, *({found.figure: value} for value in (("", "a fault") if found.op == "~" else (0, 1)))
    adapted = any("adapter" in predicate.figure for predicate in (*mechanism.applies, *mechanism.needs))
    adapted = adapted and not any(str(predicate) == "adapter_tensors == 0" for predicate in mechanism.applies)
    if mechanism.control in CASES:
        healthy, planted = CASES[mechanism.control](model(adapted))
    else:
        right = tables(*[balance.POLICY] * ("other_weights" in mechanism.figures))
        healthy, planted = balance.measure(right), balance.measure(balance.PLANTS[mechanism.control](right))
    return alone, mechanism, healthy, {key: value for key, value in planted.items() if healthy.get(key) != value}


def state(made):
    """Return all that a plant might leave changed."""
    return (
        [(name, parameter.detach().clone(), parameter.grad is None) for name, parameter in made.named_parameters()],
        [parameter.requires_grad for parameter in made.parameters()],
        [module.training for module in made.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in made.modules()],
        torch.get_rng_state().tolist(),
    )


def test_every_control_of_the_registry_has_a_plant_and_a_case():
    controls = {mechanism.control for _, mechanism in MECHANISMS.values()}
    planted = {control for control in controls if not control.startswith(verdicts.NO_PLANT)}
    assert set(CASES) | set(balance.PLANTS) == planted
    for figure in figures.table().values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", figure.name)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_plant_is_found_and_what_is_healthy_held_where_it_was_seen(name):
    alone, mechanism, healthy, planted = measured(name)
    found = verdicts.judge(alone, [healthy | planted])
    assert (found.verdict, found.mechanism) == (verdicts.FOUND, mechanism.name), (healthy, planted)
    assert found.says and "{" not in found.says
    held = verdicts.judge(alone, [healthy], {mechanism.control: planted}).verdict
    if mechanism.control.startswith(verdicts.NO_PLANT):
        assert held == verdicts.NOT_APPLICABLE
        return
    assert held == verdicts.HELD
    for controls in ({}, {mechanism.control: healthy}):
        blind = verdicts.judge(alone, [healthy], controls)
        assert blind.verdict == verdicts.NOT_CHECKED and mechanism.control in blind.missing


@pytest.mark.parametrize("name", MECHANISMS)
def test_what_is_unknown_or_could_not_show_is_never_held(name):
    alone, mechanism, healthy, planted = measured(name)
    controls = {mechanism.control: planted}
    for figure in mechanism.figures:
        others = [one for one in mechanism.found if figure not in one.names and not one.holds(healthy)]
        asked_first = {each for one in (*mechanism.applies, *mechanism.needs) for each in one.names}
        if others and figure not in asked_first:
            continue  # another figure says that it is not there, whatever this one is
        for unknown in (None, math.nan):
            judged = verdicts.judge(alone, [healthy | {figure: unknown}], controls)
            assert judged.verdict == verdicts.NOT_CHECKED and figure in judged.missing
    for need in mechanism.needs:
        assert need.op in (">", ">=") and not need.holds({need.figure: -1})
        judged = verdicts.judge(alone, [healthy | {need.figure: -1}], controls)
        assert judged.verdict != verdicts.HELD
        decided = mechanism.applies if judged.verdict == verdicts.NOT_APPLICABLE else mechanism.found
        assert need.figure in judged.missing or any(need.figure in one.names for one in decided)


LENGTHS = {"prompt_lengths": 2, "tokens_drawn": 8, "draw_gap": 0.001, "draw_rounding": 0.01}
GAPS = {name: {"draw_gap": 3.0} for name in OF_ROLLOUTS}
PLAIN = {"adapter_tensors": 0, "tensors_trainable": 25, "tensors_without_gradient": 0}


@pytest.mark.parametrize(
    ("failure", "places", "verdict", "mechanism", "missing"),
    [
        # It is held by all its mechanisms, each at some place, and found by one.
        ("F7", [LENGTHS | {"prompt_lengths": 1}], verdicts.NOT_CHECKED, "mask", "it needs prompt_lengths > 1"),
        ("F7", [LENGTHS | {"prompt_lengths": 1}, LENGTHS], verdicts.HELD, "", ""),
        ("F7", [LENGTHS, LENGTHS | {"draw_gap": 2.0}], verdicts.FOUND, "mask", ""),
        ("F2", [PLAIN], verdicts.NOT_APPLICABLE, "", ""),
        ("F2", [PLAIN | {"adapter_tensors": None}], verdicts.NOT_CHECKED, None, None),
        ("F2", [], verdicts.NOT_CHECKED, None, None),
        ("F10", [{"groups": 0, "flat_groups": 0}], verdicts.NOT_CHECKED, None, None),  # no groups are not flat groups
    ],
)
def test_a_failure_of_several_mechanisms_and_places(failure, places, verdict, mechanism, missing):
    judged = verdicts.judge(failures.get(failure), places, GAPS)
    assert judged.verdict == verdict
    assert mechanism is None or (judged.mechanism, judged.missing) == (mechanism, missing)


def test_what_cannot_be_planted_is_never_held():
    failure = failures.get("F9")
    lacking = dataclasses.replace(failure.mechanisms[0], control=f"{verdicts.NO_PLANT}it is too large")
    failure = dataclasses.replace(failure, mechanisms=(lacking,))
    healthy = {"tensors_trainable": 26, "elements_moved": 1.0}
    judged = verdicts.judge(failure, [healthy], {lacking.control: {"elements_moved": 0.0}})
    assert judged.verdict == verdicts.NOT_CHECKED and "too large" in judged.missing


@pytest.mark.parametrize("adapted", [False, True])
def test_what_is_planted_is_taken_back(adapted):
    made = model(adapted)
    before = state(made)
    plants.cut_off(made)
    optimizer = torch.optim.SGD([parameter for parameter in made.parameters() if parameter.requires_grad], lr=0.1)
    groups = copy.copy(optimizer.param_groups[0]["params"])
    plants.taken_out(made, optimizer)
    plants.empty_optimizer(made)
    plants.first_gpu(made, "cpu")
    rollouts.plant(made, *DRAWN)
    first = {name: torch.zeros_like(parameter) for name, parameter in made.named_parameters()}
    plants.first_weights(made, first, lambda: torch.zeros(1), torch.zeros(1))
    assert len(groups) == len(optimizer.param_groups[0]["params"])
    assert all(a is b for a, b in zip(groups, optimizer.param_groups[0]["params"]))
    for one, other in zip(before, state(made)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            same = a[0] == b[0] and torch.equal(a[1], b[1]) and a[2] == b[2] if isinstance(a, tuple) else a == b
            assert same


def test_a_model_that_does_not_look_back_is_blind():
    """Without attention no token depends on those before it: lost context and a lost mask cannot show."""
    made = model()
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    report = drawn(made)
    assert set(report.planted) == set(OF_ROLLOUTS)
    judged = verdicts.judge(failures.get("F7"), [report.figures], report.planted)
    assert judged.verdict == verdicts.NOT_CHECKED and "look the same" in judged.missing


def test_equal_tokens_show_no_shift():
    ids = torch.full_like(IDS, 3)
    logits = model()(input_ids=ids).logits.detach().requires_grad_()
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    (gradient,) = torch.autograd.grad(chosen.sum(), logits)
    figures = read_scored_rows(gradient, ids).figures
    controls = {"rows moved by one": plants.rows_moved(gradient, ids)}
    assert verdicts.judge(failures.get("F3b"), [figures], controls).verdict == verdicts.NOT_CHECKED


def test_what_an_update_is_called_is_the_registrys():
    (found,) = failures.get("F9").mechanisms[0].found
    healthy = figures.table()["elements_moved"].healthy
    assert (found.value, healthy.value) == (updates.LOST, updates.WHOLE)
    assert failures.get("F16").mechanisms[0].found[0].value == mismatch.LARGEST_MEAN
