"""Compute what the known gradients expect, into the files of cases: `python -m tools.gradient_cases [--check]`.

A case is a line of `helpers/failurelab/known_gradients/cases/*.json`, written by hand: its batch, options and cut. What
it expects is made by `definition` and checked by `plain_loss`, by finite differences. With `--check` nothing is
written: it says whether the files are what they would be.
"""

import json
import pathlib
import sys
from typing import Any

import torch
from tools import plain_loss
from torch import Tensor

from failurelab.known_gradients import cases, definition

TOLERANCE = 1e-7  # of central differences in float64


def expect(case: cases.LossCase) -> dict[str, Any]:
    """Return what a case expects, made twice.

    Raises:
        ValueError: the two ways do not agree, or what a case of wiring changes moves the gradient against its kind.
    """
    if case.kind == "advantages":
        worth = definition.advantages(case.batch, case.options)
        _agree(case.id, worth, plain_loss.advantages_of(case.batch, case.options))
        return {"advantages": _rounded(worth)}
    value, gradient = definition.gradient(case.batch, case.options)
    number, quotients = plain_loss.difference_quotients(case.batch, case.options)
    _agree(case.id, torch.tensor(value), number)
    _agree(case.id, gradient, quotients)
    if case.kind in ("moves", "stays"):
        after = case.changed()
        moved = definition.gradient(after.batch, after.options)[1]
        share = ((moved - gradient).norm() / gradient.norm()).item()
        if (share > 0) != (case.kind == "moves"):
            raise ValueError(f"{case.id}: the gradient moves by {share}")
        return {"moves": round(share, 6)}
    return {"loss": _rounded(torch.tensor(value, dtype=torch.float64)), "gradient": _rounded(gradient)}


def _agree(name: str, first: Tensor, second: Any) -> None:
    apart = (first - torch.tensor(second, dtype=torch.float64)).norm() / first.norm().clamp(min=1e-3)
    if not apart < TOLERANCE:
        raise ValueError(f"{name}: two ways to the expected values are {apart.item():.1e} apart")


def _rounded(values: Tensor) -> Any:
    flat = [float(f"{value:.10g}") + 0.0 for value in values.flatten().tolist()]
    return torch.tensor(flat, dtype=torch.float64).view(values.shape).tolist()


def make_text(path: pathlib.Path) -> str:
    """Return a file's text with what its cases expect: a line for each batch and each case.

    Raises:
        ValueError: as `expect`.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    batches = {
        name: {key: cases.tensor(values) for key, values in batch.items()} for name, batch in content["batches"].items()
    }
    for row in content["cases"]:
        row["expected"] = expect(cases.read_case(path.stem, row, batches))
    rows = [f"  {json.dumps(name)}: {json.dumps(batch)}" for name, batch in content["batches"].items()]
    return "\n".join(
        [
            f'{{"about": {json.dumps(content["about"])},\n "batches": {{',
            ",\n".join(rows),
            ' }, "cases": [',
            ",\n".join(f"  {json.dumps(case)}" for case in content["cases"]),
            f' ], "sha256": "{cases.checksum(content)}"}}\n',
        ]
    )


def main(words: list[str]) -> int:
    """Write the files, or check them; return the exit status."""
    stale = 0
    for path in sorted(cases.FOLDER.glob("*.json")):
        text = make_text(path)
        if path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{path.name}: {'is not what would be made' if '--check' in words else 'written'}")
        if "--check" not in words:
            path.write_text(text, encoding="utf-8")
    return int("--check" in words and stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
