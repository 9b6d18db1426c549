"""What one optimizer step trains on: the tokens that were drawn, and the rewards that were returned."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch


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
        inputs: what else the model was given for the prompt, such as images, by name: of one dimension, a number for
            each token of the prompt; else its slices along the first one.
        given: places in the completion of tokens that an environment gave: they are read, and not trained on.
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
    ends_in_padding: bool = False
    inputs: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def length(self) -> int:
        """Return how many tokens are trained on."""
        return len(self.completion) - len(self.given)


def rows_of(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    rewards: Sequence[Sequence[float | None]],
    groups: Sequence[int],
    ends: Sequence[int],
) -> list[Row]:
    """Return the rows of a step that trains on all of one generation, in one micro-batch.

    Args:
        prompts: token ids of each row's prompt, without padding.
        completions: token ids of each row; what follows the first end is cut off.
        rewards: for each row, what each reward function returned.
        groups: for each row, the number of its group.
        ends: token ids that end a completion.
    """
    rows = []
    for prompt, completion, given, group in zip(prompts, completions, rewards, groups, strict=True):
        ids, ended = cut_at_end(completion, ends)
        rows.append(Row(tuple(prompt), ids, ended, tuple(given), group))
    return rows


def cut_at_end(completion: Sequence[int], ends: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Return the ids up to the first end, with it, and whether there is one."""
    for place, token in enumerate(completion):
        if token in ends:
            return tuple(completion[: place + 1]), True
    return tuple(completion), False
