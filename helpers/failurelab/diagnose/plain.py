"""A script written out: the options that it keeps in a dict, a dataclass, YAML or argparse stand where they are used.

People keep their options beside the call that takes them. Here `GRPOConfig(**CONFIG)` becomes the keywords of CONFIG,
`settings.beta` the default of the dataclass or of `add_argument("--beta")`, `CONFIG["beta"]` its entry; a subclass of a
trainer that the script defines gets the trainer's name, and an object whose class has `__call__` becomes that function.
A default may be changed by the command line that started the run: that is not seen. What is not literal stays as it is.
"""

import ast
import json
from collections.abc import Mapping

_DUMPS = ("vars", "asdict", "dataclasses.asdict", "OmegaConf.to_container")
_NOT_SETTINGS = ("self", "model", "policy", "tokenizer", "trainer", "torch", "np", "os", "math", "row")


def write_out(tree: ast.Module, trainers: tuple[str, ...]) -> ast.Module:
    """Return the script's tree, changed in place, with its options written out."""
    return ast.fix_missing_locations(_Plain(tree, trainers).visit(tree))


class _Plain(ast.NodeTransformer):
    def __init__(self, tree: ast.Module, trainers: tuple[str, ...]):
        self.names: dict[str, ast.expr] = {}
        self.fields: dict[str, dict[str, ast.expr]] = {}  # of each class
        self.settings: dict[str, ast.expr] = {}  # defaults of every class and argument, by their name
        self.same: dict[str, str] = {}  # subclass of a trainer, to the trainer
        self.callables: dict[str, ast.FunctionDef] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.names.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.ClassDef):
                self._class(node, trainers)
            elif isinstance(node, ast.Call) and _name(node.func).endswith("add_argument"):
                self._argument(node)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if _name(call.func) in self.fields:  # Settings(beta=0.1) changes what the class says
                self.settings |= {word.arg: word.value for word in call.keywords if word.arg}
        tree.body += self.callables.values()

    def _class(self, node: ast.ClassDef, trainers: tuple[str, ...]) -> None:
        for base in node.bases:
            name = _name(base).split(".")[-1]
            name = self.same.get(name, name)
            if name in trainers:
                self.same[node.name] = name
        fields = {
            each.target.id: _field(each.value)
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None
        }
        if fields:
            self.fields[node.name] = fields
            self.settings = fields | self.settings
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__call__":
                arguments = ast.arguments(
                    each.args.posonlyargs, each.args.args[1:], each.args.vararg, each.args.kwonlyargs,
                    each.args.kw_defaults, each.args.kwarg, each.args.defaults,
                )  # fmt: skip
                name = f"{node.name}__call__"
                self.callables[node.name] = ast.FunctionDef(
                    name, arguments, each.body, [], None, lineno=each.lineno, col_offset=each.col_offset
                )

    def _argument(self, call: ast.Call) -> None:
        flags = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        words = {word.arg: word.value for word in call.keywords}
        default = words.get("default")
        action = getattr(words.get("action"), "value", None)
        if default is None and action in ("store_true", "store_false"):
            default = ast.Constant(action == "store_false")
        named = getattr(words.get("dest"), "value", None) or long.lstrip("-").replace("-", "_")
        if named and default is not None:
            self.settings.setdefault(named, default)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        plain = isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name)
        value = self.settings.get(node.attr) if plain and node.value.id not in _NOT_SETTINGS else None
        return value if isinstance(value, ast.Constant | ast.UnaryOp | ast.Dict | ast.List) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        key = getattr(node.slice, "value", None)
        table = self._table(node.value) if isinstance(node.ctx, ast.Load) and isinstance(key, str) else None
        return table[key] if table and key in table else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name):
            if node.func.id in self.callables and node.func.id not in self.same:
                return ast.copy_location(ast.Name(self.callables[node.func.id].name, ast.Load()), node)
            node.func.id = self.same.get(node.func.id, node.func.id)
        words: list[ast.keyword] = []
        for word in node.keywords:
            table = self._table(word.value) if word.arg is None else None
            words += [ast.keyword(name, value) for name, value in table.items()] if table is not None else [word]
        last = {word.arg: word for word in words if word.arg}
        node.keywords = [*last.values(), *(word for word in words if word.arg is None)]
        return node

    def _table(self, node: ast.expr, depth: int = 0) -> dict[str, ast.expr] | None:
        """Return the entries of a dict, however it is written; None where they are not literal."""
        if depth > 4:
            return None
        if isinstance(node, ast.Name):
            return self._table(self.names[node.id], depth + 1) if node.id in self.names else None
        if isinstance(node, ast.Dict):
            table: dict[str, ast.expr] = {}
            for key, value in zip(node.keys, node.values):
                part = self._table(value, depth + 1) if key is None else {getattr(key, "value", None): value}
                if part is None or not all(isinstance(each, str) for each in part):
                    return None
                table |= part
            return table
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            parts = [self._table(part, depth + 1) for part in (node.left, node.right)]
            return parts[0] | parts[1] if None not in parts else None
        if not isinstance(node, ast.Call):
            return None
        name = _name(node.func)
        if name == "dict":
            parts = [self._table(part, depth + 1) for part in node.args]
            spread = [self._table(word.value, depth + 1) for word in node.keywords if word.arg is None]
            if None in parts or None in spread:
                return None
            return {
                **{key: value for part in [*parts, *spread] for key, value in part.items()},
                **{word.arg: word.value for word in node.keywords if word.arg},
            }
        if name in _DUMPS and node.args:
            made = self._made(node.args[0])
            return (
                self.fields[made] | {key: value for key, value in self.settings.items() if key in self.fields[made]}
                if made
                else None
            )
        text = self._text(node.args[0]) if node.args else None
        if name.endswith(("safe_load", "yaml.load", "json.loads")) and text:
            return _entries(text)
        return None

    def _made(self, node: ast.expr) -> str | None:
        """Return the class with fields that an expression is an object of."""
        node = self.names.get(node.id, node) if isinstance(node, ast.Name) else node
        name = _name(node.func) if isinstance(node, ast.Call) else ""
        return name if name in self.fields else None

    def _text(self, node: ast.expr) -> str | None:
        node = self.names.get(node.id, node) if isinstance(node, ast.Name) else node
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _field(value: ast.expr) -> ast.expr:
    """Return the default of `field(default=...)`, or what stands there."""
    if isinstance(value, ast.Call) and _name(value.func).endswith("field"):
        return next((word.value for word in value.keywords if word.arg == "default"), value)
    return value


def _entries(text: str) -> dict[str, ast.expr] | None:
    """Return the entries of JSON, or of YAML's lines `key: value`; nested blocks are left out."""
    try:
        loaded = json.loads(text)
    except ValueError:
        loaded = {}
        for line in text.splitlines():
            key, colon, value = line.partition(":")
            if colon and key and not key[0].isspace() and key[0] not in "#-":
                loaded[key.strip()] = _scalar(value.partition(" #")[0].strip())
    if not isinstance(loaded, Mapping):
        return None
    return {str(key): ast.parse(repr(value), mode="eval").body for key, value in loaded.items() if value != {}}


def _scalar(text: str) -> object:
    words = {"true": True, "false": False, "null": None, "~": None, "none": "none", "": {}}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text.strip("'\"")


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        before = _name(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return getattr(node, "id", "")
