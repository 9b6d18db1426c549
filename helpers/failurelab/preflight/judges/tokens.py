"""F12 and F13: a chat model that is asked without its template, and ends that are not seen.

F12: a plain string gets no chat template from trl. A chat model then goes on with the text instead of answering, and
mostly never ends; every scalar is that of completions that are too long. The other way round, a text that holds the
template already is given another beginning-of-sequence token by a release that adds special tokens.

F13: a completion ends where the model ends it, and is masked where the trainer sees an end. trl up to 1.14 knows one
id, the tokenizer's; a chat model may end its turn with another. In supervised fine-tuning a collator that masks padding
also masks the end, where both are one token: the model is never taught to end.

Upstream: TRL PR #7039 and #6357.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from failurelab.handles import keep_modes
from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.rows import (
    generates,
    known_ends,
    own_ends,
    prompt_ids,
    render_prompt,
    sample,
    token_ids,
    tokenizer_of,
)
from failurelab.preflight.repairs import Arguments, Statement
from failurelab.preflight.training import Training
from failurelab.rewards.references import is_conversation

ROWS = 32
_CHAT = re.compile(r"instruct|chat|zephyr|\bit\b|assistant", re.IGNORECASE)
_TASK = re.compile(
    r"^\W*(what|who|how|why|when|where|which|is|are|can|please|solve|compute|calculate|find|write|explain|give|name|list|"
    r"translate|summari[sz]e|answer|add|multiply|count|describe|question|determine|evaluate|simplify|prove|classify|"
    r"choose|you are|your task|respond|reply)\b",
    re.IGNORECASE | re.MULTILINE,
)
_TURN = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": "Answer."}]
_COLLATED = ("input_ids", "attention_mask", "labels", "completion_mask", "assistant_masks", "token_type_ids")
TOKENS, LONGEST = 64, 256  # drawn from a real model, to see whether it ends; the second where none ends in the first


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
        wrong: list[Finding] = []
        try:
            wrong += _templated(trainer, tokenizer, prompts) if getattr(tokenizer, "chat_template", None) else []
        except Exception as error:  # a template may refuse messages that are not the script's
            if not type(error).__module__.startswith("jinja2"):
                raise
        yield from wrong or [Finding.not_applicable("F12", "the prompts are messages: trl applies the chat template")]
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
    asked = None
    if not training.small:
        unmarked = [prompt for prompt in prompts if mark not in prompt][:4]
        asked = _ask_model(training, tokenizer, unmarked, evidence, repair)
    if asked is not None:
        yield asked
    elif turn is not None and is_chat and 2 * sum(map(_is_asked, prompts)) > len(prompts):
        yield Finding.suspected(
            "F12",
            f"{evidence}; they ask or tell, and what ends a turn of the template, {_names(tokenizer, {turn})}, ends "
            "this model's texts: it is a chat model",
            "whether it answers plain text too, only the real model tells (--real-model)",
            repair,
        )
    else:
        yield Finding.not_checked(
            "F12", f"{evidence}; whether the model needs it, only the real model tells (--real-model)"
        )


def _templated(trainer: Any, tokenizer: Any, prompts: Sequence[Any]) -> Iterator[Finding]:
    """Tell what a chat template leaves out of messages, a turn that it does not begin, and messages that hold it."""

    def render(messages: Any, **options: Any) -> str:
        return str(render_prompt(trainer, messages, tokenizer, **options))

    lost, parts = dict[str, list[str]](), list[Any]()
    for prompt in prompts:
        whole = "".join(render(prompt).split())
        for message in prompt:
            said = message.get("content")
            if isinstance(said, list) and said and "".join(str(said).split()) in whole:
                parts.append(said)
            if message["role"] in ("user", "system") and isinstance(said, str) and "".join(said.split()) not in whole:
                lost.setdefault(message["role"], []).append(said)
    if parts:
        evidence = (
            f"{len(parts)} messages hold a list of parts, and this template writes the list itself into the prompt"
        )
        repair = 'Give each message its text alone: {"role": "user", "content": text}. Lists are for models of images.'
        yield Finding("F12", f"{evidence}: {str(parts[0])[:80]}", repair, fault="parts")
    for role, said in lost.items():
        evidence = (
            f"the chat template leaves out what the {role} says in {len(said)} messages of {len(prompts)} prompts"
        )
        repair = "Write a template that goes through all messages, or put all that is needed into the user's message."
        yield Finding(
            "F12", f"{evidence}, such as {said[0][:60]!r}: the model never sees it", repair, fault=f"{role} lost"
        )
    mark = _mark(tokenizer)
    twice = [prompt for prompt in prompts if mark and not mark[0].isalnum() and mark in str(prompt[-1].get("content"))]
    if len(twice) == len(prompts):
        evidence = f"each prompt's last message holds the chat template's mark {mark!r}, and trl applies the template"
        repair = "Hand the messages to trl as they are, or the templated text as a plain string."
        yield Finding("F12", f"{evidence} again: the question stands in a template twice", repair, fault="twice")
    opened, shut = (render(_TURN[:1], add_generation_prompt=turn) for turn in (True, False))
    before = render(_TURN, continue_final_message=False).rpartition(_TURN[1]["content"])[0]
    missing = before.removeprefix(opened).strip() if before.startswith(opened) else ""
    if missing and opened == shut and prompts[0][-1]["role"] != "assistant":
        evidence = f"the chat template writes {missing!r} before an assistant's message, and not at the end of a prompt"
        repair = "End the template with {% if add_generation_prompt %} and what begins the assistant's turn."
        yield Finding(
            "F12", f"{evidence}: it ignores add_generation_prompt, so the model has to write that itself", repair
        )


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
            f"{evidence}, and {len(prompts) - shut} of {len(prompts)} go on after the user's turn",
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


def _ask_model(
    training: Training, tokenizer: Any, prompts: Sequence[str], evidence: str, repair: str
) -> Finding | None:
    """Let the real model answer the same prompts both ways, greedily; a chat model that needs its template ends so.

    None where it ends neither way, not even within the tokens that a completion may have: then it does not tell.
    """
    messages = ([{"role": "user", "content": text}] for text in prompts)
    chats = [tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) for message in messages]
    model = training.trainer.model
    limit = min(training.arguments.get("max_completion_length") or TOKENS, LONGEST)
    for tokens in dict.fromkeys((TOKENS, max(TOKENS, limit))):
        plain, templated = (_ended(model, tokenizer, texts, tokens=tokens) for texts in (prompts, chats))
        if plain or templated:
            break
    else:
        return None
    counted = (
        f"{evidence}; of {len(prompts)} greedy completions {plain} end within {tokens} tokens without the template, "
        f"and {templated} with it"
    )
    if templated > plain:
        return Finding("F12", counted, repair, tried=f"with the template {templated} of {len(prompts)} end")
    if not training.real:  # a small model that was made for a test may end anything
        return Finding.not_checked("F12", f"{counted}: here it makes no difference, on a small model")
    kept = _ended(model, tokenizer, prompts, may_end=False)
    return Finding.held("F12", counted, f"kept from ending, {kept} of {len(prompts)} do")


def _ended(model: Any, tokenizer: Any, texts: Sequence[str], may_end: bool = True, tokens: int = TOKENS) -> int:
    """Return how many greedy completions end; with `may_end=False` the model is kept from it, as a control."""
    ends, count = own_ends(model) | {tokenizer.eos_token_id}, 0
    with keep_modes(model), torch.no_grad():
        model.eval()
        for text in texts:
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
            drawn = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                eos_token_id=sorted(ends),
                pad_token_id=min(ends),
                suppress_tokens=None if may_end else sorted(ends),
            )
            count += bool(ends & set(drawn[0, ids.shape[1] :].tolist()))
    return count


def _beginning(training: Training, tokenizer: Any, prompts: Sequence[Any]) -> Iterator[Finding]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    if prompts:
        rows_ids = prompt_ids(training.trainer, prompts)
    else:
        rows = sample(training, ROWS, prepared=True)
        names = ("input_ids", "prompt_input_ids", "prompt_ids")
        name = next((name for name in names if rows and name in rows[0]), None)
        rows_ids = [list(row[name]) for row in rows] if name else []
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
    """F13: ends that the trainer does not see, and ends that are masked out of the labels."""
    tokenizer = tokenizer_of(training.trainer)
    if tokenizer is None or getattr(tokenizer, "eos_token_id", None) is None:
        return
    if generates(training.trainer):
        yield _kept_from_ending(training, tokenizer) or _turns(training, tokenizer)
    elif hasattr(training.trainer, "data_collator"):
        yield from _labels(training, tokenizer)


def _kept_from_ending(training: Training, tokenizer: Any) -> Finding | None:
    """Return what in generation_kwargs lets no completion end; None where nothing does."""
    options, ends = dict(training.arguments.get("generation_kwargs") or {}), known_ends(training.trainer)
    limit = options.get("max_new_tokens") or training.arguments.get("max_completion_length")
    words = {ids[0] for ids in options.get("bad_words_ids") or () if len(ids) == 1}
    least = options.get("min_new_tokens") or 0
    if limit and least >= limit:
        name, said = "min_new_tokens", f"min_new_tokens is {least}, and max_completion_length {limit}"
    elif ends <= (forbidden := words | token_ids(options.get("suppress_tokens"))):
        name = "bad_words_ids" if ends <= words else "suppress_tokens"
        said = f"{name} has {_names(tokenizer, ends & forbidden)}, the end"
    else:
        return None
    kept = {key: value for key, value in options.items() if key != name}
    return Finding(
        "F13",
        f"{said} (generation_kwargs): no completion can end, so all are cut at {limit} tokens, whatever stands in them",
        f"Take {name} out of generation_kwargs.",
        undo=Arguments({"generation_kwargs": kept or None}),
        fault=name,
    )


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
            "F13", evidence, "with another end token in the tokenizer, the model's own would be missing"
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
    name = training.loads[0].name if training.loads else ""
    if _CHAT.search(name.rstrip("/").split("/")[-1].replace("_", "-")):
        why = f"{name} is a chat model by its name alone; whether it ends so, only the real model tells (--real-model)"
        return Finding.suspected("F13", f"{found}: nothing stops the model there", why, repair)
    return Finding.not_checked(
        "F13", f"{found}; whether this model ends its turns so, only the real model tells (--real-model)"
    )


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


def _labels(training: Training, tokenizer: Any) -> Iterator[Finding]:
    """Collate real rows as the trainer does, and look at the label of each row's last end."""
    trainer, eos = training.trainer, tokenizer.eos_token_id
    rows = [
        row for row in sample(training, ROWS, prepared=True) if "input_ids" in row and eos in list(row["input_ids"])
    ]
    if not rows:
        return
    batch = trainer.data_collator([{key: row[key] for key in row if key in _COLLATED} for row in rows])
    if "labels" not in batch or batch["labels"].shape[0] != len(rows):
        return
    masked = 0
    for row, ids, labels in zip(rows, batch["input_ids"].tolist(), batch["labels"].tolist()):
        own = list(row["input_ids"])
        start = next((at for at in range(len(ids)) if ids[at : at + len(own)] == own), None)
        if start is None:
            return
        last = start + len(own) - 1 - own[::-1].index(eos)
        masked += labels[last] == -100
    evidence = f"{masked} of {len(rows)} rows have their last end {tokenizer.eos_token!r} masked out of the labels"
    if masked == len(rows) and tokenizer.pad_token_id == eos:
        yield Finding(
            "F13",
            f"{evidence}: it is the padding token too, so the model is never taught to end",
            "Give the tokenizer a padding token of its own (tokenizer.pad_token = …), another than the end.",
        )
    else:
        blind = batch["labels"].masked_fill(batch["input_ids"] == eos, -100)
        planted = int((blind != batch["labels"]).any(-1).sum())
        if planted:
            yield Finding.held(
                "F13", evidence, f"with the end masked as padding is, {planted} of {len(rows)} would have it"
            )
        else:
            yield Finding.not_checked("F13", f"{evidence}; no row of this batch has an end whose label could be masked")


def _names(tokenizer: Any, ids: set[int]) -> str:
    return " or ".join(f"{tokenizer.convert_ids_to_tokens(id)!r} ({id})" for id in sorted(ids))
