"""The textbook and what another engine drew: colocated or as a server, with each correction that trl documents."""

from types import SimpleNamespace

import pytest
import torch
from engine import Engine, colocate, serve
from steps import before, compare, has, holds, ones, planted, trainer

from failurelab.textbook import engines

corrects = pytest.mark.skipif(
    not has("vllm_importance_sampling_mode"), reason="this release has one kind of correction, or none"
)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@pytest.fixture
def make(model, tokenizer, tmp_path):
    def made(options, **more):
        lengths = (5,) if before("0.15") else (4, 5)  # 0.14 hands no attention mask over (TRL #2708)
        return trainer(model, tokenizer, tmp_path, rewards=[ones], lengths=lengths, **options | more)

    return made


def likely(*pairs):
    """Return what vLLM tells of one place: a token's log-probability by its id."""
    return {token: SimpleNamespace(logprob=logprob) for token, logprob in pairs}


DRAWN = SimpleNamespace(token_ids=[4, 0], logprobs=[likely((9, -9.0), (4, -0.5)), likely((0, None))])
READ = {  # of each engine, what it is asked and gives
    "vllm_generation": ({}, ([[2, 3]], [[4, 0]], [[[-9, -0.5], [None]]], [[[9, 4], [0]]])),
    "llm": ({"prompts": ["23"]}, [SimpleNamespace(prompt_token_ids=None, outputs=[DRAWN])]),
    "vllm_client": (
        {"prompts": [{"prompt_token_ids": [2, 3]}]},
        {"completion_ids": [[4, 0]], "logprobs": [[[-0.5], [None]]]},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_an_engine_says_of_a_drawn_token_is_found_by_its_id(name):
    """Other likely tokens may stand before it, and some have no log-probability."""
    asked, output = READ[name]
    owner = SimpleNamespace(generate=lambda **kwargs: output)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    made = SimpleNamespace(accelerator=accelerator, model=None, **{name: owner})
    (engine,) = engines.engines_of(made, lambda text: [int(letter) for letter in text])
    ((row,), _) = engines.read_answers(engine, (owner.generate, (), asked, output), frozenset([0]), multiple=4)
    assert (row.prompt, row.completion, row.ended, row.padded) == ((2, 3), (4, 0), True, (4, 4))
    assert row.engine_logps[0] == -0.5 and row.engine_logps[1].isnan()


def test_pictures_that_an_engine_was_given_are_not_read():
    engine = engines.Engine(None, "generate", lambda *_: [], lambda _: None)
    for asked in ({"images": [["dots"]]}, {"prompts": [{"prompt": "1", "multi_modal_data": ["dots"]}]}):
        with pytest.raises(ValueError, match="pictures"):
            engines.read_answers(engine, (lambda **kwargs: None, (), asked, None), frozenset())


@pytest.mark.parametrize(
    "ask", [colocate, pytest.param(serve, marks=pytest.mark.skipif(not has("vllm_mode"), reason="it has no server"))]
)
def test_an_engine_beside_the_trainer_holds_in_every_release(ask, monkeypatch, model, tokenizer, make):
    """At another temperature too, and where its weights are sent before the second step."""
    temperature = 1.0 if before("0.16") else 0.7
    options = ask(monkeypatch, Engine(model, tokenizer))
    report = compare(make(options, temperature=temperature, learning_rate=1e-3, max_steps=2), (2,))
    assert holds(report), report


@corrects
@pytest.mark.parametrize("mode", MODES)
def test_each_correction_holds(mode, monkeypatch, model, tokenizer, make):
    """With an engine that has kept its first weights, so that the ratios are far from 1."""
    options = colocate(monkeypatch, Engine(model, tokenizer, stale=True))
    bounds = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2}
    options |= {"vllm_importance_sampling_mode": mode, "learning_rate": 5e-3, "max_steps": 2} | bounds
    report = compare(make(options), (2,))
    assert holds(report), report


@corrects
@pytest.mark.parametrize(
    ("mode", "change"),
    [
        *((mode, torch.ones_like) for mode in MODES),
        ("sequence_truncate", lambda weights: (1 / weights).clamp(max=100)),
    ],
    ids=[*MODES, "upside down"],
)
def test_a_correction_that_is_another_one_is_found(mode, change, monkeypatch, model, tokenizer, make):
    """It is left out, or upside down."""
    options = colocate(monkeypatch, Engine(model, tokenizer, stale=True)) | {"max_steps": 2, "learning_rate": 5e-3}
    options |= {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 100.0}
    name = "importance_sampling_ratio"
    kind = planted(inputs=lambda inputs: inputs | {name: change(inputs[name])})
    report = compare(make(options, kind=kind), (2,))
    assert (report.verdict, report.named) == ("FOUND", None), report
