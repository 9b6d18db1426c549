"""The stand-in for vLLM: trl's own code sends it the weights and logs how far it is from the policy."""

import contextlib

import pytest
import torch

from failurelab_course.experiments import models, trainers, vllm_stand_in

KEY = "sampling/sampling_logp_difference/mean"
pytestmark = pytest.mark.slow


@pytest.fixture
def engine():
    """An engine of the small model, and the same weights in bfloat16."""
    path = models.source("tiny")
    return vllm_stand_in.LLM(model=path), *models.load("tiny", dtype=torch.bfloat16)


def test_it_answers_with_the_log_probabilities_of_its_tokens(engine):
    """One completion for each prompt, up to its end, scored as the same weights score it."""
    llm, model, tokenizer = engine
    prompts = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in ("3+4=", "12+13=")]
    answers = llm.generate(prompts, vllm_stand_in.SamplingParams(temperature=0.7, max_tokens=4, logprobs=0))
    for asked, answer in zip(prompts, answers, strict=True):
        (drawn,) = answer.outputs
        assert answer.prompt_token_ids == asked["prompt_token_ids"]
        assert tokenizer.eos_token_id not in drawn.token_ids[:-1] and len(drawn.token_ids) <= 4
        ids = torch.tensor([answer.prompt_token_ids + drawn.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(answer.prompt_token_ids) - 1 : -1].float()
        wanted = (logits / 0.7).log_softmax(-1)[range(len(drawn.token_ids)), drawn.token_ids]
        told = [row[token].logprob for row, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
        assert torch.allclose(torch.tensor(told), wanted, atol=0.05)


def test_asleep_it_has_no_weights_and_a_reload_gives_the_first_ones(engine):
    """At sleep level 2; what trl sends is taken, and a reload throws it away."""
    llm, model, _ = engine
    weights = dict(model.named_parameters())
    llm.sleep(level=2)
    assert all(weight.isnan().all() for weight in llm._model.parameters())
    llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(
        [(name, weight + 1) for name, weight in weights.items()]
    )
    assert all(torch.equal(weight, weights[name] + 1) for name, weight in llm._model.named_parameters())
    llm.collective_rpc("reload_weights")
    assert all(torch.equal(weight, weights[name]) for name, weight in llm._model.named_parameters())


BEFORE_AND_NOW = [(vllm_stand_in.reload_at_each_call, True), (contextlib.nullcontext, False)]


@pytest.mark.parametrize(("older", "stale"), BEFORE_AND_NOW, ids=["trl 1.9", "trl 1.10"])
def test_trl_s_log_tells_an_engine_that_is_reloaded(older, stale):
    """Rounding at the first step in both; after that the gap grows where the checkpoint is loaded again."""
    vllm_stand_in.install()
    model, tokenizer = models.load()
    with older():
        trainer = trainers.grpo(
            model, tokenizer, steps=4, learning_rate=1e-3, prompts_per_step=4, num_generations=8, logging_steps=1,
            use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True,
        )  # fmt: skip
        trainer.train()
    gaps = [row[KEY] for row in trainer.state.log_history if KEY in row]
    assert 0 < gaps[0] < 0.02
    assert (gaps[-1] > 0.05) is stale
