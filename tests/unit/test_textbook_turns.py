"""The textbook and completions of several turns: which tokens are the policy's, and that no other one is trained on."""

import copy
import types

import pytest
import torch
from steps import SUMS, before, compare, compare_steps, planted, trainer

from failurelab.textbook import turns
from failurelab.textbook.rows import Row

pytestmark = pytest.mark.skipif(before("1.10"), reason="this release has no environment's mask")
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


AGAIN = {"num_iterations": 2, "learning_rate": 5e-3, "max_steps": 2}


@pytest.mark.parametrize(
    "options",
    [{}, {"tools": [("environment_factory", Doubling)]}, {"max_completion_length": 45}, AGAIN | {"loss_type": "grpo"}],
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


@pytest.mark.parametrize(
    ("inputs", "named"),
    [(without, "the environment's tokens are trained on"), (changed(lambda mask: mask.roll(1, 1)), None)],
)
def test_a_mask_that_the_trainer_does_not_use_as_it_is(inputs, named, make):
    report = compare(make(kind=planted(inputs=inputs)))
    assert (report.verdict, report.named, report.line) == ("FOUND", named, ""), report.reason


def rollout(change=lambda answer: answer, end=None, again=lambda ids: ids):
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
    ("change", "said"),
    [
        (masked(lambda mask: [1, *mask[:-1]]), "shifted by one to the right"),
        (masked(lambda mask: [*mask[1:], 1]), "shifted by one to the left"),
        (cut, "shorter than its completion"),
        (masked(lambda mask: [1] * len(mask)), "marks no token as given"),
        (masked(lambda mask: [1 - own for own in mask]), "the opposite of what was drawn"),
        (lambda answer: answer | {"env_mask": None}, "marks no token as given"),
    ],
)
def test_a_mask_of_a_rollout_function_is_looked_at_beside_what_it_drew(change, said, model, tokenizer, tmp_path):
    made = trainer(model, tokenizer, tmp_path, rewards=[short], more=[("rollout_func", rollout(change))])
    report = compare(made)
    assert report.verdict == "FOUND" and report.named == turns.MASK and said in report.reason, report.reason


def test_a_mask_whose_draws_were_not_seen_is_believed_and_said(model, tokenizer, tmp_path):
    own = copy.deepcopy(model)

    def turn(asked, *_):
        drawn = [own.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=True)[0] for ids in asked]
        return [row[len(ids) :].tolist() for row, ids in zip(drawn, asked)], None

    def elsewhere(prompts, trainer):
        other = {"processing_class": tokenizer, "num_generations": 4, "_generate_single_turn": turn}
        return rollout()(prompts, types.SimpleNamespace(**other))

    report = compare(trainer(model, tokenizer, tmp_path, rewards=[short], more=[("rollout_func", elsewhere)]))
    assert report.verdict == "HELD" and any("believed" in line for line in report.not_shown)


def test_a_template_that_renders_the_next_turn_anew(model, tokenizer, tmp_path):
    """Here it leaves the first token of the answer out, as one that takes the thoughts off does."""
    again = rollout(again=lambda ids: ids[1:] or ids)
    report = compare(trainer(model, tokenizer, tmp_path, rewards=[short], more=[("rollout_func", again)]))
    assert report.verdict == "FOUND" and report.named == turns.RENDERED and "were drawn" in report.reason


def test_a_turn_that_is_encoded_again_has_other_ids():
    words = {1: "a", 2: "b", 3: "ab", 4: "c"}
    drawn = [Row((9,), (1, 2, 4), True)]
    told = turns.encoded_again(
        Row((9,), (3, 4), True), drawn, lambda ids: "".join(words.get(each, "?") for each in ids)
    )
    assert "from token 0 on [1, 2, 4] were drawn, and [3, 4] stand there" in told


def test_a_later_turn_goes_on_the_row_that_it_begins_with():
    """The longest of several; an end that the loop takes off is not trained on; all else is a row of its own."""
    first = turns.join([], [Row((5,), (6, 2), True), Row((5,), (6, 7), False), Row((5, 6, 7), (8,), False)])
    later = [Row((5, 6, 7, 8, 1), (3,), False), Row((5, 6, 1), (4, 2), True), Row((9, 9), (1,), False)]
    rows = turns.join(first, later)
    assert [(row.prompt, row.completion, sorted(row.given)) for row in rows] == [
        ((5,), (6, 1, 4, 2), [1]),
        ((5,), (6, 7), []),
        ((5, 6, 7), (8, 1, 3), [1]),
        ((9, 9), (1,), []),
    ]
