"""The stand-in for vLLM: its tokens have the log-probabilities that it tells, and it sleeps as vLLM does."""

import pytest
import torch

from failurelab_course.experiments import models, vllm_stand_in

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
