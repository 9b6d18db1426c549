"""Other libraries' losses, each called as its own trainer calls it: a module for each, and how it is imported.

Nothing of a library is imported before its adapter is asked for, and nothing of its code stands here. Each is imported
without a GPU; packages that it names and this environment lacks are stood in for (`Library`).
"""

import ast
import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import math
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from failurelab.known_gradients.cases import LossCase, NotOffered, Part
from failurelab.known_gradients.check import Declared

__all__ = [
    "Answer", "Config", "Declared", "Library", "LossCase", "NotOffered", "Part", "declare_cispo", "kl_by",
    "options_as_trl", "outcome_advantages", "spread",
]  # fmt: skip
Answer = tuple[Tensor, Tensor]  # the loss, and its gradient


class _Anything(type):
    """A name of a package that is not there: it may be called, a decorator, a base class, a type with parameters."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __call__(cls, *values: Any, **named: Any) -> Any:
        is_decorated = len(values) == 1 and not named and (callable(values[0]) and not isinstance(values[0], _Anything))
        return values[0] if is_decorated else Anything

    def __getitem__(cls, item: Any) -> Any:
        return Anything

    __or__ = __ror__ = __getitem__

    def __iter__(cls) -> Any:
        return iter(())

    def __bool__(cls) -> bool:
        return False


class Anything(metaclass=_Anything):
    """Any name of a package that is not there."""


class _StandIn(types.ModuleType):
    __getattr__ = _Anything.__getattr__


@dataclasses.dataclass(frozen=True)
class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    packages: Sequence[str]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        package = next((each for each in self.packages if f"{name}.".startswith(f"{each}.")), None)
        if package is None or ("." not in package and importlib.machinery.PathFinder.find_spec(package)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__dict__["__all__"] = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Library:
    """A library's modules, by their last names, and the functions that are cut out of its files: attributes of this.

    Args:
        package: whose version is told.
        modules: what is imported.
        missing: packages that are stood in for, with all below them; not where they are installed, unless the name is
            that of a module of the library.
        bare: whether the `__init__` of the modules' packages is not run, for it imports what a loss has no need of.
        below: the folder of a checkout that has the packages.
        cut: of files that cannot be imported, which functions and classes are cut out, without their decorators.
        given: names that this code refers to.
        old: of a release, whether its loss is called in another way; and in which.
    """

    def __init__(
        self, package: str, *modules: str, missing: Sequence[str] = (), bare: bool = True, below: str = "",
        cut: Mapping[str, Sequence[str]] | None = None, given: Mapping[str, Any] | None = None,
        old: tuple[Callable[["Library"], bool], str] = (lambda library: False, ""),
    ) -> None:  # fmt: skip
        self.package, self.modules, self.missing, self.bare, self.below = package, modules, missing, bare, below
        self.cut, self.old, self.names = cut or {}, old, dict[str, Any](given or {})

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("names", {}):
            raise AttributeError(name)
        return self.names[name]

    def prepare(self, source: str | None) -> str:
        """Import it from a folder, or as it is installed; return its version, or the commit of a checkout."""
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # functions run as they are written, and are not compiled
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.config.disable = True
        if source:
            sys.path.insert(0, str(pathlib.Path(source, self.below).resolve()))
        sys.meta_path.insert(0, _Finder(self.missing))
        parts = [module.split(".") for module in self.modules if self.bare]
        for name in sorted({".".join(each[:depth]) for each in parts for depth in range(1, len(each))}):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [self._find(name.replace(".", "/"), name, pathlib.Path.is_dir)]
        for module in self.modules:
            self.names[module.rpartition(".")[2]] = importlib.import_module(module)
        for path, wanted in self.cut.items():
            self._cut_out(path, wanted)
        if self.old[0](self):
            raise ImportError(self.old[1])
        for distribution in importlib.metadata.distributions(name=self.package, path=[source] if source else sys.path):
            return str(distribution.version)
        marked = pathlib.Path(source or ".") / "COMMIT"
        if source and marked.is_file():
            return marked.read_text(encoding="utf-8").strip()[:7]
        asked = ["git", "-C", source or ".", "log", "-1", "--format=%h"]
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "of unknown version"

    def _find(self, path: str, name: str, is_there: Callable[[pathlib.Path], bool]) -> str:
        place = next((place for each in sys.path if is_there(place := pathlib.Path(each, path))), None)
        if place is None:
            raise ModuleNotFoundError(f"{name} is not installed, and not in the folder that was given", name=name)
        return str(place)

    def _cut_out(self, path: str, wanted: Sequence[str]) -> None:
        file = self._find(path, path, pathlib.Path.is_file)
        space = {"torch": torch, "math": math, "enum": enum, "Any": Any} | self.names
        for node in ast.parse(pathlib.Path(file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted:
                node.decorator_list = []
                exec(compile(ast.Module([node], []), file, "exec"), space)
        if lost := [name for name in wanted if name not in space]:
            raise ImportError(f"{path} has no {', '.join(lost)}")
        self.names |= {name: space[name] for name in wanted}


class Config(types.SimpleNamespace):
    """A library's options; what is not given is off."""

    def __getattr__(self, name: str) -> None:
        return None

    def get(self, name: str, default: Any = None) -> Any:
        """Return one by its name."""
        return vars(self).get(name, default)


def spread(advantages: Tensor, like: Tensor) -> Tensor:
    """Return advantages of rows for each token: (R,), (R, T) -> (R, T)."""
    return advantages[:, None].expand_as(like)


def kl_by(asked: Any, kinds: Mapping[Any, Any], ways: str | tuple[str, ...] = "pathwise") -> Any:
    """Return what an implementation calls the estimator of the KL term; None where a case has no such term."""
    kind = asked.choose("kl", kinds) if asked.beta else None
    if asked.beta:
        asked.only(kl_gradient=ways)
    return kind


def outcome_advantages(estimate: Callable[..., Any], option: str, case: LossCase) -> Tensor:
    """Return what an estimator of verl's kind gives, which takes each reward at its row's last token."""
    mask, groups = case.batch.mask, case.batch.group.numpy()
    scaled = {option: case.asked.choose("scale", {"group": True, "none": False})}
    scores = mask.new_zeros(mask.shape)
    scores[range(len(mask)), mask.sum(1).long() - 1] = case.batch.rewards
    return torch.as_tensor((estimate(scores, mask, groups, **scaled)[0] * mask).sum(1) / mask.sum(1))


# trl's kinds of loss, which Liger's and unsloth's follow: by objective and how tokens become one number.
TRL_TYPES = {
    ("clip", "sequence_mean"): "grpo", ("clip", "micro_token_mean"): "bnpo", ("clip", "constant"): "dr_grpo",
    ("clip", "token_mean"): "dapo", ("clip", "sequence_sum"): "luspo", ("cispo", "token_mean"): "cispo",
    ("sapo", "sequence_mean"): "sapo",
}  # fmt: skip


def options_as_trl(case: LossCase) -> dict[str, Any]:
    """Return what a case asks for, by the names of trl's arguments; NotOffered where it has none."""
    asked = case.asked
    if asked.reduce != "token_mean" and len({len(rows) for rank in case.batch.cut for rows in rank}) > 1:
        raise NotOffered("its trainer makes no micro-batches of unequal rows")
    pair = asked.objective, asked.reduce
    if pair not in TRL_TYPES:
        raise NotOffered(f"no reduce={pair[1]!r} with objective={pair[0]!r}")
    kl_by(asked, {"k3": None})
    return {
        "loss_type": TRL_TYPES[pair], "epsilon_low": asked.epsilon_low, "epsilon_high": asked.epsilon_high,
        "beta": asked.beta, "importance_sampling_level": asked.ratio, "max_completion_length": asked.max_length,
        "use_bias_correction_kl": asked.kl_times_ratio, "sapo_temperature_pos": asked.sapo_pos,
        "sapo_temperature_neg": asked.sapo_neg,
    }  # fmt: skip


def declare_cispo(source: str) -> list[Declared]:
    """Return that the bound of CISPO is epsilon_high itself, and that there is no lower one."""
    return [Declared({"objective": "cispo"}, {"cispo_bound": "absolute", "cispo_low": False}, source)]
