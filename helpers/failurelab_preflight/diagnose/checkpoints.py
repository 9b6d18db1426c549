"""Two checkpoints of one run: which share of the weights differs, tensor by tensor.

Two elements differ where their bytes differ. One tensor of each is in memory at a time, whatever the size of the files.
"""

import contextlib
import pathlib
from typing import Any

from failurelab.failures.predicates import Value


class CheckpointError(ValueError):
    """A file of tensors cannot be read."""


def compare(before: pathlib.Path, after: pathlib.Path) -> dict[str, Value]:
    """Return what differs between two files or folders of safetensors.

    Of a model with an adapter only the adapter's tensors count: what is frozen under it does not change.

    Returns:
        `tensors` and `tensors_changed` (counts), `tensors_share`, `elements_changed` (shares), `weights_dtype` (names),
        `adapter` (whether it is one).

    Raises:
        CheckpointError: a file is no safetensors file, or they have no tensor in common.
    """
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of an element's size
    found: list[tuple[str, int, int, str]] = []  # name, elements that differ, elements, dtype
    with contextlib.ExitStack() as stack:
        first, second = _open_tensors(before, stack), _open_tensors(after, stack)
        for name in (name for name in first if name in second):
            old, new = first[name].get_tensor(name), second[name].get_tensor(name)
            if old.shape == new.shape and old.dtype == new.dtype:
                bits = whole.get(new.element_size(), torch.uint8)
                changed = int((old.reshape(-1).view(bits) != new.reshape(-1).view(bits)).sum())
                found.append((name, changed, new.numel(), str(new.dtype).removeprefix("torch.")))
    if not found:
        raise CheckpointError(f"{before} and {after} have no tensor of one name, shape and dtype in common")
    of_adapter = [tensor for tensor in found if "lora_" in tensor[0]]
    found = of_adapter or found
    count = sum(changed > 0 for _, changed, _, _ in found)
    return {
        "tensors": len(found),
        "tensors_changed": count,
        "tensors_share": count / len(found),
        "elements_changed": sum(changed for _, changed, _, _ in found) / max(1, sum(size for _, _, size, _ in found)),
        "weights_dtype": ", ".join(sorted({dtype for _, _, _, dtype in found})),
        "adapter": bool(of_adapter),
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
