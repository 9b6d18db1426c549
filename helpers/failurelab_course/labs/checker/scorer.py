"""The process that scores a lab's run from outside the run.

A script can change the process that it runs in: replace `generate`, patch torch, loosen a tolerance. What is to be
believed must come from elsewhere. So the checker forks this process before it imports the script. It holds the clean
model and libraries that no script has touched, and answers questions over a pipe: the accuracy of the model as given,
of trained weights, of an adapter.

Forking is safe because nothing was computed on several threads before, and the child keeps to one.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import safetensors.torch
import torch

from failurelab_course.experiments import models

DRAWS = 4


class ScorerError(Exception):
    """The scorer has ended, or could not answer; the message says why."""


class Scorer:
    """The other end of the pipe."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def accuracy(
        self,
        weights: pathlib.Path | None = None,
        adapter: pathlib.Path | None = None,
        prompts: Sequence[tuple[str, str]] | None = None,
        draws: int = DRAWS,
    ) -> float:
        """Return the share of right answers, sampled at temperature 1 in eval mode, mean of `draws` draws.

        Args:
            weights: a state dict saved by safetensors, loaded into the clean model; None is the model as given.
            adapter: a folder saved by PEFT, applied to the clean model.
            prompts: pairs of prompt and answer; by default all sums.
            draws: seeds 0 to draws - 1.

        Raises:
            ScorerError: the weights do not belong to this model, or the scorer has ended.
        """
        question = {"weights": str(weights or ""), "adapter": str(adapter or ""), "prompts": prompts, "draws": draws}
        try:
            self._pipe.send_bytes(json.dumps(question).encode())
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise ScorerError("the process that scores the run was ended by the run") from error
        if "error" in answer:
            raise ScorerError(answer["error"])
        return answer["accuracy"]


@contextlib.contextmanager
def start(model: Any, tokenizer: Any) -> Iterator[Scorer]:
    """Fork the scorer of a clean model; end it when the block is left."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(model, tokenizer, there, here))
    process.start()
    there.close()
    try:
        yield Scorer(here)
    finally:
        here.close()
        process.kill()
        process.join()


def _serve(model: Any, tokenizer: Any, pipe: Connection, other: Connection) -> None:
    other.close()  # or this end would not be told when the run has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Scores are the CPU's, whatever device is trained on; and in a fork CUDA would be an error. By NVML torch counts
    # GPUs without asking CUDA, and finds none.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    torch.set_num_threads(1)
    as_given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = json.loads(pipe.recv_bytes())
            model.load_state_dict(as_given)
            try:
                answer = {"accuracy": _accuracy(model, tokenizer, **question)}
            except Exception as error:  # whatever it is, the run must hear of it, not wait for ever
                answer = {"error": traceback.format_exception_only(error)[-1].strip()}
            pipe.send_bytes(json.dumps(answer).encode())


def _accuracy(model: Any, tokenizer: Any, weights: str, adapter: str, prompts: Any, draws: int) -> float:
    if weights:
        missing = model.load_state_dict(safetensors.torch.load_file(weights), strict=False).missing_keys
        if missing:
            raise KeyError(f"the trained model is another than the one in model_path: it has no {missing[0]}")
    scored = model
    if adapter:
        from peft import PeftModel

        scored = PeftModel.from_pretrained(model, adapter)
    try:
        scores = [models.accuracy(scored, tokenizer, sampled=True, seed=seed, prompts=prompts) for seed in range(draws)]
    finally:
        if adapter:
            scored.unload()
    return sum(scores) / draws
