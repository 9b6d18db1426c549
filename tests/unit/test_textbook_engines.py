"""The textbook and what another engine drew: colocated or as a server, with each correction that trl documents."""

from types import SimpleNamespace

import pytest
import torch
from engine import Engine, colocate, serve
from steps import before, compare, has, ones, planted, trainer

from failurelab.textbook import engines

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@pytest.fixture
def make(model, tokenizer, tmp_path):
    def made(options, **more):
        lengths = (5,) if before("0.15") else (4, 5)  # 0.14 hands no attention mask over (TRL #2708)
        return trainer(model, tokenizer, tmp_path, rewards=[ones], lengths=lengths, **options | more)

    return made


def encode(text):
    return [int(letter) for letter in text]


def request(prompt, *answers):
    """Return what vLLM's LLM gives for a prompt, with another token's log-probability beside each."""
    outputs = []
    for ids, logps in answers:
        told = [{9: SimpleNamespace(logprob=-9.0), one: SimpleNamespace(logprob=lp)} for one, lp in zip(ids, logps)]
        outputs.append(SimpleNamespace(token_ids=ids, logprobs=told))
    return SimpleNamespace(prompt_token_ids=prompt, outputs=outputs)


HELPER = ([[1], [2, 3]], [[4, 0], [5]], [[[-9, -0.5], [-0.25, -9]], [[-9, None]]], [[[9, 4], [0, 9]], [[9, 5]]])
SCORES = {"completion_ids": [[4, 0], [5]], "logprobs": [[[-0.5], [-0.25]], [None]]}
READ = {  # of a trainer's engine, what it is asked and gives
    "helper": ("vllm_generation", {}, HELPER),
    "colocated": (
        "llm",
        {"prompts": ["1", "23"]},
        [request([1], ([4, 0], [-0.5, -0.25])), request(None, ([5], [None]))],
    ),
    "server": ("vllm_client", {"prompts": ["1", {"prompt_token_ids": [2, 3]}]}, SCORES),
    "server, without scores": ("vllm_client", {"prompts": ["1", "23"]}, [[4, 0], [5]]),
}


@pytest.mark.parametrize("case", READ)
def test_what_an_engine_gives_is_read(case):
    """Its answers are those of the prompts that it was asked, with the log-probabilities of what it drew."""
    name, asked, output = READ[case]
    owner = SimpleNamespace(generate=lambda **kwargs: output)
    made = SimpleNamespace(accelerator=SimpleNamespace(unwrap_model=lambda model: model), model=None, **{name: owner})
    (engine,) = engines.engines_of(made, encode)
    rows, _ = engines.read_answers(engine, (owner.generate, (), asked, output), frozenset([0]), multiple=4)
    assert [(row.prompt, row.completion, row.ended) for row in rows] == [((1,), (4, 0), True), ((2, 3), (5,), False)]
    assert all(row.padded == (4, 4) for row in rows)
    if "without" not in case:
        assert rows[0].engine_logps.tolist() == [-0.5, -0.25] and rows[1].engine_logps.isnan().all()


def test_pictures_that_an_engine_was_given_are_not_read():
    engine = engines.Engine(None, "generate", lambda *_: [], lambda _: None)
    for asked in ({"images": [["dots"]]}, {"prompts": [{"prompt": "1", "multi_modal_data": ["dots"]}]}):
        with pytest.raises(ValueError, match="pictures"):
            engines.read_answers(engine, (lambda **kwargs: None, (), asked, None), frozenset())


def held(report):
    return report.verdict == "HELD" and report.apart.cosine >= 0.999 and abs(report.apart.size - 1) <= 0.02


def test_an_engine_beside_the_trainer_holds_in_every_release(monkeypatch, model, tokenizer, make):
    """At another temperature too, and where its weights are sent before the second step."""
    temperature = 1.0 if before("0.16") else 0.7
    options = colocate(monkeypatch, Engine(model, tokenizer))
    report = compare(make(options, temperature=temperature, learning_rate=1e-3, max_steps=2), (2,))
    assert held(report), report


@pytest.mark.skipif(not has("vllm_mode"), reason="this release has no server")
def test_a_server_holds(monkeypatch, model, tokenizer, make):
    process, options = serve(monkeypatch, Engine(model, tokenizer))
    try:
        report = compare(make(options, learning_rate=1e-3, max_steps=2), (2,))
    finally:
        process.kill()
        process.join()
    assert held(report), report


@pytest.mark.skipif(not has("vllm_importance_sampling_mode"), reason="this release has one kind of correction, or none")
@pytest.mark.parametrize("mode", MODES)
def test_each_correction_holds(mode, monkeypatch, model, tokenizer, make):
    """With an engine that has kept its first weights, so that the ratios are far from 1."""
    options = colocate(monkeypatch, Engine(model, tokenizer, stale=True))
    bounds = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2}
    options |= {"vllm_importance_sampling_mode": mode, "learning_rate": 5e-3, "max_steps": 2} | bounds
    report = compare(make(options), (2,))
    assert held(report), report


def weighed(change):
    """Change the weights that a trainer multiplies its loss with."""
    return lambda inputs: inputs | {"importance_sampling_ratio": change(inputs["importance_sampling_ratio"])}


@pytest.mark.skipif(not has("vllm_importance_sampling_mode"), reason="this release has one kind of correction, or none")
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
    report = compare(make(options, kind=planted(inputs=weighed(change))), (2,))
    assert (report.verdict, report.named) == ("FOUND", None), report
