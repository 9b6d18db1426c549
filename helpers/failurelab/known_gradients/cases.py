"""The cases: files of JSON, one a group, which other projects may copy.

A file has `about`, `batches` (inputs by name), `cases`, and `sha256`, of everything else. A case has an `id`, what it
is `about`, `flags`, the name of its `batch`, its `cut` (rows of each rank's micro-batches), `options` (`LossOptions`,
where they are not the default), and what is `expected`. Its kind tells what is asked:

- `gradient`: the loss and its gradient by each log-probability, (R, T);
- `logits`: the same by each logit, (R, T, V);
- `advantages`: one for each row;
- `moves` and `stays`: it has `change` (of options, or of the batch's inputs); with it, the gradient is another one, or
  the same one. Nothing else is expected, so they hold for any objective.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from failurelab.errors import FailureLabError
from failurelab.known_gradients.definition import Batch, LossOptions, join

FOLDER = pathlib.Path(__file__).parent / "cases"
KINDS = ("gradient", "logits", "advantages", "moves", "stays")
_DEFAULTS = dataclasses.asdict(LossOptions())
# LossOptions that have no effect while another is off.
_HANGS_ON = {"engine_low": "engine", "engine_high": "engine"} | dict.fromkeys(
    ("kl", "kl_gradient", "kl_times_ratio"), "beta"
)
_BY_ROW = ("old", "reference", "engine", "mask", "rewards", "group", "advantages")


class EditedCases(FailureLabError):
    """A file of cases is not what its checksum says."""


class NotOffered(Exception):
    """An implementation has no such option; the message names it."""


class Asked:
    """LossOptions as an adapter reads them; it notes which were read, for one that is not read has no effect."""

    def __init__(self, options: LossOptions) -> None:
        self._options, self._read = options, set[str]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._options, name)
        self._read.add(name)
        return value

    def choose(self, name: str, offered: dict[Any, Any]) -> Any:
        """Return what an implementation calls the value of this option; NotOffered where it has no such value."""
        value = getattr(self, name)
        if value not in offered:
            raise NotOffered(f"no {name}={value!r}")
        return offered[value]

    def only(self, **offered: Any) -> None:
        """Read options of which an implementation has one value, or those of a tuple; else NotOffered."""
        for name, values in offered.items():
            self.choose(name, dict.fromkeys(values if isinstance(values, tuple) else (values,)))

    def unread(self) -> list[str]:
        """Return the options that are not the default and that nobody has read."""
        given = dataclasses.asdict(self._options)
        off = {name for name, other in _HANGS_ON.items() if not given[other]}
        lost = [name for name in given if given[name] != _DEFAULTS[name] and name not in self._read | off]
        return [f"{name}={given[name]!r}" for name in lost]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Part(Batch):
    """The rows of one micro-batch, for an adapter: tensors as in `Batch`, and what its trainer knows of the step."""

    rows: list[int]  # which of the batch's
    step_tokens: Tensor  # of all ranks and micro-batches
    turn_tokens: Tensor  # of this micro-batch, over all ranks
    rank_tokens: Tensor  # of all micro-batches of this rank
    step_rows: int
    ranks: int
    micros: int  # micro-batches of each rank


@dataclasses.dataclass(frozen=True)
class LossCase:
    """One case; `options` is what it asks for, `asked` the same for an adapter."""

    id: str
    group: str
    kind: str
    about: str
    flags: tuple[str, ...]
    options: LossOptions
    batch: Batch
    expected: dict[str, Any]
    asked: Asked
    change: dict[str, Any] = dataclasses.field(default_factory=dict)

    def accumulate(self, loss: Any, average: bool = True) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of a step: `loss(part)` of each micro-batch, added up.

        Args:
            loss: of a `Part`, as the library's trainer calls backward with it.
            average: whether gradients are averaged over the ranks, as DDP does, or added up.
        """
        leaf = self.batch.logps.clone().requires_grad_()
        total = torch.stack([loss(part).double() for part in self.parts(leaf)]).sum()
        total = total / (len(self.batch.cut) if average else 1)
        if not total.requires_grad:
            return total, torch.full_like(leaf, torch.nan)  # a loss without a gradient
        total.backward()
        return total.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def parts(self, logps: Tensor) -> Iterator[Part]:
        """Yield the micro-batches of all ranks."""
        batch = self.batch
        for rank in batch.cut:
            for place, rows in enumerate(rank):
                turn = join(other[place] for other in batch.cut if place < len(other))
                tokens = {"step_tokens": batch.mask.sum(), "turn_tokens": batch.mask[turn].sum()}
                sizes = {"step_rows": len(batch.mask), "ranks": len(batch.cut), "micros": len(rank)}
                tensors: Any = {name: getattr(batch, name)[rows] for name in _BY_ROW} | tokens | sizes
                rank_tokens = batch.mask[join(rank)].sum()
                yield Part(logps=logps[rows], cut=batch.cut, rows=rows, rank_tokens=rank_tokens, **tensors)

    def changed(self) -> "LossCase":
        """Return the other case of a pair."""
        options = {name: value for name, value in self.change.items() if name in _DEFAULTS}
        inputs: Any = {name: value for name, value in self.change.items() if name not in _DEFAULTS}
        inputs = {name: value if name == "cut" else tensor(value) for name, value in inputs.items()}
        after, batch = dataclasses.replace(self.options, **options), dataclasses.replace(self.batch, **inputs)
        return dataclasses.replace(self, options=after, asked=Asked(after), batch=batch)


def tensor(values: Any) -> Tensor:
    """Return numbers as a tensor: whole ones as such, the others in float64; null is NaN."""
    flat = json.dumps(values)
    if "." in flat or "null" in flat:
        return torch.tensor(json.loads(flat.replace("null", "NaN")), dtype=torch.float64)
    return torch.tensor(values)


def checksum(content: dict[str, Any]) -> str:
    """Return the checksum of a file's content."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_cases(folder: pathlib.Path = FOLDER) -> list[LossCase]:
    """Return all cases, by file and in their order; EditedCases where a file is not what its checksum says."""
    return [case for path in sorted(folder.glob("*.json")) for case in read_file(path)]


def read_file(path: pathlib.Path) -> list[LossCase]:
    """Return the cases of one file; EditedCases where it is not what its checksum says."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        said, found = content["sha256"], checksum(content)
    except (ValueError, KeyError, TypeError) as error:
        raise EditedCases(f"{path} is no file of cases ({error!r}). Next: restore it, or copy it again") from None
    if said != found:
        raise EditedCases(
            f"{path.name} was edited: it says sha256 {said[:12]}, and it has {found[:12]}; what it expects is known no "
            "more. Next: restore it, or copy it again"
        )
    batches = {name: {key: tensor(each) for key, each in batch.items()} for name, batch in content["batches"].items()}
    return [read_case(path.stem, case, batches) for case in content["cases"]]


def read_case(group: str, case: dict[str, Any], batches: dict[str, dict[str, Tensor]]) -> LossCase:
    """Return one case of a file."""
    options = LossOptions(**case.get("options", {}))
    batch = Batch(**batches[case["batch"]], cut=case["cut"])
    words = (case["id"], group, case["kind"], case["about"], tuple(case["flags"]))
    return LossCase(*words, options, batch, case.get("expected", {}), Asked(options), case.get("change", {}))
