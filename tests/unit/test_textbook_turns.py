"""The textbook and completions of several turns: which tokens are the policy's, and that no other one is trained on."""

import copy
import functools
import types

import pytest
import torch
from steps import SUMS, before, compare, compare_steps, planted, trainer

from failurelab.textbook import turns
from failurelab.textbook.rows import Row

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(before("1.10"), reason="this release has no environment's mask"),
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}{{ call['function'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def double(text: str) -> str:
    """Say a text twice.

    Args:
        text: to be said.
    """
    return f"{text}{text}="


class Doubling:
    def reset(self, **_):
        return None

    def double(self, text: str) -> str:
        """Say a text twice.

        Args:
            text: to be said.
        """
        return double(text)


def short(completions, completion_ids, **_):
    return [ids.count(ids[0]) - 0.1 * len(ids) for ids in completion_ids]


@pytest.fixture
def talker(tokenizer):
    """A tokenizer whose every answer of an even length calls a tool."""
    own = copy.deepcopy(tokenizer)
    own.chat_template, own.response_template = TEMPLATE, {}

    def parse(ids, **_):
        text = own.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "double", "arguments": {"text": text}}}
        return {"role": "assistant", "content": text} | ({"tool_calls": [call]} if len(ids) % 2 == 0 else {})

    own.parse_response = parse
    return own


@pytest.fixture
def make(model, talker, tmp_path):
    def made(tools=(("tools", [double]),), **options):
        asked = [[{"role": "user", "content": prompt}] for prompt in list(SUMS)[:40]]
        options = {"rewards": [short], "max_completion_length": 60} | options
        return trainer(model, talker, tmp_path, data={"prompt": asked}, more=tools, **options)

    return made


GRPO = {"loss_type": "grpo", "top_entropy_quantile": 0.5, "entropy_coef": 1.0}
AGAIN = {"num_iterations": 2, "learning_rate": 5e-3, "max_steps": 2}


@pytest.mark.parametrize(
    "options",
    [{}, {"tools": [("environment_factory", Doubling)]}, {"max_completion_length": 45}, AGAIN | GRPO],
)
def test_what_tools_and_environments_answer_is_not_trained_on(options, make):
    """Also where a later turn is cut, and where the generation is used again."""
    made = make(**options)
    for report in compare_steps(made, (1, 2)):
        assert report.verdict == "HELD" and report.apart.cosine >= 0.9999
        assert report.apart.size == pytest.approx(1, abs=1e-3)


def without(inputs):
    inputs.pop("tool_mask")
    return inputs


def changed(change):
    return lambda inputs: inputs | {"tool_mask": change(inputs["tool_mask"])}


@pytest.mark.parametrize("inputs", [without, changed(lambda mask: mask.roll(1, 1))], ids=["left out", "moved"])
def test_a_mask_that_the_trainer_does_not_use_as_it_is(inputs, make):
    report = compare(make(kind=planted(inputs=inputs)))
    assert (report.verdict, report.named, report.line) == ("FOUND", None, ""), report.reason


def rollout(change=lambda answer: answer, again=lambda ids: ids):
    """Return a rollout function of two turns; its answer is changed, and the first turn encoded again, by functions."""

    def two_turns(prompts, trainer):
        tokenizer = trainer.processing_class
        asked = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        reply = tokenizer(" sure? 1+1=", add_special_tokens=False)["input_ids"]
        first, _ = trainer._generate_single_turn(asked, None, {}, trainer.num_generations)
        prompts = [prompt + again(ids) + reply for prompt, ids in zip(asked, first)]
        second, _ = trainer._generate_single_turn(prompts, None, {}, 1)
        pairs = [(again(one), two) for one, two in zip(first, second)]
        return change(
            {
                "prompt_ids": asked,
                "completion_ids": [one + reply + two for one, two in pairs],
                "logprobs": None,
                "env_mask": [[1] * len(one) + [0] * len(reply) + [1] * len(two) for one, two in pairs],
            }
        )

    return two_turns


def masked(change):
    return lambda answer: answer | {"env_mask": [change(mask) for mask in answer["env_mask"]]}


def cut(answer):
    """Cut all masks but those of the longest completions, which trl would fail at."""
    longest = max(map(len, answer["env_mask"]))
    return masked(lambda mask: mask[: len(mask) - (len(mask) < longest)])(answer)


@pytest.mark.parametrize(
    "change",
    [
        masked(lambda mask: [1, *mask[:-1]]),
        cut,
        masked(lambda mask: [1] * len(mask)),
        masked(lambda mask: [0, *mask[1:]]),
        lambda answer: answer | {"env_mask": None},
    ],
    ids=["later", "short", "ones", "a draw masked", "none"],
)
def test_a_mask_of_a_rollout_function_is_looked_at_beside_what_it_drew(change, model, tokenizer, tmp_path):
    made = trainer(model, tokenizer, tmp_path, rewards=[short], more=[("rollout_func", rollout(change))])
    report = compare(made)
    assert report.verdict == "FOUND" and report.named == turns.MASK, report.reason


def begun_earlier(mask):
    """Return an answer whose prompts end earlier: what stood behind is in the completion, with this in its mask."""

    def change(answer):
        cuts = [(ids[:2], ids[2:]) for ids in answer["prompt_ids"]]
        completions = [late + ids for (_, late), ids in zip(cuts, answer["completion_ids"])]
        masks = [[mask] * len(late) + own for (_, late), own in zip(cuts, answer["env_mask"])]
        return answer | {"prompt_ids": [own for own, _ in cuts], "completion_ids": completions, "env_mask": masks}

    return change


@pytest.mark.parametrize(
    ("own", "verdict", "named"),
    [
        (rollout(begun_earlier(1)), "FOUND", turns.MASK),
        (rollout(begun_earlier(0)), "HELD", None),
        # A template that leaves the first token of the answer out, as one that takes the thoughts off does.
        (rollout(again=lambda ids: ids[1:] or ids), "FOUND", turns.MASK),
    ],
    ids=["prompt trained on", "prompt masked", "rendered anew"],
)
def test_a_rollout_function_that_changes_what_was_drawn(own, verdict, named, model, tokenizer, tmp_path):
    """Earlier turns of a dialogue were trained on, and the mask was believed: its draws were not recognized."""
    made = trainer(model, tokenizer, tmp_path, rewards=[short], more=[("rollout_func", own)])
    report = compare(made)
    assert (report.verdict, report.named) == (verdict, named), report.reason


def with_mask(answer):
    return answer | {"env_mask": [[1] * len(ids) for ids in answer["completion_ids"]]}


def by_calls(prompts, trainer, again=False):
    """Draw four tokens behind each prompt by calls of the model; `again`: then a second turn by `generate`."""
    tokenizer = trainer.processing_class
    asked = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    drawn = [[] for _ in asked]
    for prompt, own in zip(asked, drawn):
        for _ in range(4):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt + own]), use_cache=False).logits[0, -1]
            own.append(int(torch.multinomial(logits.softmax(-1), 1)))
    if again:
        more, _ = trainer._generate_single_turn([*map(list.__add__, asked, drawn)], None, {}, 1)
        drawn = [*map(list.__add__, drawn, more)]
    return {"prompt_ids": asked, "completion_ids": drawn, "logprobs": None}


def elsewhere(change):
    """Return a rollout function whose tokens a copy of the model draws."""

    def drawn(prompts, trainer):
        own = types.SimpleNamespace(model=copy.deepcopy(trainer.model), processing_class=trainer.processing_class)
        return change(by_calls(prompts, own))

    return drawn


@pytest.mark.parametrize(
    "drawn",
    [by_calls, functools.partial(by_calls, again=True), elsewhere(lambda answer: answer), elsewhere(with_mask)],
    ids=["by calls", "by calls, then by generate", "elsewhere, without a mask", "elsewhere"],
)
def test_draws_that_are_not_seen_are_not_held(drawn, model, tokenizer, tmp_path):
    """Without a mask that could be believed, the step was HELD, and nothing said that its tokens were not looked at."""
    report = compare(trainer(model, tokenizer, tmp_path, rewards=[short], more=[("rollout_func", drawn)]))
    assert report.verdict == "NOT CHECKED" and "was not seen" in report.reason, report.reason


@pytest.mark.parametrize(
    ("mask", "foreign", "masked"), [((1, 1, 0, 1, 1), 0, 0), ((1, 1, 1, 1, 1), 1, 0), ((1, 0, 0, 1, 1), 0, 1)]
)
def test_of_two_turns_what_stands_between_was_given(mask, foreign, masked):
    """The end of the first turn is taken off; of several draws behind one prompt any may have the token."""
    drawn = [Row((5,), (6, 7, 2), True), Row((5,), (9, 9), False), Row((5, 6, 7, 8), (3, 2), True)]
    judged = turns.judge(Row((5,), (6, 7, 8, 3, 2), True), mask, drawn, {2})
    assert judged.row.given == {2} and judged.seen
    assert (judged.foreign, judged.moved, judged.masked) == (foreign, 0, masked)


def test_a_later_turn_that_was_drawn_behind_other_ids_is_the_policy_s_and_told():
    drawn = [Row((5,), (6, 7, 2), True), Row((5, 6, 1, 8), (3, 4, 2), True)]
    judged = turns.judge(Row((5,), (6, 7, 8, 3, 4, 2), True), (1, 1, 0, 1, 1, 1), drawn, {2}, drawn[1:])
    assert (judged.foreign, judged.moved, sorted(judged.row.given)) == (0, 3, [2])


@pytest.mark.parametrize(("closing", "foreign"), [({0, 2}, 0), ({2}, 2)])
def test_padding_behind_an_end_is_nobody_s(closing, foreign):
    drawn = [Row((5,), (6, 7, 2), True)]
    assert turns.judge(Row((5,), (6, 7, 2, 0, 0), False), (1, 1, 1, 1, 1), drawn, closing).foreign == foreign


def test_a_row_behind_a_prompt_that_nobody_drew_behind_is_not_known():
    drawn = [Row((5,), (6, 7, 2), True)]
    assert not turns.judge(Row((4,), (6, 7), False), (1, 0), drawn, {2}).seen
    again = turns.judge(Row((5,), (6, 8), False), (1, 1), drawn, {2})  # a text encoded again
    assert again.foreign == 1 and not again.row.given
