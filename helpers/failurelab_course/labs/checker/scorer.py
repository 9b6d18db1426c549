"""The scorer: a function that says how accurate weights are, asked of a process that no script has run in.

A script can change the process that it runs in: replace `generate`, patch torch, loosen a tolerance. What is to be
believed must come from elsewhere. So the checker forks this process before it imports the script. It holds the clean
model and libraries that no script has touched.

Forking is safe because nothing was computed on several threads before, and the child keeps to one.
"""

import contextlib
import multiprocessing
import os
import pathlib
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import safetensors.torch
import torch

from failurelab_course.experiments import models


class Refused(Exception):
    """What the script hands over cannot be measured as an answer to the lab."""


@contextlib.contextmanager
def start(model: Any, tokenizer: Any) -> Iterator[Callable[..., float]]:
    """Fork the scorer of a clean model, and give the function that asks it; end it when the block is left."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(model, tokenizer, there, here))
    process.start()
    there.close()

    def accuracy(
        weights: pathlib.Path | None = None,
        adapter: pathlib.Path | None = None,
        prompts: Sequence[tuple[str, str]] | None = None,
    ) -> float:
        """Return the probability of a right answer at temperature 1 in eval mode, in the mean of the prompts.

        It is what the share of right answers would be in endlessly many draws, so no chance of a draw is in it.

        Args:
            weights: a state dict saved by safetensors, loaded into the clean model; None is the model as given.
            adapter: a folder saved by PEFT, applied to the clean model.
            prompts: pairs of prompt and answer; by default all sums.

        Raises:
            Refused: the weights do not belong to this model, or the scorer has ended.
        """
        try:
            here.send((weights, adapter, prompts))
            answer = here.recv()
        except (EOFError, OSError) as error:
            raise Refused("the process that scores the run was ended by the run") from error
        if isinstance(answer, str):
            raise Refused(answer)
        return answer

    try:
        yield accuracy
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
            question = pipe.recv()
            model.load_state_dict(as_given)
            try:
                pipe.send(_accuracy(model, tokenizer, *question))
            except Exception as error:  # whatever it is, the run must hear of it, not wait for ever
                pipe.send(traceback.format_exception_only(error)[-1].strip())


def _accuracy(model: Any, tokenizer: Any, weights: pathlib.Path | None, adapter: Any, prompts: Any) -> float:
    if weights:
        missing = model.load_state_dict(safetensors.torch.load_file(weights), strict=False).missing_keys
        if missing:
            raise KeyError(f"the trained model is another than the one in model_path: it has no {missing[0]}")
    if not adapter:
        return _probability(model, tokenizer, prompts)
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model, adapter)
    try:
        return _probability(adapted, tokenizer, prompts)
    finally:
        adapted.unload()


def _probability(model: Any, tokenizer: Any, prompts: Any) -> float:
    """Return the probability of the answer's tokens and the end, in the mean of the prompts."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    pairs = [(ids(prompt), [*ids(answer), tokenizer.eos_token_id]) for prompt, answer in prompts or models.sums()]
    rows = [torch.tensor(prompt + answer, device=model.device) for prompt, answer in pairs]
    # filled up on the right, where no token of the row looks
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    with torch.no_grad():
        each = model(input_ids=batch).logits[:, :-1].log_softmax(-1).gather(2, batch[:, 1:, None]).squeeze(2)
    answers = (row[len(prompt) - 1 : len(prompt) + len(answer) - 1] for row, (prompt, answer) in zip(each, pairs))
    return sum(float(answer.sum().exp()) for answer in answers) / len(pairs)
