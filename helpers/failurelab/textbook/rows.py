"""What one optimizer step trains on: the tokens that were drawn, and the rewards that were returned."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

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


def cut_at_end(completion: Sequence[int], ends: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return the ids up to the first end, with it, and whether there is one."""
    for place, token in enumerate(completion):
        if token in ends:
            return tuple(completion[: place + 1]), True
    return tuple(completion), False


def split_inputs(
    inputs: Mapping[str, torch.Tensor], ids: torch.Tensor, kept: torch.Tensor, image_token: int | None
) -> list[dict[str, torch.Tensor]] | None:
    """Return what belongs to each row of a batch, as `Row.inputs` has it; None where that is not known.

    Images stand one after another, and a row has as many as its image tokens are their share of all.

    Args:
        inputs: what a model was given beside its ids, by name.
        ids: (rows, length).
        kept: where there is a token, (rows, length).
        image_token: id that stands where an image is read; None: not known.
    """
    rows: list[dict[str, torch.Tensor]] = [{} for _ in range(len(ids))]
    tokens = {name for name, value in inputs.items() if value.shape == ids.shape}
    for name in tokens:
        for row, value, mask in zip(rows, inputs[name], kept):
            row[name] = value[mask]
    images = {name: value for name, value in inputs.items() if name not in tokens}
    if not images:
        return rows
    counts = ((ids == image_token) & kept).sum(1).tolist() if image_token is not None else [1] * len(ids)
    sizes = _image_sizes(images, counts)
    ends = [] if sizes is None else _ends_of_rows(sizes, counts)
    for name, value in images.items():
        if ends is None or sizes is None:
            return None
        places = [0, *itertools.accumulate(sizes)] if len(value) == sum(sizes) else list(range(len(sizes) + 1))
        if len(value) != places[-1]:
            return None
        for row, (start, end) in zip(rows, itertools.pairwise([0, *ends])):
            if start < end:
                row[name] = value[places[start] : places[end]]
    return rows


def _image_sizes(images: Mapping[str, torch.Tensor], counts: Sequence[int]) -> list[int] | None:
    """Return how much of the image tokens each image has, up to a factor; None where that is not known."""
    grid = images.get("image_grid_thw")
    if grid is not None:
        return grid.prod(-1).tolist()
    lengths = {len(value) for value in images.values()}
    if lengths == {len(counts)} and (all(counts) or any(value.ndim > 4 for value in images.values())):
        return [max(count, 1) for count in counts]  # one entry for each row
    return [1] * lengths.pop() if len(lengths) == 1 else None


def _ends_of_rows(sizes: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Return behind which image those of each row end; None where the tokens are no whole images."""
    ends, image, factor = [], 0, sum(sizes) / max(sum(counts), 1)
    if list(sizes) == [max(count, 1) for count in counts]:
        return list(range(1, len(sizes) + 1))
    for count in counts:
        left = count * factor
        while left > 0.5 and image < len(sizes):
            left, image = left - sizes[image], image + 1
        if abs(left) > 1e-3 * factor:
            return None
        ends.append(image)
    return ends if image == len(sizes) else None
