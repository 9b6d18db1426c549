"""Two checkpoints of one run: which share of the weights differs, tensor by tensor.

A safetensors file is eight bytes with the length of a JSON header, the header, and the tensors' bytes: it is read by
the standard library alone, in blocks, so that 8 GB need no memory. Two elements differ where their bytes differ.
"""

import json
import pathlib
import struct
from typing import Any

_WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
          "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_BLOCK = 1 << 22  # bytes
_AT_ONCE = 1 << 26  # bytes of a tensor that are compared at most, evenly over its length


class CheckpointError(ValueError):
    """A file of tensors cannot be read."""


def compare(before: pathlib.Path, after: pathlib.Path) -> dict[str, Any]:
    """Return the share of elements that differ between two files or folders of safetensors.

    Raises:
        CheckpointError: a file is no safetensors file, or they have no tensor in common.
    """
    first, second = _tensors(before), _tensors(after)
    common = [name for name in first if name in second and first[name][1:3] == second[name][1:3]]
    if not common:
        raise CheckpointError(f"{before} and {after} have no tensor of one name, shape and dtype in common")
    changed: dict[str, float] = {}
    total = different = adapter = adapter_different = 0
    finite = True
    for name in common:
        path, dtype, _, begin, end = first[name]
        other, _, _, other_begin, _ = second[name]
        width = _WIDTH.get(dtype, 1)
        seen, count, good = _differing(path, begin, other, other_begin, end - begin, width, dtype)
        finite &= good
        changed[name] = count / seen if seen else 0.0
        total, different = total + seen, different + count
        if "lora_" in name:
            adapter, adapter_different = adapter + seen, adapter_different + count
    return {
        "tensors": len(common),
        "tensors_changed": sum(share > 0 for share in changed.values()),
        "elements_changed": different / total if total else 0.0,
        "adapter_elements_changed": adapter_different / adapter if adapter else None,
        "dtypes": sorted({_NAMES.get(first[name][1], first[name][1]) for name in common}),
        "finite": finite,
    }


def _tensors(path: pathlib.Path) -> dict[str, tuple]:
    if path.is_dir():
        files = sorted([*path.glob("model*.safetensors"), *path.glob("adapter_model*.safetensors")])
    else:
        files = [path]
    tensors = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > 1 << 28:
                    raise CheckpointError(f"{file} is no safetensors file")
                header = json.loads(stream.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    shape = tuple(entry["shape"])
                    tensors[name] = (file, entry["dtype"], shape, 8 + length + begin, 8 + length + end)
        except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors ({type(error).__name__})") from error
    return tensors


def _differing(path, begin, other, other_begin, size, width, dtype) -> tuple[int, int, bool]:
    """Return how many elements were compared, how many differ, and whether those after are finite."""
    seen = count = 0
    finite = True
    stride = max(1, -(-size // _AT_ONCE))  # every which block is looked at, in a very large tensor
    with path.open("rb") as one, other.open("rb") as two:
        for number, at in enumerate(range(0, size, _BLOCK)):
            if number % stride:
                continue
            length = min(_BLOCK, size - at)
            one.seek(begin + at)
            two.seek(other_begin + at)
            left, right = one.read(length), two.read(length)
            if len(left) != length or len(right) != length:
                raise CheckpointError(f"{other if len(right) != length else path} ends in the middle of a tensor")
            seen += length // width
            if left != right:
                count += _unequal(left, right, width)
            finite &= _finite(right, dtype)
    return seen, count, finite


def _unequal(left: bytes, right: bytes, width: int) -> int:
    """Count the elements whose bytes differ: XOR as one number, its bytes folded onto each element's first."""
    mixed = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    parts = mixed.to_bytes(len(left), "little")
    if width == 1:
        return len(parts) - parts.count(0)
    folded = int.from_bytes(parts[0::width], "little")
    for offset in range(1, width):
        folded |= int.from_bytes(parts[offset::width], "little")
    columns = folded.to_bytes(len(parts) // width, "little")
    return len(columns) - columns.count(0)


def _finite(data: bytes, dtype: str) -> bool:
    """Whether the first element that is no number is absent: all exponent bits set. Looked at for float32, bfloat16."""
    if dtype not in ("F32", "BF16"):
        return True
    width = _WIDTH[dtype]
    high, low = data[width - 1 :: width], data[width - 2 :: width]
    for sign in (0x7F, 0xFF):
        at = high.find(sign)
        while at >= 0:
            if low[at] & 0x80:
                return False
            at = high.find(sign, at + 1)
    return True
