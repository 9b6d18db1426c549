"""F11: what does not fit: prompts that are cut, and completions of a real model that reach their limit.

A prompt that is too long loses its beginning (the system's message, the chat template's first mark) without a word.
That depends on the data alone, so it is counted on the real dataset with the real tokenizer. A completion that is cut
has no end and mostly no answer: its reward says nothing of the model. How long they are, only a real model tells.

Upstream: TRL #5697, PR #5759, #6263, #6369.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from failurelab import rollouts
from failurelab.handles import keep_random_state
from failurelab_preflight.answer import Finding, Verdict
from failurelab_preflight.judges.rows import generates, prompt_ids, prompt_limit, prompted, tokenizer_of
from failurelab_preflight.repairs import Arguments
from failurelab_preflight.training import Training

ROWS = 256
PROMPTS, CLIPPED = 0.1, 0.95  # shares from which on it is told
# A model of at most so many parameters is asked itself, with room from so many tokens on: a limit under that is meant
# for an answer of a word. It is given four times the room, and 512 tokens at most; most of its completions are 3 of 4.
SMALL, _ROOM, _MORE, _LONGEST, _MOSTLY = 20_000_000, 32, 4, 512, 0.75
_ASKED, _TIMES = 4, 4  # prompts, and completions of each


def judge_lengths(training: Training) -> Iterator[Finding]:
    """Tell the share of prompts that are longer than the limits of the trainer, and of completions that are cut."""
    trainer = training.trainer
    if not generates(trainer):
        return
    rows = prompted(training, ROWS)
    if not rows:
        yield Finding.not_checked("F11", "the dataset has no column `prompt` that could be read")
        return
    answers = [*_prompts(training, rows), *_pairs(training, rows), *_completions(training, rows)]
    if any(answer.verdict is Verdict.FOUND for answer in answers):
        answers = [answer for answer in answers if answer.verdict is Verdict.FOUND]
    yield from answers


def _prompts(training: Training, rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    limit = prompt_limit(training)
    if not limit:
        return
    lengths = [len(ids) for ids in prompt_ids(training.trainer, [row["prompt"] for row in rows])]
    cut = sum(length > limit for length in lengths)
    evidence = (
        f"{cut} of {len(rows)} prompts are longer than max_prompt_length {limit} (median {median(lengths):g} tokens, "
        f"longest {max(lengths)})"
    )
    if cut > PROMPTS * len(rows):
        yield Finding(
            "F11",
            f"{evidence}: they lose their beginning",
            f"Set max_prompt_length={max(lengths)}, or leave out the longest prompts.",
            undo=Arguments({"max_prompt_length": max(lengths)}),
            part="max_prompt_length",
        )
    else:
        yield Finding.held("F11", evidence, f"with a limit of 1 it would be {sum(length > 1 for length in lengths)}")


def _pairs(training: Training, rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Tell prompts that Online DPO draws from whole, and cuts from the left where it scores what it has drawn.

    `max_length` holds for prompt and completion together there, and what is over it is taken from the prompt alone. A
    trl trainer derived from it, such as XPO's, scores in its own way.
    """
    kinds = [kind.__name__ for kind in type(training.trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    limit, new = training.arguments.get("max_length"), training.arguments.get("max_new_tokens")
    if kinds[:1] != ["OnlineDPOTrainer"] or not limit or not new or {"image", "images"} & rows[0].keys():
        return  # with images it cuts nothing
    lengths = [len(ids) for ids in prompt_ids(training.trainer, [row["prompt"] for row in rows])]
    always, possible = (sum(length + more > limit for length in lengths) for more in (1, new))
    said = f"max_length is {limit}, for prompt and completion together"
    figures = (
        f"prompts have {median(lengths):g} tokens at the median and {max(lengths)} at most, max_new_tokens is {new}"
    )
    what = "it is drawn from the whole prompt, and scored without the prompt's beginning"
    wanted = max(lengths) + new
    repair = f"Set max_length={wanted}: the longest prompt and max_new_tokens."
    if always > PROMPTS * len(rows):
        evidence = (
            f"{said}: {always} of {len(rows)} prompts do not fit beside one token of a completion ({figures}), so "
        )
        undo = Arguments({"max_length": wanted})
        tried = f"0 of {len(rows)} do not fit within {wanted}"
        yield Finding("F11", f"{evidence}{what}", repair, undo=undo, tried=tried, part="max_length")
    elif possible > PROMPTS * len(rows):
        evidence = (
            f"{said}: {possible} of {len(rows)} prompts do not fit beside the longest completion ({figures}); then "
        )
        why = "how long this model's completions are, only the real model tells (--real-model)"
        yield Finding.suspected("F11", f"{evidence}{what}", why, repair, part="max_length")
    else:
        evidence = f"{said}: {possible} of {len(rows)} prompts do not fit beside the longest completion ({figures})"
        yield Finding.held("F11", evidence, f"with a max_length of {new} it would be {len(rows)}", part="max_length")


def _completions(training: Training, rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    own = (training.arguments.get("generation_kwargs") or {}).get("max_new_tokens")  # which trl hands on after its own
    name = "max_completion_length" if "max_completion_length" in training.arguments else "max_new_tokens"
    name = "max_new_tokens of generation_kwargs" if own else name
    limit = own or training.arguments.get(name)
    if not limit:
        return
    ratios = [record["completions/clipped_ratio"] for record in training.log if "completions/clipped_ratio" in record]
    uncut = getattr(training.trainer.args, "max_completion_length", None) == limit
    if training.small or training.ended or not uncut or not ratios:
        unknown = "how long the real model's completions are: only the real model tells (--real-model)"
        yield _drawn(training, rows, name, limit) or Finding.not_checked("F11", unknown)
        return
    share = sum(ratios) / len(ratios)
    shortest = min((record.get("completions/min_length", limit) for record in training.log), default=limit)
    if share == 1 and shortest < limit:
        why = (
            f"none of the completions has an end, and the shortest has {shortest:g} of {limit} tokens: it was not cut, "
            "and its end is missing"
        )
        if getattr(training.trainer, "rollout_func", None):
            why += (
                " where rollout_func returns it. An engine that stops at a text, or at a limit of its own, draws none; "
                "one that drew it has lost it in text that is encoded again (F18)"
            )
        yield Finding.not_checked("F11", why)
        return
    evidence = f"{share:.0%} of the completions reached max_completion_length {limit} without an end"
    if share >= CLIPPED:
        yield Finding(
            "F11",
            evidence,
            "Set a larger max_completion_length, or ask for shorter answers.",
            part="max_completion_length",
        )
    else:
        yield Finding.held("F11", evidence, f"told from {CLIPPED:.0%} on")


def _drawn(training: Training, rows: Sequence[dict[str, Any]], name: str, limit: int) -> Finding | None:
    """Return what a small model with its own weights says: none of its completions ends, and given more room most do.

    None where that does not tell: a model that never ends may be untrained, or asked about what it was not taught.
    """
    model, tokenizer = training.trainer.model, tokenizer_of(training.trainer)
    longer = min(_MORE * limit, _LONGEST)
    if training.small or not _ROOM <= limit < longer or sum(each.numel() for each in model.parameters()) > SMALL:
        return None
    ends = {tokenizer.eos_token_id, *(getattr(training.trainer, "eos_token_ids", None) or ())}
    temperature = training.arguments.get("temperature") or 1.0
    lengths: list[float] = []
    with keep_random_state(), torch.no_grad(), rollouts.safe_generation(model):
        torch.manual_seed(0)
        for ids in prompt_ids(training.trainer, [row["prompt"] for row in rows[:_ASKED]]):
            prompt = torch.tensor([ids] * _TIMES, device=model.device)  # (completions, prompt)
            texts = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=temperature,
                max_new_tokens=longer, eos_token_id=sorted(ends), pad_token_id=min(ends),
            )[:, len(ids) :].tolist()  # fmt: skip
            lengths += [next((n for n, id in enumerate(text, 1) if id in ends), math.inf) for text in texts]
    within, ended = (sum(length <= most for length in lengths) for most in (limit, longer))
    said = f"of {len(lengths)} completions of this model {within} end within {name} {limit}"
    if within >= _MOSTLY * len(lengths):
        return Finding.held("F11", said, f"within 1 token {sum(length <= 1 for length in lengths)} would")
    if within > (1 - CLIPPED) * len(lengths) or ended < _MOSTLY * len(lengths):
        return None
    needed = int(sorted(lengths)[math.ceil(_MOSTLY * len(lengths)) - 1]) + 1
    return Finding(
        "F11",
        f"{said}, and {ended} within {longer}: it answers, and is cut before its end",
        f"Set {name} to twice what most of them need, {2 * needed}.",
        undo=Arguments({name: 2 * needed}) if name in training.arguments else None,
        tried=f"{ended} of {len(lengths)} end within {longer}",
        part="max_completion_length",
    )
