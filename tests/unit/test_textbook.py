"""The textbook's gradient, and a trainer's step beside it: healthy ones hold, planted mistakes are found and named."""

import copy
import dataclasses
import itertools
import math
import types

import pytest
import torch
import transformers
import trl
from PIL import Image
from small import added, alternate, cut_from_the_front, llava, lora, lora_config, qwen2, stir
from steps import (
    OnlineDPOConfig,
    before,
    compare,
    compare_steps,
    has,
    one_after_another,
    passes_of,
    planted,
    right,
    rows_of,
    trainer,
)

from failurelab import textbook
from failurelab._row_inputs import split_inputs
from failurelab.textbook import (
    apart,
    backward,
    comparison,
    fields,
    gradient,
    ranks,
    recorder,
    scores,
    suspects,
    weights,
)
from failurelab.textbook.apart import norm
from failurelab.textbook.comparison import advantages_of_rounding


def six_rows():
    """Return rows of two micro-batches, of all lengths."""
    generator = torch.Generator().manual_seed(2)
    completions = [torch.randint(2, 30, (length,), generator=generator).tolist() for length in (3, 5, 2, 4, 3, 6)]
    rewards = [(1.0,), (0.1,), (0.5,), (2.0,), (0.7,), (-1.0,)]
    rows = rows_of([[5, 6, 7]] * 3 + [[8, 9]] * 3, completions, rewards, [0] * 3 + [1] * 3, ends=[1])
    return [dataclasses.replace(row, micro=place % 2, padded=(3, 8)) for place, row in enumerate(rows)]


def by_hand(model, rows, weight):
    """Return the gradient of -A log pi, one row after another, with the weight of a token as a function of its row."""
    rewards = torch.tensor([row.rewards[0] for row in rows])
    for row, reward in zip(rows, rewards):
        group = rewards[[other.group == row.group for other in rows]]
        advantage = (reward - group.mean()) / (group.std() + 1e-4)
        ids = torch.tensor([[*row.prompt, *row.completion]])
        logps = model(ids).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
        logps = logps[torch.arange(len(row.completion)), torch.tensor(row.completion)]
        (-advantage * logps.sum() * weight(row)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_gradient_is_that_of_the_formula(loss_type, monkeypatch):
    """The definition written out for one row after another gives the same numbers, for any number of rows at once."""
    model, rows = qwen2(), six_rows()
    weights = {
        "grpo": lambda row: 1 / 6 / len(row.completion),
        "dapo": lambda row: 1 / 23,
        "dr_grpo": lambda row: 1 / 60,
    }
    options = textbook.Options(loss_type=loss_type, max_completion_length=10, epsilon=0.2)
    for size in (6, 2):
        monkeypatch.setattr(gradient.Step, "rows_that_fit", lambda step, model, size=size: size)
        ours = textbook.expected_gradient(model, rows, options)
        theirs = by_hand(copy.deepcopy(model), rows, weights[loss_type])
        for name, expected in theirs.items():
            torch.testing.assert_close(ours[name], expected, rtol=1e-3, atol=1e-6)


def test_rows_that_a_forward_of_the_script_s_own_keeps_are_not_believed():
    """Such a model scores the completion at the prompt, in the trainer and in the textbook alike."""
    rows = six_rows()
    options = textbook.Options(loss_type="grpo", max_completion_length=10, epsilon=0.2)
    right, cut = (textbook.expected_gradient(model, rows, options) for model in (qwen2(), cut_from_the_front(qwen2())))
    for name, expected in right.items():
        torch.testing.assert_close(cut[name], expected)


def test_rows_of_another_process_have_no_gradient_here():
    """They count where the loss is divided: the parts of two processes add up to the gradient of all rows."""
    model, rows, options = qwen2(), six_rows(), textbook.Options(loss_type="dapo")
    whole, first, second = (
        textbook.expected_gradient(
            model, [dataclasses.replace(row, here=place in here) for place, row in enumerate(rows)], options
        )
        for here in (range(6), range(2), range(2, 6))
    )
    for name, expected in whole.items():
        torch.testing.assert_close(first[name] + second[name], expected)


def test_the_model_is_afterwards_what_it_was():
    model = qwen2(attention_dropout=0.1).train()
    model.lm_head.eval()
    model.forward = lambda *args, **kwargs: pytest.fail("a patched forward was used")
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    textbook.expected_gradient(model, six_rows(), textbook.Options(), precision=gradient.Precision(dropout=1))
    assert torch.equal(state, torch.get_rng_state()) and modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters()) and "forward" in vars(model)


def test_out_of_memory_takes_fewer_rows_and_then_says_so(make, monkeypatch):
    """A pass of two rows does not fit, one of a single row does; then not even that."""
    model, rows, limit = qwen2(), six_rows(), [1]
    whole = textbook.expected_gradient(model, rows, textbook.Options())
    score = gradient.score

    def small_machine(forward, part, *rest, **options):
        if len(part) > limit[0]:
            raise torch.OutOfMemoryError("no memory")
        return score(forward, part, *rest, **options)

    monkeypatch.setattr(gradient, "score", small_machine)
    tally = gradient.Tally()
    fewer = textbook.expected_gradient(model, rows, textbook.Options(), tally=tally)
    assert all(torch.allclose(whole[name], fewer[name], atol=1e-6) for name in whole)
    assert tally.tokens == sum(row.length() for row in rows) and len(tally.log_ratios) == len(rows)
    limit[0] = 0
    with pytest.raises(textbook.OutOfMemory):
        textbook.expected_gradient(model, rows, textbook.Options())
    report = compare(make())
    assert report.verdict == "NOT CHECKED" and "out of memory: not even one row fits" in report.reason


@pytest.mark.parametrize(
    ("rewards", "options", "worth"),
    [
        # None and NaN do not count: neither for the function's row, nor for the group's mean.
        (
            [(1.0, None), (3.0, 1.0), (None, None), (math.nan, 2.0)],
            {"scale_rewards": "none", "reward_weights": (1.0, 2.0)},
            [1 - 10 / 3, 5 - 10 / 3, 0, 4 - 10 / 3],
        ),
        # Normalized, an infinite one makes its group NaN, which trl adds up as 0: in the batch's mean it counts.
        (
            [(1.0,), (3.0,), (math.inf,), (1.0,)],
            {"multi_objective_aggregation": "normalize_then_sum"},
            [-(1.5**0.5), 1.5**0.5, 0, 0],
        ),
    ],
)
def test_which_rewards_count_for_an_advantage(rewards, options, worth):
    groups = [0, 0, 1, 1] if math.inf in rewards[2] else [0] * 4
    rows = rows_of([(1,)] * 4, [(2,)] * 4, rewards, groups, ends=[2])
    assert gradient.advantages(rows, textbook.Options(**options)).tolist() == pytest.approx(worth, rel=1e-3)


def test_every_option_of_this_release_is_listed():
    for config in (trl.GRPOConfig, trl.RLOOConfig, OnlineDPOConfig):
        assert textbook.unlisted(config) == set()
    newer = dataclasses.make_dataclass("Config", [("brand_new", float, 0.0)], bases=(trl.GRPOConfig,))
    assert textbook.unlisted(newer) == {"brand_new"}
    kinds = [fields.IMPLEMENTED, fields.NO_EFFECT, set(fields.NOT_HERE)]
    assert sum(map(len, kinds)) == len(set().union(*kinds)), "a field is listed twice"


@pytest.fixture
def make(model, tokenizer, tmp_path):
    return lambda **options: trainer(model, options.pop("tokenizer", tokenizer), tmp_path, **options)


class Draws(trl.GRPOTrainer):
    """Draws for itself before each step, as to watch what the policy says; which is none of the step's."""

    def training_step(self, model, inputs, *rest):
        given = self.processing_class("1+1=", return_tensors="pt")
        self.model.generate(**given, max_new_tokens=4, do_sample=False)
        return super().training_step(model, inputs, *rest)


def stream(train_dataset, args, **options):
    args.accelerator_config.dispatch_batches = False  # whose texts cannot be put together
    return trl.GRPOTrainer(train_dataset=train_dataset.to_iterable_dataset(), args=args, **options)


HEALTHY = {
    "a penalty": {"beta": 0.1, "learning_rate": 1e-3, "max_steps": 3},
    # Before 0.16 a release takes one step for each generation.
    "ratios that are clipped": {"num_iterations": 3, "learning_rate": 5e-3, "max_steps": 3},
    # The bonus is a mean over the tokens that the policy trains on, and not over all.
    "entropies": {"entropy_coef": 1.0, "top_entropy_quantile": 0.3},
    "draws of one's own": {"kind": Draws},
    "a stream": {"kind": stream},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_steps_hold_in_every_release(case, make):
    options = HEALTHY[case]
    takes_no_stream = case == "a stream" and not before("0.15") and before("1")
    if takes_no_stream or not all(map(has, options.keys() - {"kind"})):
        pytest.skip("this release has no such option")
    report = compare(make(**options), (options.get("max_steps", 1),))
    assert report.verdict == "HELD" and report.apart.cosine > 0.999
    terms = {"beta": "beta", "num_iterations": "clipping"}
    took_no_part = tuple(term for option, term in terms.items() if option in options)
    assert not any(line.startswith(took_no_part) for line in report.not_shown)


def test_a_healthy_step_with_adapters_holds(model, make):
    """Under checkpointing too. With B still 0, A has no gradient: which is said, and not held against it."""
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "beta": 0.1}
    options |= {"learning_rate": 1e-2, "max_steps": 2}
    made = make(config=lora_config(), **options)
    first, second = compare_steps(made, (1, 2))
    assert first.verdict == second.verdict == "HELD" and made.model.is_gradient_checkpointing
    assert any("LoRA's A" in line for line in first.not_shown) and any("beta" in line for line in first.not_shown)
    assert not any("beta" in line for line in second.not_shown)


@pytest.mark.parametrize(("adapt", "std"), [(lora, 0.0), (added, 0.1)])
def test_an_adapter_that_the_policy_came_with_holds(adapt, std, model, tokenizer, tmp_path):
    """A new one or a trained one: a release keeps a copy of it for a reference, another computes without it."""
    policy = stir(adapt(model), "lora_B", std)
    report = compare(trainer(policy, tokenizer, tmp_path, beta=0.3, learning_rate=1e-2, max_steps=2), (2,))
    assert report.verdict == "HELD" and not any(line.startswith("beta") for line in report.not_shown)


@pytest.mark.skipif(not has("steps_per_generation"), reason="each step has a generation of its own")
def test_a_step_over_two_iterations_of_a_generation_accuses_nothing(make):
    """The same rows twice in one step have ratios of 1 and one gradient twice, which nobody has defined."""
    report = compare(make(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=4))
    assert report.verdict == "NOT CHECKED" and "more than one iteration" in report.reason


@pytest.mark.parametrize(
    ("quantile", "shift", "kept"),
    [
        (0.5, 0, [False, True, True]),
        (0.6, 1e-3, [False, True, True]),
        (0.5, 0.3, [True, True, True]),
        (0.5, -0.3, [False, False, True]),
    ],
)
def test_tokens_of_high_entropy_are_chosen_by_rank(quantile, shift, kept):
    """They are not scored again beside other rows, which rounds otherwise. A shift puts those in doubt on one side."""
    (row,) = rows_of([[5]], [[7, 8, 9]], [(1.0,)], [0], ends=[])
    shift = gradient.Shift(entropy=shift)
    step = gradient.Step([row], textbook.Options(top_entropy_quantile=quantile), shift=shift)
    entropies = torch.tensor([[0.5, 0.7, 0.9]])
    step.choose_tokens(lambda part: scores.Scores(entropies, entropies, torch.ones(1, 3)))
    assert step.chosen[0].tolist() == kept and step.kept[0] == sum(kept)


def test_bounds_are_moved_to_both_sides():
    """The gradient of a clipped token is 0, so only which tokens are clipped changes with it."""
    options = textbook.Options(loss_type="grpo", max_completion_length=10, epsilon=0.2)
    model, old = qwen2(), torch.log(torch.tensor([1 / 1.19, 1 / 1.21, 1.0]))  # so that the ratios are 1.19, 1.21, 1

    def clipped(shift):
        (row,) = rows_of([[5]], [[7, 8, 9]], [(1.0,)], [0], ends=[])
        step, tally = gradient.Step([row], options, shift=gradient.Shift(shift)), gradient.Tally()
        step.advantages[:] = 1.0
        step._put = lambda part, scores, known: scores + old
        part, _ = step.part(gradient.forward_of(model, {}, gradient.EXACT)[0], range(1), None, gradient.EXACT)
        tally.count(textbook.GRPO, step.options, part)
        return tally.clipped

    assert [clipped(shift) for shift in (0.0, 0.05, -0.05)] == [1, 0, 2]


def test_tokens_behind_the_same_text_have_one_entropy():
    """The four first tokens of a group are drawn from one distribution; rows of other lengths round it otherwise."""
    rows = rows_of([[5]] * 4, [[7], [8], [9, 8], [6, 8]], [(1.0,)] * 4, [0] * 4, ends=[])
    step = gradient.Step(rows, textbook.Options(top_entropy_quantile=0.5))

    def rounded(part):
        entropies = torch.tensor([[0.9, 0.2]])[:, : len(rows[part.start].completion)] - 1e-7 * part.start
        return scores.Scores(entropies, entropies, torch.ones_like(entropies))

    step.choose_tokens(rounded)
    assert [step.chosen[number].tolist() for number in range(4)] == [[True], [True], [True, False], [True, False]]


def cut_first(inputs):
    mask = inputs["completion_mask"].clone()
    mask[:, 0] = 0
    return inputs | {"completion_mask": mask}


IN_16_BITS = {"bf16": True, "learning_rate": 1e-5, "max_completion_length": 12, "rewards": [alternate]}
IN_16_BITS |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 4}


@pytest.mark.skipif(not has("steps_per_generation"), reason="this release takes one step for each generation")
def test_what_rounding_adds_to_both_policies_is_no_ratio(make):
    """In bf16 the trainer scores with the policy that drew the tokens too: ratios are 1 where no weight has moved."""
    made = make(steps_per_generation=4, seed=4, temperature=2.0, loss_type="grpo", **IN_16_BITS)
    reports = compare_steps(made, (1, 2, 3, 4), with_suspects=False)
    assert all(report.verdict == "HELD" and report.apart.cosine > 0.999 for report in reports)


@pytest.mark.skipif(not has("num_iterations"), reason="every ratio is 1 in this release")
@pytest.mark.parametrize(
    ("change", "rate"),
    [
        (planted(inputs=lambda given: given | {"old_per_token_logps": None}), 1e-2),
        (planted(inputs=cut_first), 1e-5),
    ],
    ids=["ratio", "mask"],
)
def test_mistakes_are_found_in_16_bits(change, rate, make):
    options = IN_16_BITS | {"learning_rate": rate, "per_device_train_batch_size": 16, "max_steps": 2}
    made = make(kind=change, num_iterations=2, **options)
    report = compare(made, (2,), with_suspects=False)
    assert report.verdict == "FOUND", str(report)


@pytest.mark.parametrize(
    ("options", "since", "named"),
    [({"lengths": (4, 5, 6)}, "0.15", "no attention mask"), ({"temperature": 0.7}, "0.16", "temperature")],
)
def test_what_old_releases_leave_out_of_the_scores(options, since, named, make):
    """Padding is read as text (TRL #2708), and tokens are drawn at a temperature and scored without it (F15)."""
    report = compare(make(**options))
    assert (report.verdict, report.named) == (("FOUND", named) if before(since) else ("HELD", None))


def test_numbers_of_the_launcher_have_a_floor(monkeypatch, make):
    """`accelerate launch --mixed_precision bf16`: the arguments do not know of it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    made = make()
    assert made.accelerator.mixed_precision == "bf16" and not made.args.bf16
    report = compare(made)
    assert report.verdict == "HELD" and recorder.own_precision(made).autocast is torch.bfloat16


@pytest.mark.parametrize(
    ("floor", "wide"),
    [
        (textbook.Floor(0.016, 0.026), False),  # LoRA with lora_dropout=0.05
        (textbook.Floor(0.163, 0.1), True),  # GSPO: a gradient at cosine 0.83 lies inside, as most mistakes do
        (textbook.Floor(0.016, 0.2), True),  # a gradient of half the size lies inside
    ],
)
def test_a_band_that_known_mistakes_lie_in_holds_nothing(floor, wide, make, monkeypatch):
    """Dropout and rounding widen it, with small ratios of sequences above all; the same band still accuses."""
    monkeypatch.setattr(comparison._Comparer, "floor", lambda *_: (floor, "", None))
    assert compare(make()).verdict == ("NOT CHECKED" if wide else "HELD")
    assert compare(make(kind=planted(loss=torch.neg)), with_suspects=False).verdict == "FOUND"


def test_what_comes_near_by_chance_is_not_named():
    """Where right gradients lie far apart, a suspect still has to come near."""
    search = suspects.Search((), None, None, {}, textbook.Floor(0.04, 0.04, 0.4), None)
    assert search.near == apart.NAMES < search.floor.near


def test_a_cut_completion_that_the_padding_ends(make, tokenizer):
    """The padding's token is drawn as a word, and ends a completion at its limit: for trl 1.16 that is an end."""
    if not has("mask_truncated_completions"):
        pytest.skip("this release has no such option")
    own = copy.deepcopy(tokenizer)
    own.pad_token = "1"
    report = compare(make(tokenizer=own, mask_truncated_completions=True, max_completion_length=2))
    assert report.verdict == "HELD" and ("padding's token ends" in report.reason) is not before("1.16")


@pytest.mark.parametrize(("asked", "micro", "slices"), [({}, 4, 2), ({}, 8, 1), ({"steps_per_generation": 4}, 2, 4)])
def test_a_generation_may_be_cut_without_an_option_that_says_so(asked, micro, slices):
    """Trl 0.17 cuts it by the accumulated batches: none of its completions is left out."""
    watch = object.__new__(recorder.Recorder)
    watch.trainer = types.SimpleNamespace(args=types.SimpleNamespace(**asked))
    watch._batches, watch._micro_rows = [types.SimpleNamespace(rows=[None] * 8)], micro
    assert watch._slices == slices


@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_a_healthy_trainer_with_dropout_is_not_accused(rate, model, make):
    """The trainer's draw is often far from the first draws of the textbook; too much dropout hides any mistake."""
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = rate
    report = compare(make())
    assert report.verdict == ("NOT CHECKED" if rate == 0.5 else "HELD") and report.floor.cosine > 0
    assert rate != 0.5 or report.reason == comparison.BLINDED


def equal(completions, **_):
    return [1.0] * len(completions)


@pytest.mark.skipif(not has("top_k"), reason="this release draws from all tokens")
@pytest.mark.parametrize("bf16", [False, True])
def test_completions_that_are_the_same_cancel(bf16, monkeypatch, make):
    """Greedy completions with rewards by place: the true gradient is 0, and what is left of it is rounding.

    Where trainer and textbook are rounded alike, neither is what finite differences say, which is 0.
    """
    if not bf16:
        monkeypatch.setattr(comparison.Floor, "holds", lambda self, apart: True)
    report = compare(make(rewards=[alternate], top_k=1, bf16=bf16))
    assert report.verdict == "NOT CHECKED" and "cancel" in report.reason, str(report)


@pytest.mark.parametrize(
    ("more", "last_bit", "verdict", "said"),
    [(0.0, 2.0**-23, "NO GRADIENT", "F10"), (0.05, 0.0, "FOUND", "trainer has one")],
)
def test_a_gradient_that_equal_rewards_do_not_give_is_found(more, last_bit, verdict, said, model, make):
    """On some processors the log-probabilities of a reference that is the policy differ from it in the last bit."""
    kind = planted(loss=lambda loss: loss + more * sum(p.pow(3).sum() for p in model.parameters()))
    made = make(kind=kind, rewards=[equal], beta=0.04)
    with torch.no_grad():
        made.ref_model.lm_head.weight.mul_(1 + last_bit)
    report = compare(made)
    assert report.verdict == verdict and said in report.reason


def test_rounding_alone_is_no_gradient():
    """The mean of equal rewards is rounded, and the 1e-4 makes much of it: float32 advantages are not quite 0."""
    largest = 0.0
    for value, count in itertools.product((0.1, 7.3, 100.1), (3, 6, 7, 8)):
        rewards = torch.full((count,), value)
        worth = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).abs().max().item()
        rows = rows_of([[1]] * count, [[2]] * count, [[value]] * count, [0] * count, [2])
        assert worth <= advantages_of_rounding(rows, textbook.Options())
        largest = max(largest, worth)
    assert largest > 1e-3


def test_an_option_that_is_not_here_is_never_a_finding(make, monkeypatch):
    """As one of a release that is not known, whose gradient may be another one."""
    made = make(kind=planted(loss=torch.neg))
    kind = dataclasses.make_dataclass("Config", [("brand_new", float, 0.0)], bases=(type(made.args),))
    made.args.__class__, made.args.brand_new = kind, 5.0
    report = compare(made)
    assert report.verdict == "NOT CHECKED" and "brand_new=5.0" in report.reason
    made.aux_loss_enabled, made.router_aux_loss_coef = True, 0.5  # of a mixture of experts
    assert any("router_aux_loss_coef=0.5" in line for line in textbook.why_not_here(made))
    monkeypatch.setattr(comparison, "several", lambda: True)
    made.args.top_entropy_quantile = 0.5
    assert any("top_entropy_quantile" in line for line in textbook.why_not_here(made))


TEMPLATE = """{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>
{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"""


@pytest.fixture
def reader(tokenizer):
    """A small Llava, and its processor."""
    words = copy.deepcopy(tokenizer)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = words.convert_tokens_to_ids("<image>")
    shape = {"height": 8, "width": 8}
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=shape)
    given = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return llava(image, len(words)), transformers.LlavaProcessor(images, words, chat_template=TEMPLATE, **given)


@pytest.mark.skipif(before("1.10"), reason="this release draws tokens of images, and cannot score them then")
def test_images_are_read_by_the_textbook_too(reader, tmp_path):
    """One or two with each prompt, in a step on a generation that an earlier step has trained on."""
    dots = [Image.effect_noise((8, 8), 50 + 10 * number).convert("RGB") for number in range(8)]
    rows = {"prompt": [[{"role": "user", "content": "1" * (1 + number % 2)}] for number in range(4)]}
    rows["images"] = [dots[number : number + 1 + number % 2] for number in range(4)]
    made = trainer(*reader, tmp_path, rewards=[alternate], data=rows, **AGAIN | {"per_device_train_batch_size": 8})
    assert compare(made, (2,)).verdict == "HELD"


def test_what_belongs_to_a_row_of_images():
    """Images of Qwen's kind have numbers of dots; of Llava's kind, as many images as tokens tell; of Idefics' kind one
    entry for each row.
    """
    ids, images = torch.tensor([[0, 9, 9, 5], [9, 9, 9, 9]]), torch.arange(3.0).reshape(3, 1, 1, 1)
    grids, dots = torch.tensor([[1, 2, 4], [1, 2, 4], [1, 4, 2]]), torch.arange(24.0).reshape(24, 1)

    def split(ids=ids, image=9, **given):
        return split_inputs(given, ids, ids > 0, image)

    first, second = split(pixel_values=dots, image_grid_thw=grids, mm_token_type_ids=(ids == 9).long())
    assert torch.equal(first["pixel_values"], dots[:8]) and torch.equal(second["image_grid_thw"], grids[1:])
    assert first["mm_token_type_ids"].tolist() == [1, 1, 0]
    first, second = split(pixel_values=images)
    assert len(first["pixel_values"]) == 1 and second["pixel_values"].flatten().tolist() == [1, 2]
    first, second = split(pixel_values=torch.zeros(2, 3, 1, 1, 1))
    assert first["pixel_values"].shape == second["pixel_values"].shape == (1, 3, 1, 1, 1)
    first, second = split(torch.tensor([[1, 1], [9, 9]]), pixel_values=images[:2])
    assert first == {} and len(second["pixel_values"]) == 2
    five = torch.zeros(5, 1, 1, 1)
    assert split(pixel_values=five) is split(image=None, pixel_values=five) is None


def test_what_was_not_recorded_is_the_reason(monkeypatch, own_errors_are_told, make):
    """Not that tokens are missing, which follows from it; also where a later step trains on the same generation."""

    def broken(*_):
        raise RuntimeError("the output cannot be read")

    monkeypatch.setattr("failurelab.textbook.draws.cut_at_end", broken)
    options = FEW | ({"num_iterations": 2, "max_steps": 2} if has("num_iterations") else {})
    report = compare(made := make(**options), (made.args.max_steps,))
    assert report.verdict == "NOT CHECKED"
    assert report.reason == "record_generation: RuntimeError: the output cannot be read"


def shuffle(inputs):
    order = torch.randperm(len(inputs["advantages"]), generator=torch.Generator().manual_seed(3))
    return inputs | {"advantages": inputs["advantages"][order]}


MANY = {"per_device_train_batch_size": 4 if before("0.15") else 16}
FEW = {"per_device_train_batch_size": 2 if before("0.15") else 8}  # 16 completions: each suspect is a pass of them
# The tokens that are left at a second iteration have their ratios.
AGAIN = {"num_iterations": 2, "max_steps": 2, "learning_rate": 1e-3}


halve = None if before("1.10") else planted(loss=lambda loss: loss / 2)


def adding(term, weight=1.0):
    """Return a trainer whose loss is the library's times a weight, and a term of its own."""

    class Adding(trl.GRPOTrainer):
        def compute_loss(self, model, *rest, **options):
            return weight * super().compute_loss(model, *rest, **options) + term(model)

    return Adding


def decay(model):
    return 0.05 * sum(each.pow(2).sum() for each in model.parameters())


def test_losses_below_zero_are_the_library_s_own(make):
    """A constant that is taken away puts none below."""
    rewards = [lambda completions, **_: [-len(text) for text in completions]]
    plain, shifted = (compare(make(kind=adding(lambda _, c=c: c), rewards=rewards)).figures for c in (0.0, -100.0))
    assert shifted["losses_negative"] == plain["losses_negative"] < 2  # of two micro-batches


def blended(bonus):
    """Return a trainer that adds a bonus to the rewards, as for what several completions agree on."""

    class Blended(trl.GRPOTrainer):
        def _calculate_rewards(self, *args):
            rewards = super()._calculate_rewards(*args).clone()
            rewards[:, 0] += torch.arange(len(rewards)) % 3 * bonus
            return rewards

    return Blended


def of_trl(kind):
    """Return a subclass that derives from a class of trl's own with another objective, as GMPO is."""
    kind.__module__ = "trl.experimental.other.other_trainer"
    return type("Own", (kind,), {})


def own_reference(**given):
    made = trl.GRPOTrainer(**given)
    made.ref_model = made.model
    return made


class Halve(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        for parameter in model.parameters():
            parameter.grad *= 0.5


# A trainer's class, options, the mistake's name, and the first release that it can be planted in: before 0.15 rows are
# generated within compute_loss. trl 0.22 divides by the generation's tokens by itself (F20).
MISTAKES = [
    (planted(loss=lambda loss: loss / 1e4), {}, "constant factor", "0"),
    (planted(loss=lambda loss: 2 * loss), {}, "accumulation", "0"),
    (planted(loss=torch.neg), {"config": lora_config(lora_dropout=0.05), **MANY}, "opposite sign", "0"),
    (planted(inputs=shuffle), {}, "other rows' advantages", "0.15"),
    (planted(inputs=cut_first), AGAIN, "first token left out", "0.16"),
    (halve, {"steps_per_generation": 4}, "divided by the tokens of the generation", "0.22"),
    # The KL divergence is always 0.
    (own_reference, {"beta": 0.3, "learning_rate": 2e-2, "max_steps": 2}, "reference model", "0"),
]


@pytest.mark.parametrize(
    ("kind", "options", "named", "since"), MISTAKES, ids=[f"{case[2]}{number}" for number, case in enumerate(MISTAKES)]
)
def test_a_planted_mistake_is_named(kind, options, named, since, make):
    if before(since):
        pytest.skip("it cannot be planted in this release")
    report = compare(make(kind=kind, **FEW | options), (options.get("max_steps", 1),))
    assert (report.verdict, report.named) == ("FOUND", named), str(report)


# The same, with a word of the reason where it is not checked; blended rewards have a method of their own since 0.22.
SCRIPTS = [
    (None, {"more": {"callbacks": [Halve()]}}, "FOUND", "gradient after clipping"),
    # A term of the script's own: the library's part is listened to, and is the textbook's.
    (adding(decay), {}, "NOT CHECKED", "adds a term"),
    (adding(decay, weight=-1.0), {}, "FOUND", ...),
    (adding(lambda _: 0.0, weight=2.0), {}, "FOUND", ...),
    (blended(0.0), MANY, "HELD", None),
    (blended(0.25), MANY, "NOT CHECKED", "Blended._calculate_rewards"),
    # A user's own subclass is meant to be GRPO; this one's loss is right, and not GRPO's.
    (of_trl(planted(loss=torch.neg)), {}, "NOT CHECKED", "Planted"),
]


def test_of_two_mistakes_the_one_that_explains_the_gradient_is_named():
    """A plain trl 0.14 at a temperature of 0.7 was accused: its mask, which hardly shows, left it without a name."""
    both = suspects.Fit(suspects.NO_MASK, suspects._BOTH, suspects.Apart(1.0, 1.0, 0.0))
    alone = suspects.Fit("temperature", "left out", suspects.Apart(1.0, 1.0, 1e-4))
    assert suspects._choose([both, alone], 0.3, 1e-3).named == "temperature"


@pytest.mark.parametrize(("kind", "options", "verdict", "told"), SCRIPTS)
def test_what_scripts_do_beside_the_definition(kind, options, verdict, told, make):
    if before("0.22") and kind and kind.__name__ == "Blended":
        pytest.skip("a larger method calculates rewards")
    report = compare(make(kind=kind, **FEW | options))
    assert report.verdict == verdict and (told in (..., report.named) or told in report.reason), str(report)


def halve_in_training(model, args, output):
    """What drew the tokens is the policy: this may be a repair of the scores, or a fault in them."""
    if torch.is_grad_enabled() and "logits" in output:  # a head that is fused makes none
        output.logits = output.logits / 2


HOOKS = {
    "on a parameter": (lambda model: model.get_input_embeddings().weight.register_hook(torch.zeros_like), "FOUND"),
    # The textbook's pass goes through the same layer, so only finite differences tell.
    "detaches": (
        lambda model: model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *given: given[2].detach()),
        "FOUND",
    ),
    "leaves the gradient right": (
        lambda model: model.model.norm.register_forward_hook(lambda *given: 0.9 * given[2]),
        "HELD",
    ),
    "in training alone": (lambda model: model.register_forward_hook(halve_in_training), "NOT CHECKED"),
}
NAMES = {"on a parameter": "tensors without gradient", "detaches": "backward pass of the model"}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_a_script_has_put_on_the_model(hook, model, make):
    made = make()
    put, verdict = HOOKS[hook]
    put(model)
    report = compare(made)
    assert (report.verdict, report.named) == (verdict, NAMES.get(hook)), report
    assert verdict != "NOT CHECKED" or hook in report.reason


@pytest.mark.parametrize("config", [None, lora_config(target_modules=["embed_tokens"])], ids=["whole", "adapter"])
def test_the_row_of_the_padding_has_no_gradient_by_definition(config, model, make, tokenizer):
    """Of an embedding with `padding_idx`, whose token is read here in nearly every prompt."""
    place = tokenizer.convert_tokens_to_ids("1")
    model.model.embed_tokens.padding_idx = place
    made = make(config=config)
    stir(made.model, "lora_embedding", 0.3)
    report = compare(made)
    assert report.verdict == "HELD" and report.backward.away < 0.01


CURVES = {
    "cubic": lambda far: 3 * far**3,
    "flat": lambda far: 5e-4 * math.tanh(far / 5e-4) - far,
    "wrong": lambda far: far,
}


@pytest.mark.parametrize("curve", CURVES)
def test_a_difference_over_a_strong_curve_is_no_slope(curve, make, monkeypatch):
    """Its terms of odd order have another sign on each side, so that no error of the difference shows.

    A norm behind a projection that begins at zero, as in Gemma 3, is curved for a small input and flat from there on.
    """
    exact = backward._change

    def change(model, trained, moved, step, tally):
        far = norm({name: moved[name] - trained[name] for name in trained})
        sign = 1 if change.calls % 2 == 0 else -1
        change.calls += 1
        return exact(model, trained, moved, step, tally) + sign * CURVES[curve](far)

    change.calls = 0
    monkeypatch.setattr(backward, "_change", change)
    report = compare(make())
    assert report.verdict == ("FOUND" if curve == "wrong" else "HELD")


def test_too_little_memory_for_finite_differences_is_said(monkeypatch, make):
    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(backward, "_move", full)
    report = compare(make())
    assert report.verdict == "HELD" and any(line.startswith("backward pass") for line in report.not_shown)


def prepared(change):
    """Return a trainer class whose micro-batches are changed before the loss is asked for."""

    class Prepared(trl.GRPOTrainer):
        def _prepare_inputs(self, given):
            return change(super()._prepare_inputs(given))

    return Prepared


def first_four(inputs):
    return {key: value[:4] if getattr(value, "ndim", 0) else value for key, value in inputs.items()}


@pytest.mark.skipif(before("0.15"), reason="rows are generated within compute_loss")
@pytest.mark.parametrize(
    ("twice", "spans"), [(True, True), (False, True), (False, False)], ids=["twice", "left out", "one step of several"]
)
def test_rows_that_a_step_should_not_train_on_or_should(twice, spans, make):
    """Where all of the generation belongs to the step, it is known which: a gradient to compare."""
    slices = []
    kind = prepared((lambda inputs: slices.append(inputs) or slices[0]) if twice else first_four)
    spans = spans and has("steps_per_generation")
    options = FEW | ({"steps_per_generation": 4, "max_steps": 1 if twice else 2} if spans else {})
    made = make(kind=kind, **options)
    report = compare(made, (made.args.max_steps,))
    named = "completions trained on twice" if twice else "completions left out"
    assert report.verdict == "FOUND" and (report.named == named) == spans


def test_mistakes_that_have_one_gradient_are_not_named():
    """Where completions are of one length, `grpo` and `dapo` divide by the same number."""
    tried = [suspects.Fit("loss_type", kind, textbook.Apart(1.0, 1.0, 0.0)) for kind in ("grpo", "dapo")]
    ratio = suspects.Fit("ratio", "always 1", textbook.Apart(1.0, 1.0, 0.004))
    assert suspects._choose(tried, 1.0, 0.01).named == "loss_type"
    both = suspects._choose([*tried, ratio], 1.0, 0.01)
    assert both.named is None and "loss_type (dapo)" in both.text and "ratio (always 1)" in both.text


def explained(change):
    """Return what explains a trainer's weights of six rows that are changed by a function."""
    model, rows, options = stir(qwen2(), "layernorm", 1.0), six_rows(), textbook.Options(loss_type="grpo")
    tally, step = gradient.Tally(), gradient.Step(rows, options)
    textbook.expected_gradient(model, rows, options, tally=tally)
    right = weights.slopes_of(textbook.GRPO, step, tally, rows)
    read = weights.read_rows(passes_of(rows, change(dict(right))), step, 0)
    return weights.explain_weights(weights.settle(read, right), right, step)


def of_rows(worth):
    """Give rows other advantages, by a function of the right ones."""

    def change(right):
        own = gradient.advantages(six_rows(), textbook.Options())
        return {str(n): right[str(n)] * float(other / own[n]) for n, other in enumerate(worth(own))}

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (of_rows(lambda own: own.roll(2)), "other rows' advantages"),
        (of_rows(lambda own: own * torch.tensor([1, 0.5] * 3)), "accumulation"),
        (of_rows(lambda own: own + 0.37), None),
        (of_rows(lambda own: own[[3, 3, 2, 3, 4, 5]]), None),  # no other order
    ],
)
def test_what_tokens_were_given_is_told(change, named):
    found = explained(change)
    assert found.named == named, found
    if named != "accumulation":
        own = gradient.advantages(six_rows(), textbook.Options()).tolist()
        assert [each.expected for each in found.weights] == pytest.approx(own, abs=1e-3)
        assert "row 1" in weights.table(found.weights)
    if named == "other rows' advantages":
        assert "rows 1, 2, 3, 4, 5, 6 were given the weights of rows 5, 6, 1, 2, 3, 4" in found.text
        assert [each.given for each in found.weights] == pytest.approx([*own[4:], *own[:4]], abs=1e-3)


@pytest.mark.parametrize("change", ["other tokens", "other ids", "a row twice", "a row less"])
def test_weights_of_other_tokens_are_not_known(change):
    rows = six_rows()
    step = gradient.Step(rows, textbook.Options())
    made = passes_of(rows, {str(n): torch.ones(8) for n in range(6)})
    if change == "other tokens":
        for number, row in enumerate(made[0].rows):
            late = tuple(dataclasses.replace(each, at=each.at + 1) for each in row.tokens)
            made[0].rows[number] = dataclasses.replace(row, tokens=late)
    elif change == "other ids":
        made[0].rows[0] = dataclasses.replace(made[0].rows[0], padded=(7, 7, 7))
    elif change == "a row twice":
        made.append(made[0])
    else:
        made[0].rows.pop()
    assert weights.read_rows(made, step, 0) is None


@pytest.mark.parametrize("widths, hidden", [((2, 3), True), ((3, 3), False)], ids=["each batch alone", "one padded"])
def test_a_step_without_padding_says_so(widths, hidden):
    """Prompts of two lengths are padded only where they stand in one batch."""
    rows = [textbook.Row((5,) * length, (6,), True, padded=(width, 1)) for length, width in zip((2, 3), widths)]
    step = types.SimpleNamespace(trained=rows, rows=rows, believed=[], ranks=ranks.Ranks())
    said = comparison._Comparer._not_shown(step, {}, gradient.Tally(), textbook.Options(), None)
    assert any(line.startswith("padding of the prompts") for line in said) == hidden


@pytest.mark.parametrize(("part", "same"), [(0, True), (2, False)], ids=["before the end", "behind it"])
def test_special_tokens_that_are_kept_are_no_other_text(tokenizer, make, part, same):
    """Cut at the end they are none either, also where padding was drawn before it."""

    class Whole(type(tokenizer)):
        def batch_decode(self, ids, **_):
            texts = super().batch_decode([[self.pad_token_id, *row] for row in ids], skip_special_tokens=False)
            return [text.partition(self.eos_token)[part] for text in texts]

    whole = copy.deepcopy(tokenizer)
    whole.__class__ = Whole
    assert (compare(make(tokenizer=whole)).texts == "") == same


def test_the_trainer_gets_everything_back(model, make):
    made = make()
    owners = (made, made.model, made.accelerator)
    names, functions = [set(vars(owner)) for owner in owners], list(made.reward_funcs)
    callbacks = list(made.callback_handler.callbacks)
    with textbook.compare(made):
        assert made.reward_funcs[0] is not functions[0]
    assert made.reward_funcs == functions == [right, functions[1]]
    assert [set(vars(owner)) for owner in owners] == names and made.callback_handler.callbacks == callbacks


@pytest.mark.skipif(before("0.22"), reason="its rows are grouped elsewhere")
def test_groups_of_several_prompts_are_found(make, monkeypatch):
    """A sampler that does not repeat a prompt: rewards of different prompts are compared with each other."""
    one_after_another(monkeypatch)
    report = compare(make())
    assert (report.verdict, report.named) == ("FOUND", "groups of several prompts")


def test_the_loss_of_a_release_that_has_no_name_for_it():
    """Trl 0.16 divides by all tokens, 0.14 and 0.15 by each completion's; found by running each release."""
    of = textbook.Options.of
    assert of(types.SimpleNamespace(num_iterations=1)).loss_type == "bnpo"
    assert of(types.SimpleNamespace(beta=0.04)).loss_type == "grpo"
    assert of(types.SimpleNamespace(num_iterations=1, normalize_advantages=False)).loss_type == "grpo"
    assert of(types.SimpleNamespace(num_iterations=1, loss_type="dapo")).loss_type == "dapo"
