"""What a trainer hands to its reward functions: the prompts, completions in the prompts' form, and the columns.

Where the run has called them already, it is what the trainer really handed over; else what every release does.
"""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transformers

from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges.rows import prompt_ids, tokenizer_of
from failurelab.reward_functions import source
from failurelab.reward_functions.completions import Probe, is_conversation, opened_by

_OWN = ("prompts", "completions", "prompt", "completion", "completion_ids")
FORMS: dict[str, Callable[[str], Any]] = {
    "plain text": str,
    "a list of messages": lambda text: [{"role": "assistant", "content": text}],
    "a message": lambda text: {"role": "assistant", "content": text},
}
_TAIL = 48  # tokens at the end of a prompt, where a template writes the beginning of the completion


class Arguments:
    """The keyword arguments of calls, for rows of the script's dataset.

    Attributes:
        rows: of the dataset, with a prompt each.
        form: of the completions: plain text, or a list of messages.
        columns: of the dataset that reach a reward function.
    """

    def __init__(self, seen: Seen, rows: Sequence[Mapping[str, Any]]):
        self.rows, self.trainer, self.handed = rows, seen.trainer, seen.handed
        self.form = "a list of messages" if is_conversation(rows[0]["prompt"]) else "plain text"
        names = [name for name in rows[0] if name not in _OWN]
        if self.handed is not None:
            names = [name for name in names if name in self.handed]
        elif getattr(getattr(self.trainer, "args", None), "remove_unused_columns", False):
            names = []
        self.columns = names

    def make(
        self,
        probes: Sequence[Probe],
        *,
        rows: Sequence[Mapping[str, Any]] = (),
        form: str = "",
        change: Callable[[str], str] = str,
        columns: Mapping[str, Callable[[Mapping[str, Any]], Any]] | None = None,
        without: Sequence[str] = (),
        wanted: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the arguments of one call.

        Args:
            probes: the completions.
            rows: other rows than its own, of which each probe has the place.
            form: one of FORMS to hand them over in, whatever the prompts are.
            change: of each completion's text.
            columns: what stands in a column instead, by its name: a function of the row.
            without: arguments that are left out.
            wanted: the arguments that the function names.
        """
        texts, rows = [change(probe.text) for probe in probes], rows or self.rows
        write = FORMS[form or self.form]
        made: dict[str, Any] = {
            "prompts": [copy.deepcopy(rows[probe.row]["prompt"]) for probe in probes],
            "completions": [write(each) for each in texts],
        }
        for name in dict.fromkeys([*self.columns, *(columns or ())]):
            read = (columns or {}).get(name) or operator.itemgetter(name)
            made[name] = [copy.deepcopy(read(rows[probe.row])) for probe in probes]
        more = self.handed
        if more is None:  # the run called none: what a function asks for, as releases hand it over
            state = getattr(self.trainer, "state", None) or transformers.TrainerState()
            usual = {"completion_ids": None, "trainer_state": state, "log_extra": _nothing, "log_metric": _nothing}
            more = {name: value for name, value in usual.items() if name in wanted}
        for name, value in more.items():
            if name == "completion_ids":
                made[name] = self._ids(texts)
            elif name not in _OWN and name not in self.rows[0]:
                made[name] = _nothing if callable(value) else value
        return {name: value for name, value in made.items() if name not in without}

    def missing(self, function: Callable[..., Any]) -> tuple[list[str], list[str]]:
        """Return the arguments that a function asks for and is not given, and those that it does not take."""
        parameters = source.parameters(function)
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        wanted = [each.name for each in named]
        given = self.names(wanted)
        lacking = [each.name for each in named if each.default is each.empty and each.name not in given]
        takes_all = not parameters or any(each.kind is each.VAR_KEYWORD for each in parameters)
        return lacking, [] if takes_all else [name for name in given if name not in wanted]

    def names(self, wanted: Sequence[str] = ()) -> list[str]:
        """Return the names of what is handed over."""
        return list(self.make([], wanted=wanted))

    def opened(self) -> str:
        """Return what the prompt of a generation has written of the completion: `<think>` and a line break, say."""
        prompt = self.rows[0]["prompt"]
        if self.form == "plain text":
            return opened_by(prompt) if isinstance(prompt, str) else ""
        tokenizer = tokenizer_of(self.trainer)
        if not getattr(tokenizer, "chat_template", None):
            return ""
        (ids,) = prompt_ids(self.trainer, [prompt])
        return opened_by(tokenizer.decode(ids[-_TAIL:], clean_up_tokenization_spaces=False))

    def _ids(self, texts: Sequence[str]) -> list[Any]:
        tokenizer = tokenizer_of(self.trainer)
        if not texts or tokenizer is None:
            return []
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for the trainer's own log: what is asked here is no part of the run."""
