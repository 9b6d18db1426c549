"""What an engine that draws for a trainer was asked, and what it gave: ids, and their log-probabilities.

An engine is looked for on the trainer at hand, in this order, and listened to where trl calls it:

- `trainer.vllm_generation`, from trl 0.28 on: colocated or a server, and the completions of this process;
- `trainer.llm`, a colocated engine before that: given texts, or ids;
- `trainer.vllm_client`, a server before that: given texts, it answers with ids;
- `model.generate_batch`, transformers' continuous batching.

An engine's log-probabilities are those of the distribution that it drew from, after the temperature.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from failurelab.textbook.rows import Row, cut_at_end

# A prompt, a completion, and its log-probabilities.
Answer = tuple[Sequence[int], Sequence[int], Sequence[float | None] | None]


@dataclasses.dataclass(frozen=True)
class Engine:
    """What draws for a trainer."""

    owner: Any  # whose method is listened to
    name: str  # of the method
    # takes the arguments of a call, by name, and what it returned; gives the answers, one for each completion
    read: Callable[[Mapping[str, Any], Any], list[Answer]]
    # takes the same arguments; gives the temperature that was asked for, or None
    temperature: Callable[[Mapping[str, Any]], float | None]


def engines_of(trainer: Any, encode: Callable[[str], list[int]]) -> list[Engine]:
    """Return what may draw for a trainer beside its model's `generate`.

    Args:
        trainer: a trainer that is ready to train.
        encode: gives the ids of a prompt's text.
    """
    model, engines = trainer.accelerator.unwrap_model(trainer.model), []
    if callable(getattr(model, "generate_batch", None)):
        engines.append(Engine(model, "generate_batch", _of_batch, _asked("generation_config")))
    helper = getattr(trainer, "vllm_generation", None)
    client, llm = getattr(trainer, "vllm_client", None), getattr(trainer, "llm", None)
    if helper is not None:
        own = getattr(helper, "generation_kwargs", None) or {}
        asked = own.get("temperature", getattr(helper, "temperature", None))
        engines.append(Engine(helper, "generate", _of_helper, lambda given: asked))
    elif llm is not None:
        engines.append(
            Engine(llm, "generate", lambda given, output: _of_llm(given, output, encode), _asked("sampling_params"))
        )
    elif client is not None:
        read = lambda given, output: _of_client(given, output, encode)  # noqa: E731
        engines.append(Engine(client, "generate", read, lambda given: given.get("temperature")))
    return engines


def read_answers(
    engine: Engine, called: Sequence[Any], ends: frozenset[int], multiple: int = 1
) -> tuple[list[Row], float | None]:
    """Return the completions that a call of an engine drew, and the temperature that was asked for, or None.

    Args:
        engine: that was called.
        called: its method, the arguments, those by name, and what it returned.
        ends: ids that end a completion.
        multiple: lengths are padded to multiples of it.
    """
    method, args, kwargs, output = called
    asked = inspect.signature(method).bind(*args, **kwargs).arguments
    given = asked | asked.get("kwargs", {})
    in_prompts = [each.get("multi_modal_data") for each in given.get("prompts") or () if isinstance(each, Mapping)]
    pictures = [*(given.get("images") or ()), *in_prompts]
    if any(pictures):
        raise ValueError("pictures that an engine was given are not known as the model's inputs")
    answers = engine.read(given, output)
    longest = (max((len(own) for own in each), default=0) for each in zip(*((one, two) for one, two, _ in answers)))
    width, length = [-(-size // multiple) * multiple for size in longest] or (0, 0)
    rows = []
    for prompt, drawn, scores in answers:
        completion, ended = cut_at_end([int(token) for token in drawn], ends)
        row = Row(tuple(int(token) for token in prompt), completion, ended, padded=(width, length))
        if scores is not None:
            row = dataclasses.replace(row, engine_logps=logps_of(scores[: len(completion)]))
        rows.append(row)
    return rows, engine.temperature(given)


def logps_of(scores: Sequence[float | None]) -> torch.Tensor:
    """Return log-probabilities (tokens,) that an engine told, NaN where it told none."""
    return torch.tensor([math.nan if score is None else float(score) for score in scores], dtype=torch.float32)


def _of_helper(given: Mapping[str, Any], output: Any) -> list[Answer]:
    prompts, completions, logprobs, tokens = output  # logprobs (rows, tokens, some), the ids that they are of likewise
    answers: list[Answer] = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        scores = None
        if logprobs is not None:
            ids = tokens[number] if tokens is not None else [[token] for token in completion]
            scores = [some[own.index(token)] for token, some, own in zip(completion, logprobs[number], ids)]
        answers.append((prompt, completion, scores))
    return answers


def _of_llm(given: Mapping[str, Any], output: Any, encode: Callable[[str], list[int]]) -> list[Answer]:
    answers: list[Answer] = []
    for asked, request in zip(given["prompts"], output, strict=True):
        prompt = getattr(request, "prompt_token_ids", None)
        for answer in request.outputs:
            scores = getattr(answer, "logprobs", None)
            if scores is not None:
                scores = [some[token].logprob for token, some in zip(answer.token_ids, scores)]
            answers.append((_ids(asked, encode) if prompt is None else prompt, answer.token_ids, scores))
    return answers


def _of_client(given: Mapping[str, Any], output: Any, encode: Callable[[str], list[int]]) -> list[Answer]:
    told = output if isinstance(output, Mapping) else {"completion_ids": output}
    prompts = [_ids(prompt, encode) for prompt in given["prompts"] for _ in range(int(given.get("n", 1)))]
    scores = told.get("logprobs") or [None] * len(prompts)
    return [
        (prompt, completion, own and [each[0] if isinstance(each, list) else each for each in own])
        for prompt, completion, own in zip(prompts, told["completion_ids"], scores, strict=True)
    ]


def _of_batch(given: Mapping[str, Any], output: Any) -> list[Answer]:
    """Return what each request drew; its own prompt says which it is, in whatever order they ended."""
    return [(answer.prompt_ids, answer.generated_tokens, None) for answer in output.values()]


def _asked(options: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Return what reads the temperature of the options that a call is given under a name."""
    return lambda given: getattr(given.get(options), "temperature", None)


def _ids(prompt: Any, encode: Callable[[str], list[int]]) -> Sequence[int]:
    """Return the ids of a prompt that an engine was given as a text or as ids, alone or in a dictionary."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids") or prompt["prompt"]
    return encode(prompt) if isinstance(prompt, str) else prompt
