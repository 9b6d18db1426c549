"""What a call of `generate` was given and gave, and the texts that reward functions are asked about."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from failurelab._row_inputs import split_inputs
from failurelab._unwrap import unwrap
from failurelab.handles import is_unseen, wrap_method
from failurelab.textbook.rows import Ids, Row, cut_at_end

_IDS = ("inputs", "input_ids", "attention_mask")
_PROCESSORS = "_get_logits_processor"  # where transformers puts together what changes logits before a draw


def read_generation(
    model: Any, ends: frozenset[int], args: Sequence[Any], kwargs: dict[str, Any], output: Any
) -> list[Row]:
    """Return the completions that a call of `generate` drew, each behind the ids that it attended to.

    Args:
        model: whose `generate` was called.
        ends: ids that end a completion.
        args: of the call.
        kwargs: of the call.
        output: what it returned.

    Raises:
        ValueError: it was given no ids, or inputs of which it is not known to which prompt they belong.
    """
    given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    if given is None:
        raise ValueError("generate was not given token ids")
    attended = kwargs.get("attention_mask")
    attended = torch.ones_like(given) if attended is None else attended
    width, copies = given.shape[1], len(sequences) // len(given)
    prompts = [tuple(row[kept.bool()].tolist()) for row, kept in zip(given, attended)]
    beside = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in _IDS}
    config = getattr(model, "config", None)
    image = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    inputs = split_inputs(beside, given, attended.bool(), image)
    if inputs is None:
        raise ValueError(f"{', '.join(beside)}: which part belongs to which prompt is not known")
    rows = []
    for number, row in enumerate(sequences.tolist()):
        completion, ended = cut_at_end(row[width:], ends)
        padded = (width, len(row) - width)
        rows.append(Row(prompts[number // copies], completion, ended, padded=padded, inputs=inputs[number // copies]))
    return rows


def ends_of(*sources: Any) -> frozenset[int]:
    """Return the ids that end a completion, from the first that names some: a call's config, a model, a tokenizer."""
    for source in sources:
        config = getattr(source, "generation_config", source)
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else [int(end) for end in ends])
    return frozenset()


@contextlib.contextmanager
def listen_to_temperature(model: Any) -> Iterator[list[float | None]]:
    """Inside, note at which temperature each `generate` of a model draws, by what becomes of its first logits.

    Its arguments do not tell: a `generate` of one's own may hand on others, or a processor of logits may divide them.
    None where it does not sample, or leaves one token alone.
    """
    drawing, heard = unwrap(model), list[float | None]()

    def listened(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        processors = method(*args, **kwargs)
        config = kwargs.get("generation_config", args[0] if args else None)
        if is_unseen():
            return processors
        heard.append(None)  # until it samples
        given: list[torch.Tensor] = []

        def before(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            given.extend([] if given else [scores.clone()])
            return scores

        def after(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if len(given) == 1:
                given.append(scores)
                heard[-1] = _divisor(*given)
            return scores

        if getattr(config, "do_sample", False):
            processors.insert(0, before)
            processors.append(after)
        return processors

    with contextlib.ExitStack() as stack:
        if callable(getattr(drawing, _PROCESSORS, None)):
            stack.enter_context(wrap_method(drawing, _PROCESSORS, listened, "textbook: temperature of the sampling"))
        yield heard


def _divisor(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return what logits, (rows, vocabulary), were divided by, beside the likeliest; None where no other is left."""
    top = after.argmax(-1, keepdim=True)
    ratios = (before - before.gather(-1, top)) / (after - after.gather(-1, top))
    ratios = ratios[ratios.isfinite() & after.isfinite()]
    return round(float(ratios.median()), 4) if len(ratios) else None


@dataclasses.dataclass
class RewardCalls:
    """One call of the reward functions, reward models or judge: what each was given, and what it returned."""

    kwargs: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    rewards: dict[int, list[float | None]] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> list[list[float | None]]:
        """The rewards of each function, in their order."""
        return [self.rewards[index] for index in sorted(self.rewards)]

    def given(self, name: str) -> Sequence[Any]:
        """Return an argument that they were called with; nothing where there is none."""
        return next((kwargs[name] for kwargs in self.kwargs.values() if name in kwargs), ())


def other_texts(tokenizer: Any, drawn: Sequence[Ids], texts: Sequence[Any]) -> list[tuple[str, str]]:
    """Return pairs of what was drawn and what reward functions were given, where these differ."""
    other = []
    # Which of the special tokens a trainer keeps in the texts is its own affair.
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for ids, given in zip(drawn, texts):
        text = plain_text(given)
        if text is None:
            continue
        own, bare = decode(tokenizer, ids), text
        for token in special:
            bare = bare.replace(token, "")
        bare, kept = ("".join(each.split()) for each in (bare, own))  # decoders tidy blanks up in ways of their own
        if bare != kept and (given is text or not bare.endswith(kept)):  # a message may begin with the prompt's
            other.append((own, text))
    return other


def plain_text(completion: Any) -> str | None:
    """Return the text of a completion; None where it was parsed into more than text."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and len(completion) == 1 and set(completion[0]) <= {"role", "content"}:
        content = completion[0].get("content")
        return content if isinstance(content, str) else None
    return None


def decode(tokenizer: Any, ids: Ids) -> str:
    """Return the text of ids without special tokens, by the library below where there is one.

    The tokenizer's own `decode` may be overridden.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    own = tokenizer.decode if backend is None else backend.decode
    return str(own(list(ids), skip_special_tokens=True))


def tokenizer_of(trainer: Any) -> Any:
    """Return a trainer's tokenizer; of a processor for images, the one inside."""
    processing = trainer.processing_class
    return getattr(processing, "tokenizer", processing)


def pad_id(trainer: Any) -> int:
    """Return the token id of the padding; 0 where the tokenizer names none."""
    return getattr(tokenizer_of(trainer), "pad_token_id", None) or 0
