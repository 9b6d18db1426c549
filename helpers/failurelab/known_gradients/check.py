"""Hold an implementation against the cases, each by what the implementation declares.

An adapter is a module with `loss(case) -> (loss, gradient)`, and, where it has them, `loss_of_logits(case)` (the
gradient by logits), `advantages(case)`, `DECLARES` and `prepare(source) -> version`. See `docs/losses.md`.
"""

import collections
import dataclasses
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from failurelab.errors import FailureLabError
from failurelab.known_gradients import cases, names
from failurelab.known_gradients.cases import Asked, LossCase, NotOffered
from failurelab.known_gradients.definition import LossOptions

AGREES, OTHER, DIFFERS, NOT_RUN, BROKEN = "agrees", "another objective", "differs", "NOT RUN", "BROKEN"
_FUNCTIONS = {"logits": "loss_of_logits", "advantages": "advantages"}


class NoAdapter(FailureLabError):
    """There is no adapter of this name, or its file cannot be imported."""

    exit_status = 2


@dataclasses.dataclass(frozen=True)
class Declared:
    """Another objective that an implementation documents."""

    when: dict[str, Any]  # options that a case asks for; a function is asked about the value
    change: dict[str, Any]  # what the implementation documents instead
    source: str  # where it does

    def applies(self, options: LossOptions) -> bool:
        """Whether a case asks for it."""
        values = [(getattr(options, name), want) for name, want in self.when.items()]
        return all(want(value) if callable(want) else want == value for value, want in values)


@dataclasses.dataclass
class Result:
    """What became of one case; cosine and size are to what the case expects."""

    id: str
    group: str
    status: str
    line: str = ""
    cosine: float | None = None
    size: float | None = None
    fits: list[str] = dataclasses.field(default_factory=list)
    name: str = ""


@dataclasses.dataclass(frozen=True)
class LossReport:
    """What became of all cases."""

    adapter: str
    version: str
    results: list[Result]

    def count(self, status: str) -> int:
        """Return how many cases have this status."""
        return sum(result.status == status for result in self.results)

    def names(self) -> list[str]:
        """Return the names of the differences, the most frequent first."""
        found = collections.Counter(result.name for result in self.results if result.status == DIFFERS)
        return [name for name, _ in found.most_common()]

    def text(self, everything: bool = False) -> str:
        """Return it as lines."""
        counts = [(status, self.count(status)) for status in (AGREES, OTHER, DIFFERS, BROKEN, NOT_RUN)]
        summary = ", ".join(f"{count} {status}" for status, count in counts if count)
        lines = [f"{f'{self.adapter} {self.version}'.strip()}: {len(self.results)} cases: {summary}"]
        for result in self.results:
            if result.status not in (AGREES, NOT_RUN) or everything:
                lines.append(f"{result.status:18s} {result.id:38s} {result.line}".rstrip())
        reasons = [result.line.split("=")[0].split(",")[0] for result in self.results if result.status == NOT_RUN]
        if reasons and not everything:
            said = "; ".join(f"{reason} ({reasons.count(reason)})" for reason in dict.fromkeys(reasons))
            lines.append(f"{NOT_RUN:18s} {said}; --all has each")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"adapter": self.adapter, "version": self.version, "cases": list(map(dataclasses.asdict, self.results))}


def find_adapter(name: str) -> Any:
    """Return an adapter: of this package, a file of Python, or a module; NoAdapter where there is none."""
    own = {path.stem for path in (pathlib.Path(__file__).parent / "adapters").glob("[a-z]*.py")}
    shared, place = name.replace("-", "_"), pathlib.Path(name)
    try:
        if place.suffix == ".py" and place.is_file():
            sys.path.insert(0, str(place.resolve().parent))  # as Python does for a script
            spec: Any = importlib.util.spec_from_file_location("adapter", place)
            module = sys.modules["adapter"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            vars(module).setdefault("NAME", place.stem)
            return module
        if place.suffix != ".py":
            return importlib.import_module(f"failurelab.known_gradients.adapters.{shared}" if shared in own else name)
    except Exception as error:  # an adapter is foreign code
        if not isinstance(error, ModuleNotFoundError) or not name.startswith(str(error.name)):
            raise NoAdapter(f"{name} cannot be imported: {_one_line(error)}. Next: mend that, or install it") from error
    raise NoAdapter(f"there is no adapter {name}. Next: one of {', '.join(sorted(own))}, or a file of your own")


def check_adapter(adapter: Any, source: str | None = None, chosen: Iterable[LossCase] | None = None) -> LossReport:
    """Run cases, or all of them, through an adapter: a module, or any object with `loss`.

    `source` is a folder with the library's code, where it is not installed.
    """
    name = getattr(adapter, "NAME", getattr(adapter, "__name__", type(adapter).__name__)).rpartition(".")[2]
    given = list(cases.read_cases() if chosen is None else chosen)
    version = ""
    if hasattr(adapter, "prepare"):
        try:
            version = adapter.prepare(source)
        except Exception as error:  # whatever a library's import raises is the reason
            reason = f"cannot be imported: {_one_line(error)}"
            return LossReport(name, "", [Result(case.id, case.group, NOT_RUN, reason) for case in given])
    results = [check_case(adapter, case) for case in given]
    settled = names.settle(
        {each.id: each.fits for each in results if each.status == DIFFERS and each.cosine is not None}
    )
    for result in results:
        if result.id in settled:
            result.name = settled[result.id]
            apart = "no gradient is due" if result.size is None else f"size {result.size:.5f}"
            result.line = f"{result.name}: cosine {result.cosine:.6f}, {apart}"
    return LossReport(name, version, results)


def check_case(adapter: Any, case: LossCase) -> Result:
    """Run one case; a difference has all names that fit."""
    result = Result(case.id, case.group, NOT_RUN)
    asked = _FUNCTIONS.get(case.kind, "loss")
    try:
        if (function := getattr(adapter, asked, None)) is None:
            raise NotOffered(f"the adapter has no {asked}()")
        found = _ask(function, case)
        after = _ask(function, case.changed()) if case.kind in ("moves", "stays") else None
    except (NotOffered, NotImplementedError) as reason:
        result.line = str(reason) or "NotImplementedError"
        return result
    except Exception as error:  # an adapter is foreign code
        result.status, result.line = BROKEN, _one_line(error)
        return result
    wanted = names.expected(case, case.options)
    answers = [found] if after is None else [found, after]
    if bad := [said for each in answers if (said := names.is_bad(each, wanted))]:
        result.status, result.line = BROKEN, bad[0]
        return result
    tensors = [each.detach().double().cpu() for each in answers]
    if after is not None:
        return _judge_pair(result, case, *tensors)
    declared = [each for each in getattr(adapter, "DECLARES", ()) if each.applies(case.options)]
    return _judge(result, case, tensors[0], wanted, declared)


def _ask(function: Callable[..., Any], case: LossCase) -> Any:
    case = dataclasses.replace(case, asked=Asked(case.options))
    value = function(case)
    if unread := case.asked.unread():
        raise NotOffered(f"no {', '.join(unread)}")
    return value if case.kind == "advantages" else value[1]


def _judge_pair(result: Result, case: LossCase, found: Tensor, after: Tensor) -> Result:
    moved = names.apart(after, found)
    share = moved / case.expected["moves"] if case.kind == "moves" else moved
    right = share > 1e-3 if case.kind == "moves" else share < names.TOLERANCE
    result.status = AGREES if right else DIFFERS
    if not right:
        stays = "padding trained on" if "padding" in case.id else "the order of micro-batches counts"
        result.name = f"{case.id.rpartition('/')[2]} has no effect" if case.kind == "moves" else stays
        result.line = f"{result.name}; the gradient moves by {100 * moved:.2g} %"
    return result


def _judge(result: Result, case: LossCase, found: Tensor, wanted: Tensor, declared: list[Declared]) -> Result:
    result.cosine, result.size = names.compare(found, wanted)
    own = case.options
    for each in declared:
        own = dataclasses.replace(own, **each.change)
    aim, tolerance = names.expected(case, own), names.tolerance_of(case)
    if names.apart(found, aim) < tolerance or (aim.norm() == 0 and found.norm() < 1e-9):
        if names.apart(aim, wanted) < tolerance:
            result.status = AGREES
            return result
        matter = [each for each in declared if _matters(each, case, wanted, tolerance)] or declared
        result.status = OTHER
        result.name = ", ".join(dict.fromkeys(name for each in matter for name in names.call(each.change)))
        sources = "; ".join(each.source for each in matter)
        result.line = f"{result.name}: cosine {result.cosine:.6f}, size {result.size:.5f} (declared: {sources})"
        return result
    result.status = DIFFERS
    if aim.norm() == 0:
        result.size = None
    result.fits = names.find_names(found, case, own)
    if declared and names.apart(found, wanted) < tolerance:
        result.fits = [f"not what it declares ({declared[-1].source})"]
    return result


def _matters(declared: Declared, case: LossCase, wanted: Tensor, tolerance: float) -> bool:
    alone = dataclasses.replace(case.options, **declared.change)
    return names.apart(names.expected(case, alone), wanted) > tolerance


def _one_line(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}"


def main(words: list[str] | None = None) -> int:
    """Run the command; return the exit status: 0, 1 if a case differs or breaks, 3 if nothing ran."""
    import argparse
    import json

    parser = argparse.ArgumentParser("failurelab gradients", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", help="an adapter of failurelab, or a file of Python with a function loss(case)")
    parser.add_argument("--source", help="a folder with the library's code, where it is not installed")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose id has this text")
    parser.add_argument("--all", action="store_true", help="print every case")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - prints it")
    options = parser.parse_args(words)
    if options.source and not pathlib.Path(options.source).is_dir():
        raise NoAdapter(f"{options.source} is no folder. Next: give the one that has the library's package in it")
    torch.manual_seed(0)
    chosen = [case for case in cases.read_cases() if options.only in case.id]
    report = check_adapter(find_adapter(options.name), options.source, chosen)
    content = json.dumps(report.to_json(), indent=1)
    if options.json == "-":
        print(content)
    else:
        if options.json:
            pathlib.Path(options.json).write_text(content + "\n", encoding="utf-8")
        print(report.text(options.all))
    if report.count(NOT_RUN) == len(report.results):
        return 3
    return int(report.count(DIFFERS) + report.count(BROKEN) > 0)
