"""Two checkpoints of one run: which share of the weights differs, tensor by tensor.

Two elements differ where their bytes differ. One tensor of each is in memory at a time, whatever the size of the files.
"""

import contextlib
import itertools
import pathlib
from typing import Any


class CheckpointError(ValueError):
    """A file of tensors cannot be read."""


def compare(before: pathlib.Path, after: pathlib.Path) -> dict[str, Any]:
    """Return the share of elements that differ between two files or folders of safetensors.

    Raises:
        CheckpointError: a file is no safetensors file, or they have no tensor in common.
    """
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of an element's size
    changed: list[int] = []  # elements of each tensor that differ
    sizes: list[int] = []
    lora: list[bool] = []  # whether it is an adapter's
    dtypes: set[str] = set()
    finite = True
    with contextlib.ExitStack() as stack:
        first, second = _open_tensors(before, stack), _open_tensors(after, stack)
        for name in (name for name in first if name in second):
            old, new = first[name].get_tensor(name), second[name].get_tensor(name)
            if old.shape != new.shape or old.dtype != new.dtype:
                continue
            bits = whole.get(new.element_size(), torch.uint8)
            changed.append(int((old.reshape(-1).view(bits) != new.reshape(-1).view(bits)).sum()))
            sizes.append(new.numel())
            lora.append("lora_" in name)
            dtypes.add(str(new.dtype).removeprefix("torch."))
            if new.dtype in (torch.float32, torch.bfloat16, torch.float16):
                finite = finite and bool(new.isfinite().all())
    if not sizes:
        raise CheckpointError(f"{before} and {after} have no tensor of one name, shape and dtype in common")
    of_adapter = sum(itertools.compress(sizes, lora))
    return {
        "tensors": len(sizes),
        "tensors_changed": sum(map(bool, changed)),
        "elements_changed": sum(changed) / max(1, sum(sizes)),
        "adapter_elements_changed": sum(itertools.compress(changed, lora)) / of_adapter if of_adapter else None,
        "dtypes": sorted(dtypes),
        "finite": finite,
    }


def weights_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of weights in a folder."""
    return sorted([*folder.glob("model*.safetensors"), *folder.glob("adapter_model*.safetensors")])


def _open_tensors(path: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return each tensor's name and the open file that it lies in."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Any] = {}
    for file in weights_in(path) if path.is_dir() else [path]:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors ({error})") from error
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors
