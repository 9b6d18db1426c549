"""What a training script says, read by `ast` and never run.

Only what stands there literally is believed: constants, names bound to constants, and the names of calls. What is
computed is unknown (None), and no rule holds of what is unknown.
"""

import ast
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from failurelab.diagnose.plain import write_out

Value = float | int | bool | str | None

_TRAINERS = ("GRPOTrainer", "OnlineDPOTrainer", "RLOOTrainer", "SFTTrainer", "DPOTrainer", "PPOTrainer", "Trainer")
_CONFIG = re.compile(r"(?:GRPO|OnlineDPO|RLOO)Config$|^TrainingArguments$")
_GIVEN = {"prompts", "completions", "prompt", "completion_ids", "completions_ids", "trainer_state", "log_extra",
          "log_metric", "environments", "self", "args", "kwargs"}  # fmt: skip
_SENDS = re.compile(r"load_state_dict|load_weights|copy_|sync|update_(?:named_)?param|push|broadcast|save_pretrained"
                    r"|load_adapter|set_weights|update_weights|move_model")  # fmt: skip
_CASTS = {"float": "float32", "bfloat16": "bfloat16", "half": "float16"}
_CHAT = re.compile(r"(?i)instruct|chat|[-_/]it\b")
_INVERTED = (  # forms that give more to what is not the right answer
    r"(?<![\w'])-float\([^|]*== [a-z]",
    r"float\([^|=]*!= [a-z]\w*\)",
    r"\b0(?:\.0)? if [^|]*? == [a-z]\w* else 1",
    r"-1(?:\.0)? if [^|]*? == [a-z]\w* else [01]",
)
_OPTIONS = (
    "temperature", "beta", "max_completion_length", "max_prompt_length", "num_generations", "learning_rate",
    "loss_type", "steps_per_generation", "gradient_accumulation_steps", "num_iterations", "sync_ref_model",
    "mask_truncated_completions", "use_vllm", "gradient_checkpointing", "max_steps", "warmup_steps", "bf16",
    "logging_steps", "remove_unused_columns", "per_device_train_batch_size",
)  # fmt: skip


class ScriptError(ValueError):
    """The script cannot be read as Python."""


def read_script(text: str, versions: Mapping[str, str], folder: pathlib.Path | None = None) -> dict[str, Value]:
    """Return the figures of a script; those of defaults that depend on a release are filled in by `versions`.

    Raises:
        ScriptError: it is no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ScriptError(f"it is no Python: {error}") from error
    return _Script(write_out(tree, _TRAINERS), versions, folder).figures()


class _Script:
    def __init__(self, tree: ast.Module, versions: Mapping[str, str], folder: pathlib.Path | None):
        self.tree, self.folder = tree, folder
        self.versions = versions
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.assigned: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            targets, value = _binding(node)
            for target in targets:
                self.assigned.setdefault(target, value)
        self.functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }

    def figures(self) -> dict[str, Value]:
        trainer = next((call for call in self.calls if _name(call.func).split(".")[-1] in _TRAINERS), None)
        config = next((call for call in self.calls if _CONFIG.search(_name(call.func))), None)
        arguments = _keywords(trainer) if trainer else {}
        self.config_words = _keywords(config) if config else {}
        options = {name: self.constant(value) for name, value in (_keywords(config) if config else {}).items()}
        for node in ast.walk(self.tree):  # args.temperature = 0.7
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                target = node.targets[0]
                if target.attr in _OPTIONS and "arg" in _name(target.value).lower() + "config":
                    options.setdefault(target.attr, self.constant(node.value))
        result: dict[str, Value] = {"script_trainer": _name(trainer.func).split(".")[-1] if trainer else ""}
        result["spread_config"] = bool(config) and any(word.arg is None for word in config.keywords)
        self.complete = config is not None and not result["spread_config"]
        for name in _OPTIONS:
            result[f"option_{name}"] = options.get(name)
        self._defaults(result, options)
        result |= self._model(trainer, arguments)
        result |= self._gradients(config, result)
        result |= self._engine(arguments, options)
        result |= self._data(arguments, result)
        result |= self._rewards(trainer, arguments)
        result |= self._reference(result)
        return result

    def constant(self, node: ast.expr | None, depth: int = 0) -> Any:
        """Return the constant that an expression is, through names; None if it is none."""
        if isinstance(node, ast.Name) and depth < 5:
            return self.constant(self.assigned.get(node.id), depth + 1)
        if node is None:
            return None
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _arithmetic(node)

    def _at_least(self, package: str, version: str) -> bool | None:
        try:
            return Version(self.versions[package]) >= Version(version) if package in self.versions else None
        except InvalidVersion:
            return None

    def _defaults(self, result: dict[str, Value], options: dict[str, Any]) -> None:
        """Options that are not set, where a release's default matters and is known."""
        if not self.complete:
            return

        def default(name: str, value: Value) -> None:
            if name not in options and value is not None:
                result[f"option_{name}"] = value

        new = self._at_least("trl", "0.22")
        default("gradient_checkpointing", new)
        default("temperature", {True: 1.0, False: 0.9}.get(self._at_least("trl", "0.16")))
        default("beta", {True: 0.0, False: 0.04}.get(self._at_least("trl", "0.18")))
        default("max_completion_length", {True: 512, False: 256}.get(self._at_least("trl", "1.10")))
        default("gradient_accumulation_steps", 1)
        default("loss_type", {True: "dapo"}.get(self._at_least("trl", "0.24")))
        default("steps_per_generation", result["option_gradient_accumulation_steps"])
        default("mask_truncated_completions", False)
        default("use_vllm", False)
        default("sync_ref_model", False)

    def _model(self, trainer: ast.Call | None, arguments: dict[str, ast.expr]) -> dict[str, Value]:
        given = arguments.get("model") or (trainer.args[0] if trainer and trainer.args else None)
        loads = [call for call in self.calls if _name(call.func).endswith("from_pretrained")]
        loads = [call for call in loads if not re.search("Token|Processor|Config|Peft", _name(call.func))]
        name = self.constant(given)
        self.given = _name(given) if given is not None else "model"
        result: dict[str, Value] = {"adapter": self._adapter(arguments)}
        inline = given if isinstance(given, ast.Call) else None
        if isinstance(name, str):
            asked = self.constant(self.config_words.get("model_init_kwargs"))
            asked = asked if isinstance(asked, dict) else {}
            text = asked.get("dtype", asked.get("torch_dtype"))
            known = text if text in ("bfloat16", "float16", "float32") else "by trainer"
            return result | self._checkpoint(name) | {"model_given": "name", "model_dtype": known}
        load = inline if inline is not None and inline in loads else loads[0] if loads else None
        if load is None:
            return result | {"model_given": None if given is not None else "", "model_dtype": None}
        words = _keywords(load)
        dtype = words.get("dtype", words.get("torch_dtype"))
        path = self.constant(load.args[0] if load.args else words.get("pretrained_model_name_or_path"))
        text = "unset" if dtype is None else _dtype(dtype, self)
        cast = None
        for call in self.calls:  # model.float(), model.to(torch.bfloat16)
            if isinstance(call.func, ast.Attribute) and _name(call.func.value) in ("model", self.given):
                cast = _CASTS.get(call.func.attr, cast) if not call.args else cast
                if call.func.attr == "to":
                    cast = next((kind for kind in (_dtype(node, self) for node in call.args) if kind), cast)
        result["model_given"] = "object"
        result["model_dtype"] = cast or text
        if isinstance(path, str):
            result |= self._checkpoint(path)
        taken = result["model_dtype"] == "auto" or (text == "unset" and self._at_least("transformers", "5.0"))
        if taken and not cast and result.get("checkpoint_dtype"):
            result["model_dtype"] = result["checkpoint_dtype"]
        if result["model_dtype"] == "unset" and self._at_least("transformers", "5.0") is False:
            result["model_dtype"] = "float32"
        return result

    def _checkpoint(self, path: str) -> dict[str, Value]:
        """What a checkpoint's name says, and its config.json where it lies beside the script."""
        result: dict[str, Value] = {"model_name": path, "chat_model": bool(_CHAT.search(path))}
        dtype = "bfloat16" if re.search(r"(?i)bf16|bfloat16", path) else None
        if self.folder is not None:
            try:
                config = json.loads((self.folder / path / "config.json").read_text(encoding="utf-8"))
                dtype = config.get("dtype") or config.get("torch_dtype") or dtype
            except (OSError, ValueError, AttributeError):
                pass
        result["checkpoint_dtype"] = dtype
        # Nearly every model that is released on the hub, as organization/name, is in bfloat16.
        result["hub_name"] = bool(re.fullmatch(r"[A-Za-z0-9][\w-]*/[\w.-]+", path)) and not path.startswith(
            ("models/", "out/", "outputs/", "checkpoints/", "data/")
        )
        return result

    def _adapter(self, arguments: dict[str, ast.expr]) -> bool:
        config = arguments.get("peft_config")
        if config is not None and not (isinstance(config, ast.Constant) and config.value is None):
            return True
        wraps = any(_name(call.func).split(".")[-1] == "get_peft_model" for call in self.calls)
        loads = any("PeftModel" in _name(call.func) for call in self.calls)
        merged = any(_name(call.func).endswith("merge_and_unload") for call in self.calls)
        return wraps or (loads and not merged)

    def _gradients(self, config: ast.Call | None, result: dict[str, Value]) -> dict[str, Value]:
        source = ast.unparse(self.tree)
        frozen = bool(re.search(r"embed\w*(?:\(\))?(?:\.\w+)*\.requires_grad_\(False\)", source)) or bool(
            re.search(r"embed[^\n]*\n?[^\n]*requires_grad(?:_\(False\)| = (?:False|'embed\w*' not in))", source)
        ) or bool(re.search(r"requires_grad(?:_\()?(?: = )?[^\n]*['\"]\w*embed\w*['\"] not in", source))  # fmt: skip
        reentrant = None
        if config is not None:
            kwargs = self.constant(_keywords(config).get("gradient_checkpointing_kwargs"))
            reentrant = kwargs.get("use_reentrant") if isinstance(kwargs, dict) else None
        checkpointing = result["option_gradient_checkpointing"]
        if any(_name(call.func).endswith("gradient_checkpointing_enable") for call in self.calls):
            checkpointing = True
        everything = bool(re.search(r"(?m)^\s*model\.requires_grad_\(False\)", source))
        trained = bool(re.search(r"requires_grad(?:_\(True\)| = True)", source)) or bool(result["adapter"])
        return {
            "checkpointing": checkpointing,
            "reentrant": reentrant,
            "embeddings_frozen": frozen,
            "all_frozen": everything and not trained,
            "input_grads": bool(re.search(r"enable_input_require_grads|require_input_grads|prepare_peft"
                                          r"|prepare_model_for_kbit_training|make_inputs_require_grad", source)),
            "cache_off": bool(re.search(r"generation_config\.use_cache = False|'use_cache': False|safe_generation",
                                        source)),
            "logits_repaired": bool(re.search(r"logits\.repair|repair_logits", source)),
            "quantized": bool(re.search(r"load_in_[48]bit=True", source)),
            "own_optimizer": bool(re.search(r"optimizers=\(", source)),
        }  # fmt: skip

    def _engine(self, arguments: dict[str, ast.expr], options: dict[str, Any]) -> dict[str, Value]:
        engine = arguments.get("rollout_func")
        if engine is None or (isinstance(engine, ast.Constant) and engine.value is None):
            return {"rollout_func": False, "weights_sent": None}
        sends = "never"
        for node, conditional in _conditional_calls(self.tree):
            name = _name(node.func)
            target = name.rsplit(".", 1)[0] if "." in name else ""
            if _SENDS.search(name.split(".")[-1]) and target not in ("model", "policy"):
                sends = "sometimes" if conditional and sends != "always" else "always"
        source = ast.unparse(self.tree)
        loads = [call for call in self.calls if _name(call.func).endswith("from_pretrained")
                 and not re.search("Token|Processor|Config|Peft", _name(call.func))]  # fmt: skip
        asked = {_name(call.func).rsplit(".", 1)[0] for call in self.calls if _name(call.func).endswith(".generate")}
        own = re.search(r"deepcopy|\bLLM\(|requests\.|[Cc]lient\(|openai", source) or len(loads) > 1
        if not own or any(name.startswith("trainer") or name == self.given for name in asked):
            sends = "always"  # the trained model itself generates
        again = bool(re.search(r"\.(?:batch_)?decode\(", source)) and bool(
            re.search(r"(?:tokenizer|self\.tokenizer)(?:\.encode)?\([^\n]*(?:text|completion|decoded|answer)", source)
        )
        return {"rollout_func": True, "weights_sent": sends, "encodes_again": again}

    def _data(self, arguments: dict[str, ast.expr], result: dict[str, Value]) -> dict[str, Value]:
        data = next((call for call in self.calls if _name(call.func).endswith("Dataset.from_dict")), None)
        table = data.args[0] if data is not None and data.args else None
        table = self._follow(table)
        columns, plain = None, None
        if isinstance(table, ast.Dict) and all(isinstance(key, ast.Constant) for key in table.keys):
            cells = {key.value: value for key, value in zip(table.keys, table.values)}
            columns = set(cells)
            plain = self._is_text(cells.get("prompt"))
        lists = next((call for call in self.calls if _name(call.func).endswith("Dataset.from_list")), None)
        if columns is None and lists is not None and lists.args:
            rows = self._follow(lists.args[0])
            row = rows.elt if isinstance(rows, ast.ListComp) else rows.elts[0] if getattr(rows, "elts", None) else None
            if isinstance(row, ast.Dict) and all(isinstance(key, ast.Constant) for key in row.keys):
                cells = {key.value: value for key, value in zip(row.keys, row.values)}
                columns = set(cells)
                plain = self._kind(cells.get("prompt"))
        for call in self.calls:  # dataset.map(lambda row: {"prompt": ...})
            if not _name(call.func).endswith(".map") or not call.args:
                continue
            columns = None if lists is None and data is None else columns
            function = call.args[0]
            body = function.body if isinstance(function, ast.Lambda) else None
            if isinstance(function, ast.Name) and isinstance(self.functions.get(function.id), ast.FunctionDef):
                returns = [n.value for n in ast.walk(self.functions[function.id]) if isinstance(n, ast.Return)]
                body = returns[0] if len(returns) == 1 else None
            if isinstance(body, ast.Dict):
                cells = {getattr(key, "value", None): value for key, value in zip(body.keys, body.values)}
                if "prompt" in cells:
                    plain = self._kind(cells["prompt"])
                if columns is not None:
                    columns |= {key for key in cells if key}
            elif columns is not None:
                columns = None
        if any(_name(call.func).endswith(("rename_column", "rename_columns", "add_column")) for call in self.calls):
            columns = None
        self.columns = columns
        template = any(
            "apply_chat_template" in _name(call.func) for call in self.calls
        ) or "<|im_start|>" in ast.unparse(self.tree)
        eos = any("eos_token" in _keywords(call) or "eos_token_id" in _keywords(call) for call in self.calls
                  if re.search("Token.*from_pretrained", _name(call.func)))  # fmt: skip
        pad_is_eos = False
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                attribute = node.targets[0].attr
                if attribute in ("eos_token", "eos_token_id"):
                    eos = True
                pad_is_eos |= attribute.startswith("pad_token") and "eos_token" in ast.unparse(node.value)
        return {
            "plain_prompts": plain,
            "template_applied": template,
            "end_assigned": eos,
            "pad_is_end": pad_is_eos,
            "columns": ", ".join(sorted(columns)) if columns else None,
        }

    def _follow(self, node: ast.expr | None) -> ast.expr | None:
        """Return what a name is bound to; the name itself where nothing is."""
        for _ in range(5):
            if isinstance(node, ast.Name) and self.assigned.get(node.id) is not None:
                node = self.assigned[node.id]
        return node

    def _is_text(self, node: ast.expr | None) -> bool | None:
        """Whether a column's cells are plain strings; None if it cannot be told."""
        node = self._follow(node)
        if isinstance(node, ast.ListComp):
            return self._kind(node.elt)
        if isinstance(node, ast.List) and node.elts:
            return self._kind(node.elts[0])
        if isinstance(node, ast.BinOp):
            return self._is_text(node.left)
        return None

    def _kind(self, node: ast.expr | None) -> bool | None:
        node = self._follow(node)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            return True
        if isinstance(node, ast.BinOp):
            return self._kind(node.left) or self._kind(node.right)
        if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Dict):
            return False
        if isinstance(node, ast.Subscript) and self.constant(node.slice) == "content":
            return True
        if isinstance(node, ast.Call) and _name(node.func).endswith((".format", ".join", ".strip")):
            return True
        return None

    def _rewards(self, trainer: ast.Call | None, arguments: dict[str, ast.expr]) -> dict[str, Value]:
        node = arguments.get("reward_funcs") or (trainer.args[1] if trainer and len(trainer.args) > 1 else None)
        node = self._follow(node)
        nodes = list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node] if node is not None else []
        names = [getattr(each, "id", "") for each in nodes]
        functions = [self.functions[name] for name in names if isinstance(self.functions.get(name), ast.FunctionDef)]
        result: dict[str, Value] = {
            "reward_functions": len(nodes),
            "reward_read": len(functions) == len(nodes) and bool(nodes),
            "reward_returns_constant": False, "reward_missing_column": None, "reward_none": False,
            "reward_distance": False,
            "reward_inverted": False, "reward_unused_column": None,
            "reward_messages_as_text": False, "reward_of_prompt": False, "reward_pattern": None,
            "reward_ignores_completion": False, "reward_nan": False, "reward_own_list": None,
        }  # fmt: skip
        for function in functions:
            for name, value in self._reward(function).items():
                result[name] = value or result[name]
        pattern = result["reward_pattern"]
        if pattern:  # what a pattern looks for must stand in a prompt, or the model cannot know it
            outside = "".join(ast.unparse(node) for node in self.tree.body if node not in functions)
            words = re.findall(r"<\w+>|boxed|####", str(pattern))
            result["prompt_asks_pattern"] = any(word in outside for word in words)
        result["reward_blind"] = bool(
            result["reward_missing_column"]
            or result["reward_messages_as_text"]
            or result["reward_distance"]
            or result["reward_inverted"]
            or result["reward_ignores_completion"]
            or result["reward_own_list"]
            or (pattern and not result["prompt_asks_pattern"])
        )
        return result

    def _reward(self, function: ast.FunctionDef) -> dict[str, Value]:
        source = ast.unparse(function)
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        given = [*function.args.args, *function.args.kwonlyargs]
        missing, unused = None, []
        if self.columns is not None:
            asked = {argument.arg for argument in given} | set(re.findall(r"kwargs(?:\.get\(|\[)'(\w+)'", source))
            left = sorted(asked - self.columns - _GIVEN - self._settings(function, given))
            missing = left[0] if left else ""
            unused = sorted(self.columns - asked - _GIVEN)
        constant = bool(returns) and all(_is_constant(value) for value in returns)
        text = "|".join(ast.unparse(value) for value in returns if value is not None)
        positive = self._bound(function, text)
        far = r"(?:\babs|distance|levenshtein|\bcer|\bwer|\bmse)\("
        distance = bool(re.search(far, positive)) and not (
            re.search(rf"[-/][^|\]]*{far}|[<>]=? |== |exp\(", positive) or "-=" in source
        )
        inverted = any(re.search(form, positive) for form in _INVERTED)
        completions = given[1].arg if len(given) > 1 and given[1].arg == "completions" else "completions"
        content = re.search(r"\[['\"](?:content|role)['\"]\]|\.get\(['\"]content|isinstance\(", source)
        patterns = re.findall(r"re\.\w+\(r?'((?:[^'\\]|\\.)*)'", source) + re.findall(
            r're\.\w+\(r?"((?:[^"\\]|\\.)*)"', source
        )
        return {
            "reward_returns_constant": constant,
            "reward_missing_column": missing,
            "reward_none": bool(re.search(r"return None\b|else None", source)) or not returns,
            "reward_distance": distance,
            "reward_inverted": inverted,
            "reward_unused_column": ", ".join(unused) if missing and unused else None,
            "reward_messages_as_text": "completions" in own and not content,
            "reward_of_prompt": bool(re.search(r"setdefault\(\s*prompt|cache\w*\[\s*prompt|lru_cache|functools\.cache",
                                               ast.unparse(function))),
            "reward_pattern": next((p for p in patterns if re.search(r"<\w+>|\\boxed|####", p)), None),
            "reward_ignores_completion": completions not in own and "completion" not in "".join(own),
            "reward_nan": bool(re.search(r"float\(['\"](?:nan|inf)|math\.(?:nan|inf)|/ len\(|np\.nan", source)),
            "reward_own_list": self._own_list(function, given),
        }  # fmt: skip

    def _own_list(self, function: ast.FunctionDef, given: list[ast.arg]) -> str | None:
        """Return the name of a list from outside the function that is zipped with the completions: by their place."""
        inside = {argument.arg for argument in given} | _stored(function)
        module = set().union(*(_stored(node) for node in self.tree.body if node is not function))
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call) and _name(node.func) == "zip"):
            names = [node.id for node in call.args if isinstance(node, ast.Name)]
            outside = [name for name in names if name in module - inside]
            if outside and len(outside) < len(call.args):
                return outside[0]
        return None

    def _settings(self, function: ast.FunctionDef, given: list[ast.arg]) -> set[str]:
        """Parameters whose default is a number, a truth value or a text: settings, and no columns."""
        arguments = function.args
        pairs = list(zip(reversed(arguments.args), reversed(arguments.defaults)))
        pairs += [
            (argument, default) for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults) if default
        ]
        plain = (int, float, str)  # a truth value is an int
        names = {argument.arg for argument, default in pairs if isinstance(self.constant(default) or None, plain)}
        names |= {argument.arg for argument, default in pairs if self.constant(default) in (0, False)}
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and _name(call.func).endswith("kwargs.get") and len(call.args) == 2:
                numbers = isinstance(self.constant(call.args[1]), int | float)
                names |= {str(self.constant(call.args[0]))} if numbers else set()
        return names

    def _bound(self, function: ast.FunctionDef, text: str) -> str:
        """The returned expression with the function's own names replaced by what they are bound to, once."""
        for node in ast.walk(function):
            targets, value = _binding(node)
            if len(targets) == 1 and value is not None and re.search(rf"\b{targets[0]}\b", text):
                text += "|" + ast.unparse(value)
        return text

    def _reference(self, result: dict[str, Value]) -> dict[str, Value]:
        """Whether the model that the trainer gets differs from the checkpoint that its name leads to."""
        changed, reloaded = False, 0
        given = {"model", "policy", self.given}
        for call in sorted(self.calls, key=lambda call: (call.lineno, call.col_offset)):
            name = _name(call.func)
            last = name.split(".")[-1]
            other = last in ("load_state_dict", "merge_adapter") and name.rsplit(".", 1)[0] in given
            if last == "merge_and_unload" or other:
                changed = True
            if last == "save_pretrained" and changed:
                reloaded = call.lineno
            if last == "from_pretrained" and reloaded and "Token" not in name and call.lineno >= reloaded:
                changed = False
        trained = any("PeftModel" in _name(call.func) and _name(call.func).endswith("from_pretrained")
                      for call in self.calls)  # fmt: skip
        return {"changed_after_load": changed, "trained_adapter": trained and bool(result["adapter"])}


def _binding(node: ast.AST) -> tuple[list[str], ast.expr | None]:
    """Return the names that a statement binds, and to what."""
    if isinstance(node, ast.Assign):
        names: list[str] = []
        for target in node.targets:
            if isinstance(target, ast.Name):
                names.append(target.id)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                continue
        return names, node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id], node.value
    return [], None


def _stored(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _name(node: ast.AST) -> str:
    """Return the dotted name of what is called; calls inside are passed over."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _name(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return _name(node.func) if isinstance(node, ast.Call) else ""


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {word.arg: word.value for word in call.keywords if word.arg}


def _dtype(node: ast.expr, script: _Script) -> str | None:
    text = script.constant(node)
    text = text if isinstance(text, str) else _name(node)
    return next((kind for kind in ("bfloat16", "float16", "float32", "auto") if text.endswith(kind)), None)


def _is_constant(node: ast.expr | None) -> bool:
    """Whether a returned value is the same whatever the completion says."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # [0.5] * len(completions)
        return _is_constant(node.left)
    if isinstance(node, ast.ListComp):
        return _is_constant(node.elt)
    return isinstance(node, ast.List) and bool(node.elts) and all(map(_is_constant, node.elts))


def _arithmetic(node: ast.expr) -> Any:
    """Return the value of a product, a quotient, a sum or a power of numbers, such as 2 * 8."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _arithmetic(node.left), _arithmetic(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float) and abs(right) < 1e6:
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Div) and right:
                return left / right
            if isinstance(node.op, ast.Add):
                return left + right
    return None


def _conditional_calls(tree: ast.AST, conditional: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Yield each call, and whether it stands under an `if`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, conditional
        main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        yield from _conditional_calls(node, conditional or (isinstance(node, ast.If) and not main))
