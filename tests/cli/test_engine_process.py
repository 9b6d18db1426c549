"""The second engine in a process of its own: it answers, takes weights, and is gone when it is closed."""

import pytest
import requests
import torch

from failurelab_course.experiments import engine_process, models


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_it_answers_takes_weights_and_ends(tmp_path):
    """Greedy answers of the right sums; with weights of zero each token is as likely as any other."""
    model, tokenizer = models.load("tiny")
    asked = {"prompts": ["3+4=", "12+19="], "max_tokens": 4, "temperature": 0.01}
    with engine_process.running(models.source("tiny")) as url:
        answer = requests.post(f"{url}/generate", json=asked).json()
        assert tokenizer.batch_decode(answer["prompt_ids"]) == asked["prompts"]
        assert [len(row) for row in answer["logprobs"]] == [len(row) for row in answer["completion_ids"]]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        requests.post(f"{url}/load", json={"path": str(tmp_path)})
        even = requests.post(f"{url}/generate", json=asked | {"temperature": 1.0}).json()
        assert even["logprobs"][0][0] == pytest.approx(
            -torch.tensor(float(model.config.vocab_size)).log().item(), abs=0.01
        )
    with pytest.raises(requests.ConnectionError):
        requests.post(f"{url}/generate", json=asked, timeout=5)


def test_an_engine_that_cannot_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="the engine did not start"), engine_process.running(str(tmp_path)):
        pass
