"""Which images belong to which row of a batch, and what else a model is given beside token ids.

A processor gives the images of a whole batch, one after another: an entry for each row, for each image, or for each
patch. Who scores rows one by one needs those of the row: `rollouts`, and the step against the textbook.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch


def split_inputs(
    inputs: Mapping[str, torch.Tensor], ids: torch.Tensor, kept: torch.Tensor, image_token: int | None
) -> list[dict[str, torch.Tensor]] | None:
    """Return what belongs to each row of a batch, by name; None where that is not known.

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
    if not images or len(rows) == 1:
        rows[0] |= images
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
