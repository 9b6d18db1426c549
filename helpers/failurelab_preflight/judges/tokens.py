"""F12 and F13: a chat model that is asked without its template, and ends that are not seen.

F12: a plain string gets no chat template from trl. A chat model then goes on with the text instead of answering, and
mostly never ends; every scalar is that of completions that are too long. The other way round, a text that holds the
template already is given another beginning-of-sequence token by a release that adds special tokens.

F13: a completion ends where the model ends it, and is masked where the trainer sees an end. trl up to 1.14 knows one
id, the tokenizer's; a chat model may end its turn with another.

Upstream: TRL PR #7039 and #6357.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from failurelab_preflight.finding import Finding
from failurelab_preflight.judges.rows import (
    generates,
    known_ends,
    own_ends,
    prompt_ids,
    sample,
    token_ids,
    tokenizer_of,
)
from failurelab_preflight.repairs import Statement
from failurelab_preflight.rewards.references import is_conversation
from failurelab_preflight.training import Training

ROWS = 32
_TASK = re.compile(
    r"^\W*(what|who|how|why|when|where|which|is|are|can|please|solve|compute|calculate|find|write|explain|give|name|list|"
    r"translate|summari[sz]e|answer|add|multiply|count|describe|question|determine|evaluate|simplify|prove|classify|"
    r"choose|you are|your task|respond|reply)\b",
    re.IGNORECASE | re.MULTILINE,
)
_TURN = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": "Answer."}]


def judge_template(training: Training) -> Iterator[Finding]:
    """F12: plain prompts for a chat model, and a beginning-of-sequence token that the trainer adds once more."""
    trainer, tokenizer = training.trainer, tokenizer_of(training.trainer)
    rows = sample(training, ROWS)
    if tokenizer is None or not rows:
        return
    prompts = [row["prompt"] for row in rows if row.get("prompt")] if generates(trainer) else []
    yield from _beginning(training, tokenizer, prompts)
    if not prompts:
        return
    if is_conversation(prompts[0]):
        yield Finding.not_applicable("F12", "the prompts are messages: trl applies the chat template")
        return
    if not getattr(tokenizer, "chat_template", None):
        yield Finding.not_applicable("F12", "the tokenizer has no chat template, and the prompts are plain text")
        return
    mark = _mark(tokenizer)
    if not mark:
        yield Finding.not_checked("F12", "the chat template has no mark of its own that a prompt could be searched for")
        return
    plain = sum(mark not in prompt for prompt in prompts if isinstance(prompt, str))
    if not plain:
        yield _turn_opened(tokenizer, prompts, mark)
        return
    evidence = f"{plain} of {len(prompts)} prompts are plain text without the mark {mark!r} of the tokenizer's template"
    repair = 'Make each prompt a list of messages: {"prompt": [{"role": "user", "content": text}], …}.'
    turn = _turn_end(tokenizer)
    is_chat = turn in {tokenizer.eos_token_id, *own_ends(trainer.model)}
    if turn is not None and is_chat and 2 * sum(map(_is_asked, prompts)) > len(prompts):
        yield Finding.suspected(
            "F12",
            f"{evidence}; they ask or tell, and what ends a turn of the template, {_names(tokenizer, {turn})}, ends "
            "this model's texts: it is a chat model",
            "only the real model tells whether it answers plain text too",
            repair,
        )
    else:
        yield Finding.not_checked("F12", f"{evidence}; whether the model needs it, only the real model tells")


def _turn_opened(tokenizer: Any, prompts: Sequence[str], mark: str) -> Finding:
    """Tell prompts that the script templated itself, without the beginning of the assistant's turn."""
    with_turn, without = (
        tokenizer.apply_chat_template(_TURN[:1], tokenize=False, add_generation_prompt=turn) for turn in (True, False)
    )
    opening, closed = with_turn.removeprefix(without).strip(), without.rpartition(_TURN[0]["content"])[2].strip()
    shut = sum(prompt.rstrip().endswith(closed) for prompt in prompts) if opening and closed else 0
    evidence = f"every prompt holds the chat template's mark {mark!r} already"
    if not opening or opening == closed:
        return Finding.not_checked(
            "F12", f"{evidence}; the template has no beginning of its own for the assistant's turn"
        )
    if shut < len(prompts):
        return Finding.held(
            "F12",
            f"{evidence}, and {len(prompts) - shut} of {len(prompts)} have text behind the user's turn",
            f"without {opening!r} at the end all {len(prompts)} would end with {closed!r}",
        )
    return Finding(
        "F12",
        f"{evidence}, and ends with {closed!r}: without {opening!r} the assistant's turn does not begin, and the model "
        "has to write that itself",
        "Hand messages to trl, or give apply_chat_template add_generation_prompt=True.",
    )


def _is_asked(prompt: str) -> bool:
    """Return whether a text is a question or a task; one that ends in a cue, as `TL;DR:`, is to be gone on with."""
    text = prompt.strip()
    return not text.endswith((":", "=")) and bool(text.endswith((".", "?", "!")) or _TASK.search(text))


def _mark(tokenizer: Any) -> str:
    """Return what a template puts before a user's message, less the beginning of a sequence and blanks."""
    text = tokenizer.apply_chat_template(_TURN[:1], tokenize=False, add_generation_prompt=True)
    return text.partition(_TURN[0]["content"])[0].replace(tokenizer.bos_token or "\0", "").strip().rpartition("\n")[2]


def _beginning(training: Training, tokenizer: Any, prompts: Sequence[Any]) -> Iterator[Finding]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    if prompts:
        rows_ids = prompt_ids(training.trainer, prompts)
    else:
        rows_ids = [list(row["input_ids"]) for row in sample(training, ROWS, prepared=True) if "input_ids" in row]
    doubled = sum(ids[:2] == [bos, bos] for ids in rows_ids)
    if doubled:
        yield Finding(
            "F12",
            f"{doubled} of {len(rows_ids)} rows begin with {tokenizer.bos_token!r} twice: the text holds it already, "
            "and the tokenizer adds it again",
            "Hand messages to trl instead of text that apply_chat_template made, or take the token off the text.",
            part="begin",
        )


def judge_ends(training: Training) -> Iterator[Finding]:
    """F13: ends that the trainer does not see."""
    tokenizer = tokenizer_of(training.trainer)
    if tokenizer is None or getattr(tokenizer, "eos_token_id", None) is None:
        return
    if not generates(training.trainer):
        return
    options = training.arguments.get("generation_kwargs") or {}
    if odd := [name for name in ("min_new_tokens", "suppress_tokens", "bad_words_ids") if options.get(name)]:
        why = f"{' and '.join(odd)} of generation_kwargs may keep a completion from ending, which was not looked at"
        yield Finding.not_checked("F13", why)
        return
    yield _turns(training, tokenizer)


def _turns(training: Training, tokenizer: Any) -> Finding:
    trainer = training.trainer
    known = known_ends(trainer)
    config = own_ends(trainer.model)
    ends = f"the trainer ends a completion at {_names(tokenizer, known)}"
    own = token_ids((training.arguments.get("generation_kwargs") or {}).get("eos_token_id"))
    if own and not own & known:
        return Finding(
            "F13",
            f"generation stops at {_names(tokenizer, own)} (generation_kwargs), and {ends}: whatever stops is not seen "
            "to have ended, and what ends is gone on with",
            "Leave eos_token_id out of generation_kwargs, or give the tokenizer that token as eos_token.",
        )
    if config and not config & known and own & config and tokenizer.pad_token_id in known:
        return Finding.not_checked(
            "F13",
            f"generation stops at {_names(tokenizer, own)} (generation_kwargs), and {ends}, which is the padding too: "
            "the first padding after a completion counts as its end",
        )
    if config and not config & known:
        token = tokenizer.convert_ids_to_tokens(min(config))
        return Finding(
            "F13",
            f"{ends}, and the model's generation config says {_names(tokenizer, config)}: what the model ends with is "
            "not seen, and what follows counts as the completion",
            f"Set tokenizer.eos_token = {token!r} before the trainer is made.",
            undo=_set_end(token),
        )
    rows = sample(training, 1)
    turn = _turn_end(tokenizer)
    template = rows and (is_conversation(rows[0].get("prompt")) or (turn and _mark(tokenizer) in str(rows[0])))
    if (not template or turn is None) and config and config <= known:
        evidence = f"{ends}, as the model's generation config says; the prompts are without a chat template"
        return Finding.held(
            "F13", evidence, "if the tokenizer had another end token, the model's own would be missing from the list"
        )
    if not template or turn is None:
        return Finding.not_applicable("F13", f"{ends}; the prompts are without a chat template")
    if turn in known:
        others = ", ".join(map(repr, known - {turn})) or "none"
        return Finding.held(
            "F13",
            f"{ends}, which is the end of a turn in the chat template",
            f"without it the trainer would know {others}, and a turn would not be seen to end",
        )
    found = f"{ends}, and a turn of the chat template ends with {_names(tokenizer, {turn})}"
    token = tokenizer.convert_ids_to_tokens(turn)
    repair = f"Set tokenizer.eos_token = {token!r} before the trainer is made."
    if turn in config:
        evidence = f"{found}, which the model's generation config has too: after it, padding counts as the completion"
        return Finding("F13", evidence, repair, undo=_set_end(token))
    return Finding.not_checked("F13", f"{found}; whether this model ends its turns so, only the real model tells")


def _set_end(token: str) -> Statement:
    return Statement(f"{{tokenizer}}.eos_token = {token!r}", before="trainer")


def _turn_end(tokenizer: Any) -> int | None:
    """Return the special token that a template puts after an assistant's message; None if it puts none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    after = tokenizer.apply_chat_template(_TURN, tokenize=False).rpartition(_TURN[1]["content"])[2]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    return next((id for id in ids if id in special), None)


def _names(tokenizer: Any, ids: set[int]) -> str:
    return " or ".join(f"{tokenizer.convert_ids_to_tokens(id)!r} ({id})" for id in sorted(ids))
