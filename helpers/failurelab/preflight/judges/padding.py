"""F13 in a script's own rollouts: the padding behind the end is trained on, or the end is lost.

trl takes each token that a `rollout_func`, or a `_generate` of one's own, returns for a token of the completion: the
mask is 1 for all of them. `generate` returns rows of one length, padded behind the end, so these have to be cut first.
A rollout function that makes texts of the ids, and encodes these again, loses the special token that ends them: with
`mask_truncated_completions` trl takes each for cut, and masks all of its tokens.

Upstream: trl's `GRPOTrainer._generate_and_score_completions`; MemGen PR #33.
"""

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from failurelab.handles import is_unseen, wrap_method
from failurelab.preflight.answer import Finding, Quantity
from failurelab.preflight.judges.contexts import ContextNotes, Draw, without_padding
from failurelab.preflight.judges.replaced import codes_of
from failurelab.preflight.judges.rows import known_ends, own_ends, tokenizer_of
from failurelab.preflight.repairs import Statement
from failurelab.preflight.training import Training
from failurelab.textbook.rows import Ids, cut_at_end

_MAKERS = ("rollout_func", "_generate", "_generate_single_turn")
_CUT = """\
def without_padding(prompts, trainer, rollout={trainer}.rollout_func):
    drawn, tokenizer = rollout(prompts, trainer), trainer.processing_class
    pad = tokenizer.pad_token_id
    for place, ids in enumerate(drawn["completion_ids"]):
        size = len(ids)
        while size > 1 and ids[size - 1] == pad and ids[size - 2] in (pad, *END_IDS):
            size -= 1
        for name in ("completion_ids", "logprobs", "env_mask"):
            if drawn.get(name):
                drawn[name][place] = drawn[name][place][:size]
    return drawn
{trainer}.rollout_func = without_padding"""


def count_padding(ids: Sequence[int], pad: int, ends: Collection[int]) -> int:
    """Return how many tokens at the beginning and at the end of a completion are padding.

    One token of the padding alone may have been drawn: behind an end none can be, and two in a row hardly are.
    """
    kept = list(ids)
    while len(kept) > 1 and kept[-1] == pad and (kept[-2] == pad or kept[-2] in ends):
        kept.pop()
    before = len(list(itertools.takewhile(lambda token: token == pad, kept)))
    return len(ids) - len(kept) + before * (before > 1)


def find_maker(training: Training) -> tuple[str, types.CodeType | None]:
    """Return the name of the function of the script's own that draws for the trainer, and its code; "" if none does."""
    for name in _MAKERS:
        value = getattr(training.trainer, name, None)
        if callable(value) and not inspect.isroutine(value) and not isinstance(value, functools.partial):
            value = type(value).__call__  # of an object that can be called, the code is its class's
        for code in codes_of(value):
            if training.own(code.co_filename):
                return name, code
    return "", None


class PaddingJudge:
    """Looks at the ids and the mask of each batch that the loss is computed of, where the script draws them itself."""

    def __init__(self, training: Training):
        self._trainer = training.trainer
        pad = getattr(tokenizer_of(self._trainer), "pad_token_id", None)
        self._maker, self._pad = ("", -1) if pad is None else (find_maker(training)[0], int(pad))
        self._rows = self._padded = self._tokens = self._trained = self._planted = self._masked = 0
        self._drawn: list[tuple[torch.Tensor, int, list[Ids]]] = []  # in a rollout: rows, prompts' width, and prompts
        self._contexts = ContextNotes(self._trainer, self._maker)
        self._draws: list[bool] = []  # of each completion that was drawn in a rollout, whether it has an end
        self._returned: list[list[int]] = []  # completions that rollout functions returned
        self._rolls_out = self._has_environment = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the batches that are trained on are looked at."""
        with contextlib.ExitStack() as stack:
            if self._maker:
                stack.enter_context(wrap_method(self._trainer, "compute_loss", self._note_batch, "watched"))
            model = self._trainer.accelerator.unwrap_model(self._trainer.model) if self._maker else None
            if self._maker == "rollout_func" and callable(getattr(model, "generate", None)):
                stack.enter_context(wrap_method(self._trainer, "rollout_func", self._note_rollout, "watched"))
                stack.enter_context(wrap_method(model, "generate", self._note_draw, "watched"))
            yield

    def _note_rollout(self, rollout: Any, *args: Any, **kwargs: Any) -> Any:
        self._drawn, self._rolls_out = [], True
        try:
            output = rollout(*args, **kwargs)
        finally:
            self._rolls_out = False
        ends = self._ends()
        # now, for others end what was drawn after it was noted here
        self._draws += [bool(ends & set(ids[width:].tolist())) for drawn, width, _ in self._drawn for ids in drawn]
        if isinstance(output, dict) and not is_unseen():
            self._returned += [[int(token) for token in ids] for ids in output.get("completion_ids") or ()]
            self._has_environment |= bool(output.get("env_mask"))
            draws = [
                Draw(context, cut_at_end(ids[width:].tolist(), frozenset(ends))[0])
                for drawn, width, contexts in self._drawn
                for context, ids in zip(contexts, drawn)
            ]
            self._contexts.note(draws, output, ends, self._pad)
        return output

    def _note_draw(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        drawn = getattr(output, "sequences", output)
        given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if self._rolls_out and not is_unseen() and isinstance(drawn, torch.Tensor) and isinstance(given, torch.Tensor):
            mask: Any = kwargs.get("attention_mask")
            mask = torch.ones_like(given) if getattr(mask, "shape", None) != given.shape else mask
            contexts = [without_padding(row[kept.bool()].tolist(), self._pad) for row, kept in zip(given, mask)]
            copies = len(drawn) // len(given)
            self._drawn.append((drawn, given.shape[1], [context for context in contexts for _ in range(copies)]))
        return output

    def _note_batch(self, compute_loss: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else None)
        if isinstance(inputs, dict) and {"completion_ids", "completion_mask"} <= inputs.keys() and not is_unseen():
            self._note(inputs)
        return compute_loss(*args, **kwargs)

    def _note(self, inputs: dict[str, torch.Tensor]) -> None:
        pad, ends = self._pad, self._ends()
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        for ids, kept in zip(inputs["completion_ids"], mask.bool()):
            padding = count_padding(ids[kept].tolist(), pad, ends)
            self._rows += 1
            self._masked += not kept.any()
            self._padded += bool(padding)
            self._tokens += padding
            self._trained += int(kept.sum())
            self._planted += count_padding(ids.tolist(), pad, ends)  # as with a mask of ones

    def _ends(self) -> set[int]:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return (known_ends(self._trainer) | own_ends(model)) - {None}

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen, after training, or after the error that ended it."""
        yield from self._contexts.answers()
        if not self._maker or not self._rows:
            return
        yield from self._lost_ends()
        if self._tokens:
            evidence = (
                f"{self._padded} of {self._rows} completions that {self._maker} returned hold their padding: "
                f"{self._tokens} of {self._trained} tokens that are trained on stand behind the end of a completion"
            )
            repair = f"Cut what {self._maker} returns at the end of each completion, and its logprobs likewise."
            cut = Statement(_CUT.replace("*END_IDS", ", ".join(map(str, sorted(self._ends())))))
            figures = (Quantity("padding that is trained on", self._tokens, "tokens", self._trained),)
            undo = cut if self._maker == "rollout_func" else None
            yield Finding("F13", evidence, repair, undo, part=self._maker, figures=figures)
        elif self._planted:
            evidence = f"none of {self._rows} completions that {self._maker} returned holds its padding"
            control = f"with a mask of ones {self._planted} tokens of it would be trained on"
            yield Finding.held("F13", evidence, control, part=self._maker)
        else:
            why = f"the completions that {self._maker} returned in the cut training are all of one length"
            yield Finding.not_checked(
                "F13", f"{why}: whether it cuts their padding off does not show", part=self._maker
            )

    def _lost_ends(self) -> Iterator[Finding]:
        """Yield whether ends that the policy drew stand in what a rollout function returned."""
        ends, drawn = self._ends(), sum(self._draws)
        kept, planted = (
            sum(bool(ends & set(ids)) for ids in rows)
            for rows in (self._returned, [ids[:-1] for ids in self._returned])
        )
        if not drawn or not self._returned or self._has_environment:  # an environment may end a completion itself
            return
        counts = f"{drawn} of {len(self._draws)} completions that the policy drew in it hold an end, and"
        if kept:
            said = f"{counts} {kept} of {len(self._returned)} that {self._maker} returned"
            if planted < kept:
                control = f"without the last token of each {planted} would"
                yield Finding.held("F13", said, control, part=self._maker, fault="end")
            return
        said = f"{counts} none of {len(self._returned)} that {self._maker} returned: it is lost on the way, as in text "
        said += "that is encoded again (F18)"
        repair = (
            f"Return from {self._maker} the ids that were drawn, up to the end and with it, and no text encoded again."
        )
        if getattr(self._trainer.args, "mask_truncated_completions", False) and self._masked == self._rows:
            said += (
                f". With mask_truncated_completions each is taken for cut: all tokens of {self._masked} of "
                f"{self._rows} completions are masked, so the loss and its gradient are 0"
            )
            figures = (Quantity("completions without a token that is trained on", self._masked, "", self._rows),)
            yield Finding("F13", said, repair, part=self._maker, fault="end", figures=figures)
        else:
            said += ": the policy is not trained on its end"
            why = "whether it was meant to be left out is not known"
            yield Finding.suspected("F13", said, why, repair, part=self._maker, fault="end")
