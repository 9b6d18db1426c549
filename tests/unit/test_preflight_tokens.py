"""Prompts, templates, ends and lengths, with real tokenizers: what is told, and what is odd and left alone."""

import copy
import types

import datasets
import pytest
import small
import trl
from packaging.version import Version

from failurelab_preflight.finding import Verdict
from failurelab_preflight.judges import rows
from failurelab_preflight.judges.lengths import judge_lengths
from failurelab_preflight.judges.rows import prompt_ids
from failurelab_preflight.judges.tokens import judge_ends, judge_template
from failurelab_preflight.training import Load, Training

TEXTS = ["3+4=", "5+6=", "8+9=", "12+30="]
QUESTIONS = ["What is 3+4?", "Compute 5+6.", "Add 8 and 9.", "12+30="]
MESSAGES = [[{"role": "user", "content": text}] for text in TEXTS]
TURN, TEXT = "<|im_end|>", "<|endoftext|>"
CLOSED = [f"<|im_start|>user\n{text}{TURN}\n" for text in TEXTS]
OPENED = [f"{text}<|im_start|>assistant\n" for text in CLOSED]
FOUND, HELD, NOT_CHECKED, NOT_APPLICABLE = Verdict.FOUND, Verdict.HELD, Verdict.NOT_CHECKED, Verdict.NOT_APPLICABLE
# trl up to 1.14 knows the tokenizer's end alone, later ones those of the generation config too.
BY_RELEASE = HELD if hasattr(trl.GRPOTrainer, "_tokenize_prompts") else FOUND


def training(model, tokenizer, prompts, limits=None, **options):
    """Return what preflight sees of a GRPO script, whose trainer has not begun."""
    trainer = small.grpo(model, tokenizer, prompts, lambda completions, **_: [0.0] * len(completions))
    arguments = {"max_completion_length": 64, "max_prompt_length": None} | (limits or {})
    trainer.args = types.SimpleNamespace(**arguments)
    load = Load("base/tiny", {}, model.config, by_trainer=False)
    dataset = datasets.Dataset.from_dict({"prompt": prompts})
    return Training(trainer=trainer, arguments=arguments, dataset=dataset, loads=[load], **options)


def only(answers, failure):
    (answer,) = (answer for answer in answers if answer.failure == failure)
    return answer


def ending(tokenizer, end, template=True, pad=None):
    """Return a tokenizer with another end, padding, or template: none, or one in which nothing ends a turn."""
    other = copy.deepcopy(tokenizer)
    other.eos_token, other.pad_token = end, pad or other.pad_token
    plain = "{% for message in messages %}User: {{ message['content'] }}\n{% endfor %}"
    other.chat_template = {True: other.chat_template, False: None, "plain": plain}[template]
    return other


@pytest.mark.parametrize(
    ("prompts", "end", "template", "kind"),
    [
        (MESSAGES, TURN, True, NOT_APPLICABLE),
        (QUESTIONS, TURN, True, Verdict.SUSPECTED),  # what ends the model's texts says that it is a chat model
        (QUESTIONS, TEXT, True, NOT_CHECKED),  # as of a base model, for which plain prompts are right
        (["SUBREDDIT: r/x POST: I asked why. TL;DR:"] * 4, TURN, True, NOT_CHECKED),
        (TEXTS, TURN, False, NOT_APPLICABLE),
        (QUESTIONS, None, "plain", NOT_CHECKED),  # nothing ends a turn, and nothing a text
        (OPENED, TURN, True, HELD),
        (CLOSED, TURN, True, Verdict.SUSPECTED),  # the assistant's turn is not begun
    ],
)
def test_plain_prompts_for_a_chat_model(prompts, end, template, kind, model, tokenizer):
    own = ending(tokenizer, end, template)
    model.generation_config.eos_token_id = model.config.eos_token_id = own.eos_token_id
    assert only(judge_template(training(model, own, prompts)), "F12").verdict is kind


def test_a_sequence_begun_twice(model, tokenizer):
    """Text that holds the beginning already is begun again by a trl that adds special tokens, and by no other.

    The tokenizer begins each text with a token of its own, as Llama's and Gemma's do.
    """
    from tokenizers import processors

    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"bos_token": "<|im_start|>"})
    bos = own.bos_token_id
    special = [("<|im_start|>", bos)]
    own._tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
    answers = list(judge_template(training(model, own, OPENED)))
    adds = prompt_ids(training(model, own, TEXTS).trainer, TEXTS)[0][0] == bos
    assert any(answer.verdict is FOUND for answer in answers) is adds
    assert adds is hasattr(trl.GRPOTrainer, "_tokenize_prompts")
    trainer = types.SimpleNamespace(processing_class=own, model=model)
    for begun, kinds in (([bos, bos, 5], [FOUND]), ([bos, 5], [])):  # rows that a trainer made
        trainer.train_dataset = datasets.Dataset.from_dict({"input_ids": [begun] * 3})
        given = Training(trainer=trainer, arguments={}, dataset=datasets.Dataset.from_dict({"text": ["a"]}))
        assert [answer.verdict for answer in judge_template(given)] == kinds


@pytest.mark.parametrize(
    ("prompts", "own", "config", "given", "known", "kind"),
    [  # the tokenizer's end, the model's, those of generation_kwargs, and those that the trainer looks for
        (MESSAGES, TEXT, [TURN, TEXT], None, "by release", BY_RELEASE),  # the model ends its turn with another
        (MESSAGES, TEXT, [TEXT], None, "by release", NOT_CHECKED),  # how it ends a turn nobody knows
        (MESSAGES, TURN, [TEXT], None, None, NOT_CHECKED),  # and whether it ends one as it was set to stop
        (MESSAGES, TURN, [TEXT], None, [TEXT, TURN], HELD),
        (TEXTS, TURN, [TURN], None, "by release", HELD),
        (MESSAGES, TURN, [TURN, TEXT], None, "by release", HELD),
        (TEXTS, TEXT, [TURN], None, None, FOUND),
        (TEXTS, TURN, [TURN], None, [TEXT], FOUND),  # the tokenizer's was taken for known
        (TEXTS, TURN, [TURN], [TEXT], None, FOUND),
        (MESSAGES, TURN, [TURN], [TEXT], None, FOUND),
        (TEXTS, TURN, [TURN], [TURN], None, HELD),
        (TEXTS, TEXT, [TURN], [TEXT, TURN], None, NOT_CHECKED),
    ],
)
def test_an_end_of_a_completion(prompts, own, config, given, known, kind, model, tokenizer):
    """It is where the template's turn, the generation config or generation_kwargs end it, and not where it is known."""

    def ids(tokens):
        return tokens and tokenizer.convert_tokens_to_ids(tokens)

    model.generation_config.eos_token_id = ids(config)
    limits = {"generation_kwargs": {"eos_token_id": ids(given)}} if given else None
    seen = training(model, ending(tokenizer, own), prompts, limits=limits)
    if known != "by release":
        seen.trainer.eos_token_ids = ids(known)  # None as in releases that look for the tokenizer's alone
    answer = only(judge_ends(seen), "F13")
    assert answer.verdict is kind, answer
    if kind is FOUND:
        assert (answer.undo is None) is bool(given) and "padding after it counts" in answer.evidence
        assert given or answer.undo.text == f"{{tokenizer}}.eos_token = '{config[0]}'"


@pytest.mark.parametrize("options", [{"min_new_tokens": 64}, {"suppress_tokens": [2, 7]}, {"bad_words_ids": [[2]]}])
def test_nothing_is_held_of_ends_that_may_be_forbidden(options, model, tokenizer):
    """The end is token 2; nothing of a cut run shows that it is forbidden."""
    own = training(model, tokenizer, MESSAGES, limits={"generation_kwargs": options})
    assert only(judge_ends(own), "F13").verdict is NOT_CHECKED


def test_prompts_that_are_cut(model, tokenizer, monkeypatch):
    long, odd = ["12345+6="] * 9 + ["1="], ["1+1="] * 19 + ["1+1=" * 9]  # the second is no failure
    for prompts, limit, kind, count in (
        (long, 4, FOUND, "9 of 10"),
        (long, 16, HELD, "0 of"),
        (odd, 8, HELD, "1 of 20"),
    ):
        answer = next(iter(judge_lengths(training(model, tokenizer, prompts, limits={"max_prompt_length": limit}))))
        assert answer.verdict is kind and answer.evidence.startswith(count), answer
        assert f"longer than max_prompt_length {limit}" in answer.evidence
    monkeypatch.setattr(rows, "installed_version", lambda _: Version("0.27.0"))  # which cuts none
    answers = judge_lengths(training(model, tokenizer, odd, limits={"max_prompt_length": 4}))
    assert not any("max_prompt_length" in str(answer) for answer in answers)


def test_other_trainers_have_no_completions(model, tokenizer):
    trainer = types.SimpleNamespace(processing_class=tokenizer, model=model)
    rows = datasets.Dataset.from_dict({"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS})
    given = Training(trainer=trainer, arguments={"max_prompt_length": 1}, dataset=rows)
    assert [*judge_lengths(given), *judge_template(given), *judge_ends(given)] == []
