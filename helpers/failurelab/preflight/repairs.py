"""Repairs as objects: each takes one failure away by an edit of the script's own files, the diff that a reader applies.

A judge says *what* is to be undone (`Finding.undo`), in one of the forms below. *Where* is found here: the call that it
speaks of is looked up in the script's text, by the place where it ran, and edited there; training arguments that stand
in a YAML file, or among the script's options, are edited there. What is run is the edited text and nothing else. Where
a repair has no place in these (a library's own script) there is none, and the failure is not named.

    Finding("F7", ..., undo=Statement("{trainer}.generation_config.use_cache = False"))
    Finding("F15", ..., undo=Arguments({"temperature": 1.0}))
    Finding("F8", ..., undo=Keyword("trainer", "peft_config"))

That a repair heals is decided by the judge of its failure: it says HELD in the run with the repair.
"""

import ast
import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from failurelab.preflight.answer import COMMAND_LINE, Change, Location
from failurelab.preflight.script_text import Edit, Place, Text, apply_edits, is_docstring, locate, read_source


@dataclasses.dataclass
class EditableScript:
    """What is known of a script when a repair is looked up.

    Attributes:
        texts: of its files that may be edited, by path; asked for when a place is in one of them.
        places: of the calls that ran, by kind: `train`, `trainer`, `arguments`, `load`, `adapter`; of each call the
            places that led to it in the script's own code, the innermost first.
        change: what this run already does otherwise.
        settings: the YAML files in the script's command line, and that itself, by path, as this run has them.
    """

    texts: Callable[[str], Text | None]
    places: dict[str, list[list[Place]]] = dataclasses.field(default_factory=dict)
    change: Change = dataclasses.field(default_factory=Change)
    settings: dict[str, str] = dataclasses.field(default_factory=dict)

    def calls(self, kind: str, index: int = -1) -> Iterator[tuple[Text, ast.Call]]:
        """Yield the calls in the script's text that led to a call of this kind, the innermost first."""
        calls = self.places.get(kind, [])
        for place in calls[index] if calls and -len(calls) <= index < len(calls) else ():
            text = self.texts(place.file)
            if text and (call := text.call(place)):
                yield text, call

    def _text(self, file: str) -> str:
        text = self.texts(file)
        return text.text if text else self.settings[file]

    def locate(self, edit: Edit) -> Location | None:
        """Return the line of the script, as it was given, that an edit changes; None of the command line."""
        if edit.file == COMMAND_LINE:
            return None
        return locate(edit.file, self._text(edit.file), edit.start, read_source(edit.file))

    def edited(self, edits: list[Edit]) -> Change:
        """Return this run's change with these edits made too."""
        before = {edit.file: self._text(edit.file) for edit in edits}
        return Change({**self.change.files, **apply_edits(before, edits)})


class Repair:
    """What takes one failure away."""

    def edit(self, script: EditableScript) -> list[Edit]:
        """Return the edits of the script's text; none where it has no place for them."""
        raise NotImplementedError

    def change(self, script: EditableScript) -> Change | None:
        """Return what a run with this repair does otherwise; None where it has no place in the script's files."""
        edits = self.edit(script)
        return script.edited(edits) if edits else None


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
        """Put it in front of the innermost call that names what it needs; a trainer without a name gets one."""
        for text, call in script.calls(self.before):
            names: dict[str, str] = _names(call, self.before)
            edits: list[Edit] = []
            if self.before == "train" and not names:
                names, edits = _named_trainer(text, call)
            try:
                lines = self.text.format_map(names).splitlines()
            except KeyError:
                continue
            naming = [f"{names['trainer']} = {text.source(call.func.value)}"] if edits else []  # type: ignore[attr-defined]
            return [*_imported(text, self.imports), *edits, text.before(text.statement(call), *naming, *lines)]
        return []


def _named_trainer(text: Text, call: ast.Call) -> tuple[dict[str, str], list[Edit]]:
    """Return a name for the trainer of `GRPOTrainer(...).train()`, and the edit that calls it by that name there.

    None where the statement does more than that: what it does would come in another order.
    """
    statement = text.statement(call)
    if getattr(statement, "value", None) is not call or not isinstance(call.func, ast.Attribute):
        return {}, []
    used = {node.id for node in ast.walk(text.tree) if isinstance(node, ast.Name)}
    name = next(name for name in ("trainer", "the_trainer", "trainer_to_repair") if name not in used)
    return {"trainer": name}, [Edit(text.file, *text.span(call.func.value), name)]


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
        like: argument to another one that has the same value: where the call names that, its text is written, so that
            the two stay equal when an option of the script changes them.
    """

    values: Mapping[str, Any]
    like: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def edit(self, script: EditableScript) -> list[Edit]:
        """Set them where they are made, on the object that the trainer is given, in a YAML file, or as options."""
        sources = {name: repr(value) for name, value in self.values.items()}
        for text, call in script.calls("arguments"):
            named = {keyword.arg: text.source(keyword.value) for keyword in call.keywords}
            like = {name: named[other] for name, other in self.like.items() if other in named}
            return text.set_keywords(call, sources | like)
        checked = not sources.keys().isdisjoint(_CHECKED_WHEN_MADE)
        for text, call in () if checked else script.calls("trainer"):
            if name := _names(call, "trainer").get("args"):
                lines = [f"{name}.{argument} = {source}" for argument, source in sources.items()]
                return [text.before(text.statement(call), *lines)]
        line = script.settings.get(COMMAND_LINE, "")
        first = any(re.search(rf"--{name}[ =]", line) for name in self.values)  # an option outweighs the file
        for file, settings in sorted(script.settings.items(), key=lambda item: (item[0] == COMMAND_LINE) != first):
            edits = (_set_options if file == COMMAND_LINE else _set_in_yaml)(file, settings, self.values)
            if edits:
                return edits
        return []


_USUAL = "output_dir|learning_rate|per_device_train_batch_size|num_generations"  # training arguments, to know them by


def _set_options(file: str, text: str, values: Mapping[str, Any]) -> list[Edit]:
    """Return the edits that give options of a command line other values; none where it has no training arguments."""
    if not re.search(rf"(^| )--({_USUAL})[ =]", text):
        return []
    edits, added = [], ""
    for name, value in values.items():
        word = shlex.quote(value if isinstance(value, str) else json.dumps(value))
        there = re.search(rf"(?:^| )--{re.escape(name)}[ =](?P<value>'[^']*'|[^ ]+)", text)
        if there:
            edits.append(Edit(file, there.start("value"), there.end("value"), word))
        else:
            added += f" --{name} {word}"
    return edits + ([Edit(file, len(text), len(text), added)] if added else [])


def _set_in_yaml(file: str, text: str, values: Mapping[str, Any]) -> list[Edit]:
    """Return the edits that give arguments of a YAML file other values: JSON is YAML.

    None where one of them has a value of several lines, or where the file names no training argument at all.
    """
    if not re.search(rf"^({_USUAL})\s*:", text, re.MULTILINE):
        return []
    edits, added = [], ""
    for name, value in values.items():
        line = rf"^{re.escape(name)}[ \t]*:[ \t]*(?P<value>[^#\r\n]*?)(?=[ \t]*(#.*)?\r?$)"
        there = re.search(line, text, re.MULTILINE)
        if there and re.match(r"[^\n]*\n[ \t-]", text[there.end() :]):
            return []
        if there:
            edits.append(Edit(file, there.start("value"), there.end("value"), json.dumps(value)))
        else:
            added += f"{name}: {json.dumps(value)}\n"
    end = "" if text.endswith("\n") else "\n"
    return edits + ([Edit(file, len(text), len(text), end + added)] if added else [])


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


@dataclasses.dataclass(frozen=True)
class Keywords(Repair):
    """Keyword arguments of one call, each by another name, or left out (None).

    Attributes:
        of: `arguments` or `trainer`.
        names: of the keywords, and the names in their places.
    """

    of: str
    names: Mapping[str, str | None]

    def edit(self, script: EditableScript) -> list[Edit]:
        """Edit the innermost call that names one of them, one name after the other."""
        for text, call in script.calls(self.of):
            start, end = text.span(call)
            part = Text(text.file, text.text[start:end])
            for name, new in self.names.items():
                (inner,) = (node.value for node in part.tree.body if isinstance(node, ast.Expr))
                keywords = [keyword for keyword in getattr(inner, "keywords", ()) if keyword.arg == name]
                for keyword in keywords:
                    at = part.span(keyword)[0]
                    renamed = [Edit(text.file, at, at + len(name), new or "")]
                    edits = renamed if new else part.without_keyword(inner, keyword)  # type: ignore[arg-type]
                    part = Text(text.file, apply_edits({text.file: part.text}, edits)[text.file])
            if part.text != text.text[start:end]:
                return [Edit(text.file, start, end, part.text)]
        return []


@dataclasses.dataclass(frozen=True)
class Import(Repair):
    """A name that is imported from another module, or not at all (None).

    Attributes:
        file: that imports it.
        name: that is imported.
        module: from which it is imported then.
    """

    file: str
    name: str
    module: str | None

    def edit(self, script: EditableScript) -> list[Edit]:
        """Take it out of the statement that imports it, and put one of its own in front of it."""
        text = script.texts(self.file)
        for node in ast.walk(text.tree) if text else ():
            aliases = node.names if isinstance(node, ast.ImportFrom) else []
            alias = next((alias for alias in aliases if alias.name == self.name), None)
            if text is None or alias is None or not isinstance(node, ast.ImportFrom):
                continue
            renamed = f" as {alias.asname}" * bool(alias.asname)
            line = f"from {self.module} import {self.name}{renamed}" if self.module else "pass"
            if len(aliases) == 1:
                return [Edit(text.file, *text.span(node), line)]
            start, end = text.span(alias)
            rest = text.text[end:]
            comma = re.match(r"\s*,\s*", rest)
            if comma:
                end += comma.end()
            else:
                start -= len(text.text[:start]) - len(re.sub(r",\s*$", "", text.text[:start]))
            return [*([text.before(node, line)] if self.module else []), Edit(text.file, start, end, "")]
        return []


@dataclasses.dataclass(frozen=True)
class Attribute(Repair):
    """An attribute that is asked for in one line, by another name."""

    file: str
    line: int
    name: str
    new: str

    def edit(self, script: EditableScript) -> list[Edit]:
        """Write the other name wherever the line has it."""
        text = script.texts(self.file)
        edits = []
        for node in ast.walk(text.tree) if text else ():
            if text and isinstance(node, ast.Attribute) and (node.attr, node.end_lineno) == (self.name, self.line):
                end = text.span(node)[1]
                edits.append(Edit(text.file, end - len(self.name), end, self.new))
        return edits


@dataclasses.dataclass(frozen=True)
class WithoutSettings(Repair):
    """Keys that are taken out of a YAML file among the script's options, and options out of its command line."""

    names: tuple[str, ...]

    def edit(self, script: EditableScript) -> list[Edit]:
        """Take out their lines, and the options with their values."""
        edits = []
        for file, settings in script.settings.items():
            for name in map(re.escape, self.names):
                line = rf"(?: |^)--{name}(?:[ =](?!--)(?:'[^']*'|\S+))*" if file == COMMAND_LINE else (
                    rf"^{name}[ \t]*:.*\n?(?:[ \t]+\S.*\n?|[ \t]*-[ \t].*\n?)*"
                )  # fmt: skip
                edits += [Edit(file, *found.span(), "") for found in re.finditer(line, settings, re.MULTILINE)]
        return edits


@dataclasses.dataclass(frozen=True, eq=False)
class FirstLine(Repair):
    """A statement of one line at the beginning of a function of the script's own, such as a reward function."""

    function: Callable[..., Any]
    text: str

    def edit(self, script: EditableScript) -> list[Edit]:
        """Put it in front of the first statement that is no docstring."""
        text, node = _function(script, self.function)
        if text is None or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return []
        body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
        return [text.before(body[0], self.text)]


@dataclasses.dataclass(frozen=True, eq=False)
class AnyKeywords(Repair):
    """`**kwargs` added to a function that is given more than it takes; with `positional`, `*args` too."""

    function: Callable[..., Any]
    positional: bool = False

    def edit(self, script: EditableScript) -> list[Edit]:
        """Add it after the last argument."""
        text, node = _function(script, self.function)
        if text is None or node is None or node.args.kwarg is not None:
            return []
        last = max((text.span(argument)[1] for argument in ast.iter_child_nodes(node.args)), default=None)
        rest = ", *args" * (self.positional and not node.args.vararg and not node.args.kwonlyargs)
        return [] if last is None else [Edit(text.file, last, last, f"{rest}, **kwargs")]


_MATCHING = ("compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "split")


@dataclasses.dataclass(frozen=True, eq=False)
class DotAll(Repair):
    """re.DOTALL for the patterns of a function, also those that its module compiles for it."""

    function: Callable[..., Any]

    def edit(self, script: EditableScript) -> list[Edit]:
        """Give the flag to each call of `re` that has none; patterns that are compiled elsewhere stay."""
        text, node = _function(script, self.function)
        if text is None or node is None:
            return []
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        compiled = [
            statement.value
            for statement in text.tree.body
            if isinstance(statement, ast.Assign)
            and names & {getattr(target, "id", None) for target in statement.targets}
        ]
        calls = [
            call
            for root in (node, *compiled)
            for call in ast.walk(root)
            if isinstance(call, ast.Call) and ast.unparse(call.func) in {f"re.{name}" for name in _MATCHING}
            and "flags" not in {keyword.arg for keyword in call.keywords}
            and not any("re." in ast.unparse(argument) for argument in call.args[1:])
        ]  # fmt: skip
        return [edit for call in calls for edit in text.set_keywords(call, {"flags": "re.DOTALL"})]


@dataclasses.dataclass(frozen=True, eq=False)
class WithoutMethod(Repair):
    """A method of a class of the script's own taken out, so that its parent's runs.

    Attributes:
        kind: the class that defines it.
        name: of the method.
    """

    kind: type
    name: str

    def edit(self, script: EditableScript) -> list[Edit]:
        """Take out its lines, where they stand in the class; a class that has nothing else keeps a `pass`."""
        text, node = _function(script, vars(self.kind)[self.name])
        if text is None or not any(
            isinstance(inner, ast.ClassDef) and node in inner.body for inner in ast.walk(text.tree)
        ):
            return []
        return [text.without(node)]


@dataclasses.dataclass(frozen=True, eq=False)
class Together(Repair):
    """Several repairs made at once, where none of them heals alone."""

    parts: tuple[Repair, ...]

    def edit(self, script: EditableScript) -> list[Edit]:
        """Make all of their edits, or none."""
        edits = [part.edit(script) for part in self.parts]
        return [edit for group in edits for edit in group] if all(edits) else []


def _function(script: EditableScript, function: Any) -> tuple[Text | None, Any]:
    """Return the text that a function stands in, and its node there; None for both where it stands in none."""
    function = inspect.unwrap(getattr(function, "func", function))
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    text = script.texts(code.co_filename) if code is not None else None
    return text, text and code and text.function(code.co_firstlineno)


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
