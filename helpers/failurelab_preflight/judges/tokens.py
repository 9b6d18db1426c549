"""F12 and F13: a chat model that is asked without its template, and ends that are not seen.

F12: a plain string gets no chat template from trl. A chat model then goes on with the text instead of answering, and
mostly never ends; every scalar is that of completions that are too long. The other way round, a text that holds the
template already is given another beginning-of-sequence token by a release that adds special tokens.

F13: a completion ends where the model ends it, and is masked where the trainer sees an end. trl up to 1.14 knows one
id, the tokenizer's; a chat model may end its turn with another.

Upstream: TRL PR #7039 and #6357.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from failurelab import plants
from failurelab.measure import counts
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
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.repairs import Statement
from failurelab_preflight.rewards.references import is_conversation
from failurelab_preflight.training import Training

ROWS = 32
_TURN = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": "Answer."}]
_FORBID = ("min_new_tokens", "suppress_tokens", "bad_words_ids")  # options that may keep a completion from ending


def judge_template(training: Training) -> Iterator[Finding]:
    """F12: plain prompts for a chat model, and a beginning-of-sequence token that the trainer adds once more."""
    tokenizer = tokenizer_of(training.trainer)
    if tokenizer is None:
        return
    prompts = [row["prompt"] for row in sample(training, ROWS) if row.get("prompt")]
    prompts = prompts if generates(training.trainer) else []
    yield from _begun_twice(training, tokenizer, prompts)
    if prompts:
        yield _templated(training, tokenizer, prompts)


def _templated(training: Training, tokenizer: Any, prompts: Sequence[Any]) -> Finding:
    if is_conversation(prompts[0]):
        return Finding.not_applicable("F12", "the prompts are messages: trl applies the chat template")
    if not getattr(tokenizer, "chat_template", None):
        return Finding.not_applicable("F12", "the tokenizer has no chat template, and the prompts are plain text")
    begin, mark = _marks(tokenizer)
    if not mark:
        why = "the chat template puts nothing before an answer that a prompt could be searched for"
        return Finding.not_checked("F12", why)
    texts = [str(prompt) for prompt in prompts]
    last = [text.rpartition(begin)[2] if begin else text for text in texts]  # behind the last turn of a user
    figures, controls = counts.of_texts(last, mark), {"a prompt as plain text": plants.plain_text(last, mark)}
    evidence = (
        f"{figures['prompts_without_template']} of {len(texts)} prompts are text without {mark!r}, with which the chat "
        "template begins an answer"
    )
    if settled := settle("F12", [figures], controls, evidence):
        return settled
    turn = _turn_end(tokenizer)
    name = "" if turn is None else tokenizer.convert_ids_to_tokens(turn)
    is_chat = turn in {tokenizer.eos_token_id, *own_ends(training.trainer.model)}
    asked = sum(text.rstrip().endswith((".", "?", "!")) or name in text for text in texts)
    if not name or not is_chat or 2 * asked <= len(texts):
        return Finding.not_checked("F12", f"{evidence}; whether the model needs it, only the real model tells")
    return Finding.suspected(
        "F12",
        f"{evidence}; what ends a turn of the template, {name!r}, ends this model's texts: it is a chat model",
        "only the real model tells whether it answers plain text too",
        'Make each prompt a list of messages: {"prompt": [{"role": "user", "content": text}], …}; or give '
        "apply_chat_template add_generation_prompt=True.",
    )


def _marks(tokenizer: Any) -> tuple[str, str]:
    """Return what a template puts before a user's message, less the beginning of a sequence, and before the answer."""
    text = tokenizer.apply_chat_template(_TURN[:1], tokenize=False, add_generation_prompt=True)
    before, _, after = text.partition(_TURN[0]["content"])
    return before.replace(tokenizer.bos_token or "\0", "").strip().rpartition("\n")[2], after.strip()


def _begun_twice(training: Training, tokenizer: Any, prompts: Sequence[Any]) -> Iterator[Finding]:
    bos = tokenizer.bos_token_id
    if prompts:
        rows = prompt_ids(training.trainer, prompts)
    else:
        rows = [list(row["input_ids"]) for row in sample(training, ROWS, prepared=True) if "input_ids" in row]
    doubled = sum(ids[:2] == [bos, bos] for ids in rows)
    if doubled and bos is not None:
        yield Finding(
            "F12",
            f"{doubled} of {len(rows)} rows begin with {tokenizer.bos_token!r} twice: the text holds it already, "
            "and the tokenizer adds it again",
            "Hand messages to trl instead of text that apply_chat_template made, or take the token off the text.",
            part="begin",
        )


def judge_ends(training: Training) -> Iterator[Finding]:
    """F13: ends of a completion that the trainer does not see."""
    trainer, tokenizer = training.trainer, tokenizer_of(training.trainer)
    if getattr(tokenizer, "eos_token_id", None) is None or not generates(trainer):
        return
    options = training.arguments.get("generation_kwargs") or {}
    if odd := [name for name in _FORBID if options.get(name)]:
        why = f"{' and '.join(odd)} of generation_kwargs may keep a completion from ending, which was not looked at"
        yield Finding.not_checked("F13", why)
        return
    known, own, given = known_ends(trainer), own_ends(trainer.model), token_ids(options.get("eos_token_id"))
    turn = _turn_end(tokenizer)
    prompt = next((row.get("prompt") for row in sample(training, 1)), None)
    templated = turn is not None and (is_conversation(prompt) or _marks(tokenizer)[0] in str(prompt))
    turns = {turn} if turn is not None and templated else set()  # what the template ends a turn with
    ends = turns & (given or own) or given or own
    unsure = turns - ends - (known if given else set())  # a turn's end, at which the model does not stop
    evidence = f"a completion ends with {_names(tokenizer, ends)}; the trainer looks for {_names(tokenizer, known)}"
    if not ends or (ends - known and ends & known) or (unsure and not ends | unsure <= known):
        why = f"{evidence}; the template ends a turn with {_names(tokenizer, turns)}" if turns else evidence
        yield Finding.not_checked("F13", f"{why}; which of them this model draws, only the real model tells")
    else:
        yield _seen(tokenizer, ends, known, evidence, given)


def _seen(tokenizer: Any, ends: set[int], known: set[int], evidence: str, given: set[int]) -> Finding:
    """Tell whether the trainer knows the tokens that completions end with; `given` are those of generation_kwargs."""
    completions = [[end] for end in ends]
    controls = {"an end of another token": plants.another_end(completions, ends, 2)}
    figures = counts.of_completions(completions, ends, known, 2)
    if settled := settle("F13", [figures], controls, evidence, "another end"):
        return settled
    token = tokenizer.convert_ids_to_tokens(min(ends))
    evidence += ": what ends is not seen to have ended, and the padding after it counts as the completion"
    if given:
        repair = "Leave eos_token_id out of generation_kwargs, or give the tokenizer that token as eos_token."
        return Finding("F13", evidence, repair)
    undo = Statement(f"{{tokenizer}}.eos_token = {token!r}", before="trainer")
    return Finding("F13", evidence, f"Set tokenizer.eos_token = {token!r} before the trainer is made.", undo=undo)


def _turn_end(tokenizer: Any) -> int | None:
    """Return the special token that a template puts after an assistant's message; None if it puts none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    after = tokenizer.apply_chat_template(_TURN, tokenize=False).rpartition(_TURN[1]["content"])[2]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    return next((id for id in ids if id in special), None)


def _names(tokenizer: Any, ids: set[int]) -> str:
    return " or ".join(f"{tokenizer.convert_ids_to_tokens(id)!r} ({id})" for id in sorted(ids)) or "no known token"
