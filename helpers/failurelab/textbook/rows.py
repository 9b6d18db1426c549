"""What one optimizer step trains on: tokens that were drawn, rewards that were returned, and how a model reads them."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """A completion.

    Attributes:
        prompt: token ids that the model was given, without padding.
        completion: token ids that were drawn, the end among them, without padding.
        ended: whether the last of them ends a completion; else it was cut.
        rewards: what each reward function returned for it; None and NaN: nothing.
        group: number of the group, of the completions of one prompt.
        batch: number of the generation that it comes from; `scale_rewards="batch"` scales over these.
        micro: number of the micro-batch of this step that trains on it; None: a later or an earlier step does.
        padded: lengths of prompt and completion as generation padded them, prompts on the left.
        old_logps: log-probabilities (tokens,) of the completion, then of its padding, under the policy that drew it;
            None: under this one, so that every ratio is 1.
        old_rounded: the same in the trainer's own numbers, where these are narrower than float32.
        kl: of the completion, log(policy / reference) of the policy that drew it, over its tokens; where that is a part
            of the reward.
        kl_rounded: the same in the trainer's own numbers, where these are narrower than float32.
        rank: of the process that drew it and trains on it.
        here: whether that is this process, which computes it; the others' count in advantages and divisors.
        inputs: what else the model was given for the prompt, such as images, by name: of one dimension, a number for
            each token of the prompt; else its slices along the first one.
        given: places in the completion of tokens that an environment gave: they are read, and not trained on.
        engine_logps: log-probabilities (tokens,) of the completion by the engine that drew it, NaN where it told none;
            None: it told nothing, or the policy itself drew.
        ends_in_padding: whether it was cut behind a padding token that was drawn as a word.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    ended: bool
    rewards: tuple[float | None, ...] = ()
    group: int = 0
    batch: int = 0
    micro: int | None = 0
    padded: tuple[int, int] = (0, 0)
    old_logps: torch.Tensor | None = dataclasses.field(default=None, compare=False, repr=False)
    old_rounded: torch.Tensor | None = dataclasses.field(default=None, compare=False, repr=False)
    given: frozenset[int] = frozenset()
    engine_logps: torch.Tensor | None = dataclasses.field(default=None, compare=False, repr=False)
    ends_in_padding: bool = False
    kl: float = 0.0
    kl_rounded: float | None = None
    rank: int = 0
    here: bool = True
    inputs: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def length(self) -> int:
        """Return how many tokens are trained on."""
        return len(self.completion) - len(self.given)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How tokens are scored. The defaults are the definition; all else belongs to a suspect.

    Attributes:
        temperature: that logits are divided by.
        shift: a token is scored by the row of logits that many places after the right one.
        padded: prompts are padded on the left, completions on the right, as in generation.
        attend_padding: the padding is attended to as if it were text.
        from_prompt: completions are scored by the first rows of the padded prompt.
        tokens: which tokens are scored: `completion`, or `no first`, `no last`, `padding` (and the completion).
        mask_attends: only the tokens of the completion that are scored are attended to.
        pad: token id of the padding, which matters where it is attended to or scored.
    """

    temperature: float = 1.0
    shift: int = 0
    padded: bool = False
    attend_padding: bool = False
    from_prompt: bool = False
    tokens: str = "completion"
    mask_attends: bool = False
    pad: int = 0


@dataclasses.dataclass
class Layout:
    """A row as the model is given it."""

    ids: list[int]  # token ids
    attended: list[bool]  # whether each is attended to
    start: int  # place in `ids` of the completion's first token
    places: list[int]  # places in `ids` of the tokens that are scored
    sources: list[int]  # places of the logits that score them


def lay_out(row: Row, scoring: Scoring) -> Layout:
    """Return the row's layout."""
    pad = scoring.pad
    width, length = row.padded
    left = max(0, width - len(row.prompt)) if scoring.padded else 0
    right = max(0, length - len(row.completion)) if scoring.padded or scoring.tokens == "padding" else 0
    ids = [pad] * left + [*row.prompt, *row.completion] + [pad] * right
    attended = [scoring.attend_padding] * left + [True] * (len(ids) - left - right) + [scoring.attend_padding] * right
    start = left + len(row.prompt)
    end = start + len(row.completion)
    places = {
        "completion": list(range(start, end)),
        "no first": list(range(start + 1, end)),
        "no last": list(range(start, end - 1)),
        "padding": list(range(start, end + right)),
    }[scoring.tokens]
    if scoring.mask_attends:
        attended[start:] = [place in places for place in range(start, len(ids))]
    sources = [place - start for place in places] if scoring.from_prompt else [place - 1 for place in places]
    last = len(ids) - 1
    return Layout(ids, attended, start, places, [min(max(source + scoring.shift, 0), last) for source in sources])


def cut_at_end(completion: Sequence[int], ends: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Return the ids up to the first end, with it, and whether there is one."""
    for place, token in enumerate(completion):
        if token in ends:
            return tuple(completion[: place + 1]), True
    return tuple(completion), False


def group_in_order(prompts: Sequence[object], size: int) -> tuple[list[int], str]:
    """Return each completion's group: `size` completions, one after another, of one prompt; and what speaks against it.

    Args:
        prompts: of the completions, in their order.
        size: of a group.
    """
    groups = [place // size for place in range(len(prompts))]
    if any(prompt != prompts[place - place % size] for place, prompt in enumerate(prompts)):
        return groups, f"the completions of a prompt do not stand together in groups of {size}"
    return groups, f"{len(prompts)} completions are no groups of {size}" if len(prompts) % size else ""


def strip_padding(ids: Ids, pad: int) -> tuple[int, Ids]:
    """Return ids without padding at both ends, and how many stood before them."""
    start, end = 0, len(ids)
    while start < end and ids[start] == pad:
        start += 1
    while end > start and ids[end - 1] == pad:
        end -= 1
    return start, ids[start:end]
