"""What the untrained model gets for its own completions: whether answers belong to prompts, and whether it can begin.

A shuffled dataset, prompts that are far too hard, a form that the model never writes: no cut run can know of it. The
look that would tell is the same for all: a few completions of the untrained model, read beside their rewards. With the
real weights that look is taken here; and of a small model that was not cut, where it answers right and gets nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from failurelab import rollouts
from failurelab.handles import keep_random_state
from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.lengths import SMALL
from failurelab.preflight.judges.rewards import make_inputs
from failurelab.preflight.judges.rows import prompt_ids, prompted, tokenizer_of
from failurelab.preflight.training import Training
from failurelab.rewards import figures, references, signature
from failurelab.rewards.asking import Asker
from failurelab.rewards.forms import Completion
from failurelab.rewards.table import quote

FAILURE = "first rewards"
PROMPTS, COMPLETIONS, TOKENS = 4, 4, 256
_OF_SMALL, _SHORT, _RIGHT = 8, 64, 4  # of a small model: prompts, completions of each; tokens; right ones of all


def judge_first_rewards(training: Training) -> Iterator[Finding]:
    """Let the real model answer a few prompts, and ask the reward functions; with a cut model tell what to look at."""
    functions = getattr(training.trainer, "reward_funcs", None)
    is_own = not training.real and not training.small
    rows = prompted(training, _OF_SMALL if is_own else PROMPTS)
    if not isinstance(functions, list) or not functions or not rows:
        return
    if is_own:
        yield from _own(training, functions, rows)
    if not training.real:
        yield Finding.not_checked(
            FAILURE,
            "whether these answers belong to these prompts, and whether the model gets any of them: let the untrained "
            "model answer a few prompts, and read its completions beside their rewards (--real-model does that)",
        )
        return
    if any(isinstance(function, torch.nn.Module) or id(function) in training.not_called for function in functions):
        yield Finding.not_checked(FAILURE, "not all reward functions could be asked")
        return
    drawn = _draw(training, rows, COMPLETIONS, TOKENS)
    totals = _pay(training, functions, rows, drawn)
    if not totals:
        yield Finding.not_checked(
            FAILURE, "a reward function gave no list of numbers for the untrained model's completions"
        )
        return
    place = max(range(len(drawn)), key=totals.__getitem__)
    of_rows = [{total for completion, total in zip(drawn, totals) if completion.row == row} for row in range(len(rows))]
    apart = sum(len(values) > 1 for values in of_rows)
    evidence = (
        f"{len(drawn)} completions of the untrained model got {figures.span(totals)}, and differ for {apart} of "
        f"{len(rows)} prompts; the best: {quote(drawn[place].text, 100)}"
    )
    if apart:
        yield Finding.held(
            FAILURE, evidence, f"with one completion {COMPLETIONS} times they would differ for 0 of {len(rows)}"
        )
        return
    yield Finding.suspected(
        FAILURE,
        f"{evidence}: no advantage to begin with",
        f"{len(rows)} prompts are few; read the completions beside their references",
        "Look whether the answers belong to the prompts, then use easier prompts, or train on examples first.",
    )


def _own(training: Training, functions: Sequence[Any], rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """Suspect rewards that are the same for all completions of a small model, some of which have the right answer."""
    asked = [name for function in functions for name in signature.asked_columns(function)]
    column = signature.reference_column(rows, asked)
    accused = training.rewards and any(flag.verdict in ("FOUND", "SUSPECTED") for flag in training.rewards.flags)
    size = sum(parameter.numel() for parameter in training.trainer.model.parameters())
    if (
        accused
        or column is None
        or size > SMALL
        or any(isinstance(each, torch.nn.Module) or id(each) in training.not_called for each in functions)
    ):
        return
    drawn = _draw(training, rows, _OF_SMALL, _SHORT)
    totals = _pay(training, functions, rows, drawn)
    answers = [next(iter(references.readings(row.get(column))), "") for row in rows]
    right = [each.text for each in drawn if answers[each.row] and answers[each.row] == each.text.strip()]
    if len(right) < _RIGHT or not totals or not figures.is_flat(drawn, totals):
        return
    yield Finding.suspected(
        "F10",
        f"{len(drawn)} completions of this small model got {figures.value(totals)}, and "
        f"{len(right)} of them are the right answer (column {column}), such as {quote(right[0])}: a right "
        "answer in the form in which it answers is paid like all others, so no completion has an advantage",
        f"{len(rows)} prompts are few",
        "Show the form that is paid in each prompt (a system message), pay the answer alone too, or train on examples "
        "of that form first.",
        fault="form",
    )


def _pay(
    training: Training, functions: Sequence[Any], rows: list[dict[str, Any]], drawn: Sequence[Completion]
) -> list[float]:
    """Return the sum that each completion gets; empty where a function gives no list of numbers."""
    inputs, weights = make_inputs(training, rows), signature.weights_of(training.trainer, len(functions))

    def make(places: Sequence[int]) -> dict[str, Any]:
        return inputs.make([drawn[place] for place in places])

    paid = [Asker(function).ask(make, len(drawn)).values for function in functions]
    if any(len(values) != len(drawn) for values in paid):
        return []
    return [sum(weight * (value or 0.0) for weight, value in zip(weights, row)) for row in zip(*paid)]


def _draw(training: Training, rows: Sequence[dict[str, Any]], times: int, tokens: int) -> list[Completion]:
    """Return completions of the trainer's model, as long as the script allows and at its temperature."""
    tokenizer, model = tokenizer_of(training.trainer), training.trainer.model
    limit = min(training.arguments.get("max_completion_length") or tokens, tokens)
    temperature = training.arguments.get("temperature") or 1.0
    completions = []
    with keep_random_state(), torch.no_grad(), rollouts.safe_generation(model):
        for number, ids in enumerate(prompt_ids(training.trainer, [row["prompt"] for row in rows])):
            prompt = torch.tensor([ids] * times, device=model.device)  # (completions, prompt)
            drawn = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=temperature,
                max_new_tokens=limit, pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            )  # fmt: skip
            texts = tokenizer.batch_decode(drawn[:, len(ids) :], skip_special_tokens=True)
            completions += [Completion(number, "other", f"drawn {place}", text) for place, text in enumerate(texts)]
    return completions
