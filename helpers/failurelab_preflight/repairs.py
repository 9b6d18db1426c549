"""Repairs as objects: each takes one failure away by an edit of the script's own files, the diff that a reader applies.

A judge says *what* is to be undone (`Finding.undo`), in one of the forms below. *Where* is found here: the call that it
speaks of is looked up in the script's text, by the place where it ran, and edited there. What is run is the edited text
and nothing else. Where a repair has no place there (a library's own script, a YAML file) there is none, and the failure
is not named: `--edit` tries a patch of those.

    Finding("F7", ..., undo=Statement("{trainer}.generation_config.use_cache = False"))
    Finding("F15", ..., undo=Arguments({"temperature": 1.0}))
    Finding("F8", ..., undo=Keyword("trainer", "peft_config"))

That a repair heals is decided by the judge of its failure: it says HELD in the run with the repair.
"""

import ast
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from failurelab_preflight.finding import Change, Location
from failurelab_preflight.script_text import Edit, Place, Text, apply_edits, is_docstring, locate, read_source


@dataclasses.dataclass
class EditableScript:
    """What is known of a script when a repair is looked up.

    Attributes:
        texts: of its files that may be edited, by path; asked for when a place is in one of them.
        places: of the calls that ran, by kind: `train`, `trainer`, `arguments`, `load`, `adapter`; of each call the
            places that led to it in the script's own code, the innermost first.
        change: what this run already does otherwise.
    """

    texts: Callable[[str], Text | None]
    places: dict[str, list[list[Place]]] = dataclasses.field(default_factory=dict)
    change: Change = dataclasses.field(default_factory=Change)

    def calls(self, kind: str, index: int = -1) -> Iterator[tuple[Text, ast.Call]]:
        """Yield the calls in the script's text that led to a call of this kind, the innermost first."""
        calls = self.places.get(kind, [])
        for place in calls[index] if calls and -len(calls) <= index < len(calls) else ():
            text = self.texts(place.file)
            if text and (call := text.call(place)):
                yield text, call

    def edited(self, edits: list[Edit]) -> tuple[Change, Location]:
        """Return this run's change with these edits too, and the line that the last one changes, as it was given."""
        before = {edit.file: text.text for edit in edits if (text := self.texts(edit.file))}
        last = edits[-1]  # imports are the first
        place = locate(last.file, before[last.file], last.start, read_source(last.file))
        return Change({**self.change.files, **apply_edits(before, edits)}), place


class Repair:
    """What takes one failure away."""

    def edit(self, script: EditableScript) -> list[Edit]:
        """Return the edits of the script's text; none where it has no place for them."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Statement(Repair):
    """Statements in front of the training, or in front of the trainer's making.

    Attributes:
        text: with the script's own names of things in it: `{trainer}` before the training; `{model}`, `{tokenizer}`,
            `{args}`, `{dataset}` before the trainer is made.
        before: `train` or `trainer`.
        imports: a line that imports what it needs, such as `from accelerate import PartialState`.
    """

    text: str
    before: str = "train"
    imports: str = ""

    def edit(self, script: EditableScript) -> list[Edit]:
        """Put it in front of the innermost call that names what it needs."""
        for text, call in script.calls(self.before):
            try:
                lines = self.text.format_map(_names(call, self.before)).splitlines()
            except KeyError:
                continue
            return [*_imported(text, self.imports), text.before(text.statement(call), *lines)]
        return []


# Arguments that are checked, or that others are derived from, while they are made: too late to set them after that.
_CHECKED_WHEN_MADE = (
    "per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "steps_per_generation",
    "generation_batch_size", "num_iterations",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arguments(Repair):
    """Training arguments with other values.

    Attributes:
        values: argument to value.
    """

    values: Mapping[str, Any]

    def edit(self, script: EditableScript) -> list[Edit]:
        """Set them where they are made, or on the object that the trainer is given."""
        sources = {name: repr(value) for name, value in self.values.items()}
        for text, call in script.calls("arguments"):
            return text.set_keywords(call, sources)
        checked = not sources.keys().isdisjoint(_CHECKED_WHEN_MADE)
        for text, call in () if checked else script.calls("trainer"):
            if name := _names(call, "trainer").get("args"):
                lines = [f"{name}.{argument} = {source}" for argument, source in sources.items()]
                return [text.before(text.statement(call), *lines)]
        return []


@dataclasses.dataclass(frozen=True)
class Keyword(Repair):
    """A keyword argument of the call that makes the trainer, loads a model or an adapter; None leaves it out.

    Attributes:
        of: `trainer`, `load` or `adapter`.
        name: of the keyword.
        value: as it is to stand in the script, `torch.float32`; with `{}` for what stands there now.
        index: which of those calls; the last one by default.
        imports: a line that imports what it needs.
    """

    of: str
    name: str
    value: str | None = None
    index: int = -1
    imports: str = ""

    def edit(self, script: EditableScript) -> list[Edit]:
        """Edit the innermost call that names it; add it to the innermost where none does."""
        calls = list(script.calls(self.of, self.index))
        named = [(*at, keyword) for at in calls for keyword in at[1].keywords if keyword.arg == self.name]
        if self.value is None:
            return named[0][0].without_keyword(*named[0][1:]) if named else []
        if not named and (not calls or "{}" in self.value):
            return []
        value, (text, call) = self.value, calls[0]
        if named:
            text, call, keyword = named[0]
            start, end = text.span(keyword.value)
            value = value.replace("{}", _operand(keyword.value, text.text[start:end]))
        return [*_imported(text, self.imports), *text.set_keywords(call, {self.name: value})]


def _names(call: ast.Call, kind: str) -> dict[str, str]:
    """Return the script's names of things, where they are names and no calls."""
    if kind == "train":
        parts: dict[str, ast.expr | None] = {"trainer": call.func.value} if isinstance(call.func, ast.Attribute) else {}
    else:
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        parts = {
            "model": keywords.get("model", call.args[0] if call.args else None),
            "tokenizer": keywords.get("processing_class", keywords.get("tokenizer")),
            "args": keywords.get("args"),
            "dataset": keywords.get("train_dataset"),
        }
    return {name: ast.unparse(part) for name, part in parts.items() if isinstance(part, (ast.Name, ast.Attribute))}


def _imported(text: Text, line: str) -> list[Edit]:
    """Return the edit that imports what a repair needs, in front of the file's first import; none if it is there."""
    if not line or line in (ast.unparse(node) for node in text.tree.body):
        return []
    future = [node for node in text.tree.body if getattr(node, "module", "") == "__future__"]
    statements = [node for node in text.tree.body if node not in future and not is_docstring(node)]
    imports = [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [text.before((imports or statements)[0], line)]


def _operand(node: ast.expr, source: str) -> str:
    """Return an expression's source that an attribute may be asked of."""
    plain = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
    return source if isinstance(node, plain) and "\n" not in source else f"({source})"
