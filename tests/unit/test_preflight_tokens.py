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
QUESTIONS = ["What is 3+4?", "Compute 5+6", "Add 8 and 9.", "12+30="]
MESSAGES = [[{"role": "user", "content": text}] for text in TEXTS]


def reward(completions, **_):
    return [0.0] * len(completions)


def training(model, tokenizer, prompts, name="base/tiny", log=(), limits=None, **options):
    """Return what preflight sees of a GRPO script, whose trainer has not begun."""
    trainer = small.grpo(model, tokenizer, prompts, reward)
    arguments = {"max_completion_length": 64, "max_prompt_length": None} | (limits or {})
    trainer.args = types.SimpleNamespace(**arguments)
    dataset = datasets.Dataset.from_dict({"prompt": prompts} | options.pop("columns", {}))
    load = Load(name, {}, model.config, by_trainer=False)
    return Training(trainer=trainer, arguments=arguments, dataset=dataset, loads=[load], log=list(log), **options)


def only(answers, failure):
    (answer,) = (answer for answer in answers if answer.failure == failure)
    return answer


@pytest.fixture
def with_bos(tokenizer):
    """Return a tokenizer that begins each text with a token of its own, as Llama's and Gemma's do."""
    from tokenizers import processors

    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"bos_token": "<|im_start|>"})
    mark = [("<|im_start|>", own.bos_token_id)]
    own._tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=mark)
    return own


@pytest.mark.parametrize(
    ("prompts", "name", "kind"),
    [
        (MESSAGES, "Qwen/Qwen2-0.5B-Instruct", Verdict.NOT_APPLICABLE),
        (QUESTIONS, "Qwen/Qwen2-0.5B-Instruct", Verdict.SUSPECTED),
        (QUESTIONS, "my-model/checkpoint-500", Verdict.SUSPECTED),
        (["SUBREDDIT: r/x POST: I asked why. TL;DR:"] * 4, "Qwen/Qwen2-0.5B-Instruct", Verdict.NOT_CHECKED),
        (TEXTS, "/models/chat-data/tiny-qwen2", Verdict.NOT_CHECKED),
        (
            [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in TEXTS],
            "x-Instruct",
            Verdict.HELD,
        ),
        ([f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>" for text in TEXTS], "x", Verdict.HELD),
        ([f"<|im_start|>user\n{text}<|im_end|>\n" for text in TEXTS], "x-Instruct", Verdict.FOUND),
    ],
)
def test_plain_prompts_for_a_chat_model(prompts, name, kind, model, tokenizer):
    """Whatever the model is called: what ends its texts says whether it is a chat model, and tasks are suspected.

    Text that the script templated itself must begin the assistant's turn.
    """
    answer = only(judge_template(training(model, tokenizer, prompts, name)), "F12")
    assert answer.verdict is kind


def test_a_template_and_a_tokenizer_without_an_end(model, tokenizer):
    """Nothing ends a turn and nothing ends a text: that these two agree says nothing of the model."""
    model, tokenizer = copy.deepcopy(model), copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for message in messages %}User: {{ message['content'] }}\n{% endfor %}"
    tokenizer.eos_token = model.config.eos_token_id = model.generation_config.eos_token_id = None
    answers = judge_template(training(model, tokenizer, QUESTIONS, small=True))
    assert only(answers, "F12").verdict is Verdict.NOT_CHECKED


def test_a_base_model_has_a_template_too(model, tokenizer):
    """Its texts end with another token than a turn of the template: plain prompts are right for it."""
    base = ending(tokenizer, TEXT)
    model.generation_config.eos_token_id = base.eos_token_id
    assert only(judge_template(training(model, base, QUESTIONS, "x-Instruct")), "F12").verdict is Verdict.NOT_CHECKED
    base.chat_template = None  # nothing to apply
    assert only(judge_template(training(model, base, TEXTS, "x-chat")), "F12").verdict is Verdict.NOT_APPLICABLE


def test_a_sequence_begun_twice(model, with_bos):
    """Text that holds the beginning already is begun again by a trl that adds special tokens, and by no other."""
    texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in TEXTS]
    answers = list(judge_template(training(model, with_bos, texts)))
    adds = prompt_ids(training(model, with_bos, TEXTS).trainer, TEXTS)[0][0] == with_bos.bos_token_id
    assert any(answer.verdict is Verdict.FOUND for answer in answers) is adds
    assert adds is hasattr(trl.GRPOTrainer, "_tokenize_prompts")
    bos, trainer = with_bos.bos_token_id, types.SimpleNamespace(processing_class=with_bos, model=model)
    for begun, kinds in (([bos, bos, 5], [Verdict.FOUND]), ([bos, 5], [])):  # rows that a trainer made
        trainer.train_dataset = datasets.Dataset.from_dict({"input_ids": [begun] * 3})
        answers = judge_template(
            Training(trainer=trainer, arguments={}, dataset=datasets.Dataset.from_dict({"text": ["a"]}))
        )
        assert [answer.verdict for answer in answers] == kinds


TURN, TEXT = "<|im_end|>", "<|endoftext|>"
# trl up to 1.14 knows the tokenizer's end alone, later ones those of the generation config too.
BY_RELEASE = Verdict.HELD if hasattr(trl.GRPOTrainer, "_tokenize_prompts") else Verdict.FOUND


def ending(tokenizer, end):
    other = copy.deepcopy(tokenizer)
    other.eos_token = end
    return other


@pytest.mark.parametrize(
    ("prompts", "name", "own", "generation", "kind"),
    [
        # The model ends its turn with <|im_end|>, and the tokenizer's end is another.
        (MESSAGES, "x-Instruct", TEXT, [TURN, TEXT], BY_RELEASE),
        # Of a model nobody knows by its name how it ends.
        (MESSAGES, "x-Instruct", TEXT, TEXT, Verdict.NOT_CHECKED),
        (MESSAGES, "x", TEXT, TEXT, Verdict.NOT_CHECKED),
        # Qwen2's own generation config has two ends; the turn ends with the tokenizer's.
        (TEXTS, "x-Instruct", TURN, [TURN], Verdict.HELD),
        (MESSAGES, "x-Instruct", TURN, [TURN, TEXT], Verdict.HELD),
    ],
)
def test_an_end_of_a_turn(prompts, name, own, generation, kind, model, tokenizer):
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(generation)
    answer = only(judge_ends(training(model, ending(tokenizer, own), prompts, name)), "F13")
    assert answer.verdict is kind and (
        kind is not Verdict.FOUND or "padding counts as the completion" in answer.evidence
    )


@pytest.mark.parametrize(("end", "kind"), [(TEXT, Verdict.FOUND), (TURN, Verdict.HELD)])
def test_an_end_that_is_not_the_model_s(end, kind, model, tokenizer):
    """Prompts without a template end somewhere too: where the generation config, or generation_kwargs, say."""
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(TURN)
    given = training(model, ending(tokenizer, end), TEXTS)
    given.trainer.eos_token_ids = None  # as in releases that look for the tokenizer's alone
    limits = {"generation_kwargs": {"eos_token_id": tokenizer.convert_tokens_to_ids(end)}}
    own, generated = (
        only(judge_ends(each), "F13") for each in (given, training(model, tokenizer, TEXTS, limits=limits))
    )
    assert own.verdict is generated.verdict is kind
    if kind is Verdict.FOUND:
        assert own.undo.text == f"{{tokenizer}}.eos_token = '{TURN}'" and "generation_kwargs" in generated.evidence


def test_a_trainer_that_looks_for_another_end_than_its_tokenizer_s(model, tokenizer):
    """The tokenizer's was taken for known whatever the trainer compares with, and F13 was HELD."""
    given = training(model, ending(tokenizer, TURN), TEXTS)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(TURN)
    given.trainer.eos_token_ids = [tokenizer.convert_tokens_to_ids(TEXT)]
    assert only(judge_ends(given), "F13").verdict is Verdict.FOUND


def test_prompts_that_are_cut(model, tokenizer, monkeypatch):
    for limit, kind in ((4, Verdict.FOUND), (16, Verdict.HELD)):
        answers = judge_lengths(
            training(model, tokenizer, ["12345+6="] * 9 + ["1="], limits={"max_prompt_length": limit})
        )
        answer = next(iter(answers))
        assert answer.verdict is kind and f"longer than max_prompt_length {limit}" in answer.evidence
    prompts = ["1+1="] * 19 + ["1+1=" * 9]  # odd, and no failure
    answer = next(iter(judge_lengths(training(model, tokenizer, prompts, limits={"max_prompt_length": 8}))))
    assert answer.verdict is Verdict.HELD and answer.evidence.startswith("1 of 20")
    monkeypatch.setattr(rows, "installed_version", lambda _: Version("0.27.0"))  # which cuts none
    answers = judge_lengths(training(model, tokenizer, prompts, limits={"max_prompt_length": 4}))
    assert not any("max_prompt_length" in str(answer) for answer in answers)


def test_how_long_completions_are_the_real_run_tells(model, tokenizer):
    for real in (True, False):
        log = [{"completions/clipped_ratio": 1.0}]
        given = training(model, tokenizer, TEXTS, limits={"max_completion_length": 64}, log=log, small=False, real=real)
        answer = only(judge_lengths(given), "F11")
        assert answer.verdict is Verdict.NOT_CHECKED and ("100%" in answer.why) is real


@pytest.mark.parametrize("options", [{"min_new_tokens": 64}, {"suppress_tokens": [2, 7]}, {"bad_words_ids": [[2]]}])
def test_nothing_is_held_of_ends_that_may_be_forbidden(options, model, tokenizer):
    """The end is token 2; nothing of a cut run shows that it is forbidden."""
    own = training(model, tokenizer, MESSAGES, limits={"generation_kwargs": options})
    assert only(judge_ends(own), "F13").verdict is Verdict.NOT_CHECKED


@pytest.mark.parametrize("padding", [TEXT, TURN])
def test_generation_that_stops_at_an_end_that_the_trainer_does_not_know(padding, model, tokenizer):
    """The first padding is what the trainer takes for the end, if it is that token; else all of the padding counts."""
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(TURN)
    own = ending(tokenizer, TEXT)
    own.pad_token = padding
    limits = {"generation_kwargs": {"eos_token_id": tokenizer.convert_tokens_to_ids([TEXT, TURN])}}
    given = training(model, own, TEXTS, limits=limits)
    given.trainer.eos_token_ids = None
    assert only(judge_ends(given), "F13").verdict is (Verdict.NOT_CHECKED if padding == TEXT else Verdict.FOUND)


def test_other_trainers_have_no_completions(model, tokenizer):
    trainer = types.SimpleNamespace(processing_class=tokenizer, model=model)
    rows = datasets.Dataset.from_dict({"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS})
    assert list(judge_lengths(Training(trainer=trainer, arguments={"max_prompt_length": 1}, dataset=rows))) == []
    assert list(judge_template(Training(trainer=trainer, arguments={}, dataset=rows))) == []
