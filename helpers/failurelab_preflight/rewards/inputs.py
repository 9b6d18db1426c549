"""What a reward function is called with: prompts, completions in the prompts' form, and the columns of the rows."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from failurelab_preflight.rewards import signature
from failurelab_preflight.rewards.forms import Completion
from failurelab_preflight.rewards.references import is_conversation

OWN = ("prompts", "completions", "prompt", "completion", "completion_ids")  # no columns
FORMS: dict[str, Callable[[str], Any]] = {
    "plain text": lambda text: text,
    "a list of messages": lambda text: [{"role": "assistant", "content": text}],
    "a message": lambda text: {"role": "assistant", "content": text},
}


class Touched(BaseException):
    """Something was done with a completion; no function catches it by accident."""


def _touch(*_: Any) -> Any:
    raise Touched


# In the place of a completion: whatever is done with it, but for asking its class, ends the call.
_LEFT = {"__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__repr__", "__getattribute__"}
Untouchable = type(
    "Untouchable", (), dict.fromkeys({*dir(str), *dir(list), *dir(float), "__getattr__"} - _LEFT, _touch)
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The keyword arguments of calls about some rows.

    Attributes:
        rows: of the dataset, with a prompt each.
        columns: of the rows that reach a reward function.
        more: what it is given beside, by name; `completion_ids` are made anew, and what is called does nothing.
        usual: of `more`, what is given only to a function that names it.
        encode: returns the ids of texts; None where there is no tokenizer.
        form: of completions, one of FORMS; by default that of the prompts.
        special: tokens that the trainer leaves out where it decodes a completion, the longest first.
    """

    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[str]
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    encode: Callable[[list[str]], list[Any] | None] | None = None
    form: str = ""
    special: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.form:
            object.__setattr__(self, "form", form_of(self.rows[0]["prompt"]))

    def make(
        self,
        completions: Sequence[Completion],
        *,
        form: str = "",
        change: Callable[[str], Any] = str,
        columns: Mapping[str, Callable[[Mapping[str, Any]], Any]] | None = None,
        without: Sequence[str] = (),
        wanted: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the arguments of one call.

        Args:
            completions: asked about.
            form: one of FORMS to hand them over in, whatever the prompts are.
            change: of each completion's text.
            columns: what stands in a column instead, by its name: a function of the row.
            without: arguments that are left out.
            wanted: the arguments that the function names.
        """
        texts, rows = [each.text for each in completions], self.rows
        for token in self.special:
            texts = [text.replace(token, "") for text in texts]
        texts = [change(text) for text in texts]
        write = FORMS[form or self.form]
        call: dict[str, Any] = {
            "prompts": [copy.deepcopy(rows[each.row]["prompt"]) for each in completions],
            "completions": [write(text) for text in texts],
        }
        for name in dict.fromkeys([*self.columns, *(columns or ())]):
            read = (columns or {}).get(name) or operator.itemgetter(name)
            call[name] = [copy.deepcopy(read(rows[each.row])) for each in completions]
        more = dict(self.more) | {name: value for name, value in self.usual.items() if name in wanted}
        for name, value in more.items():
            if name == "completion_ids":
                plain = all(isinstance(text, str) for text in texts)
                call[name] = self.encode(texts) if self.encode and texts and plain else [] if plain else texts
            elif name not in OWN and name not in self.rows[0]:
                call[name] = _nothing if callable(value) else value
        return {name: value for name, value in call.items() if name not in without}

    def names(self, wanted: Sequence[str] = ()) -> list[str]:
        """Return the names of what is handed over."""
        return list(self.make([], wanted=wanted))

    def misfit(self, function: Callable[..., Any]) -> tuple[list[str], list[str]]:
        """Return the arguments that a function asks for and is not given, and those that it does not take."""
        parameters = signature.parameters(function, follow_wrapped=False)  # a decorator may give the others itself
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        wanted = [each.name for each in named]
        given = self.names(wanted)
        lacking = [each.name for each in named if each.default is each.empty and each.name not in given]
        takes_all = not parameters or any(each.kind is each.VAR_KEYWORD for each in parameters)
        return lacking, [] if takes_all else [name for name in given if name not in wanted]


def form_of(text: Any) -> str:
    """Return the form of a prompt or a completion."""
    return "a list of messages" if is_conversation(text) else "plain text"


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for the trainer's own log: what is asked here is no part of the run."""
