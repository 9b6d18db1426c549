"""The textbook and what another engine drew: colocated or as a server, with each correction that trl documents."""

import pytest
import torch
from engine import Engine, colocate, serve
from steps import before, compare, has, ones, planted, trainer

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@pytest.fixture
def make(model, tokenizer, tmp_path):
    def made(options, **more):
        lengths = (5,) if before("0.15") else (4, 5)  # 0.14 hands no attention mask over (TRL #2708)
        return trainer(model, tokenizer, tmp_path, rewards=[ones], lengths=lengths, **options | more)

    return made


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
