"""What a trainer really did in an optimizer step, from independent evidence.

Listened to, on this one trainer, and given back afterwards:

- `model.generate`, or the trainer's `rollout_func`: the prompts that were given, and the token ids that were drawn,
- the reward functions: the texts that they were given, and what they returned,
- `training_step` and `compute_loss`: which completions a micro-batch trains on,
- `accelerator.clip_grad_norm_`: the gradient before it is clipped.

The trainer's own advantages, masks and log-probabilities are not read. A subclass may override any method: each of
these is called on the object at hand.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from failurelab.handles import wrap_method
from failurelab.textbook.gradient import Gradient, score_old
from failurelab.textbook.rows import Row, cut_at_end

Ids = tuple[int, ...]


@dataclasses.dataclass
class Drawn:
    """A completion as generation returned it.

    Attributes:
        prompt: ids that the model was given, without padding.
        completion: ids that came back, up to the end.
        ended: whether there was one.
        padded: lengths of prompt and completion as they were padded.
    """

    prompt: Ids
    completion: Ids
    ended: bool
    padded: tuple[int, int]


@dataclasses.dataclass
class Asked:
    """One call of the reward functions: what they were given, and what each returned."""

    texts: list[Any]
    prompts: list[Any]
    kwargs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]]
    rewards: dict[int, list[float | None]]


@dataclasses.dataclass
class Evidence:
    """What is known of one optimizer step.

    Attributes:
        rows: of all generations that the step takes rows from.
        gradient: the trainer's, before it was clipped, in float32; zeros where a parameter got none.
        without: names of the parameters that got none.
        problems: why nothing can be judged, if so.
        other_texts: completions whose text was not what the reward functions were given, and of how many.
        example: one of them: what was drawn, and what was given.
        asked: calls of the reward functions that the rows come from.
        in_order: whether the micro-batches' own rows could not be told by their ids, and were taken in order.
    """

    rows: list[Row]
    gradient: Gradient
    without: list[str]
    problems: list[str]
    other_texts: tuple[int, int] = (0, 0)
    example: tuple[str, str] | None = None
    asked: list[Asked] = dataclasses.field(default_factory=list)
    in_order: bool = False


@dataclasses.dataclass
class _Batch:
    """One generation with its rewards."""

    rows: list[Row]
    asked: Asked
    step: int
    problems: list[str]
    other_texts: int
    example: tuple[str, str] | None


class Recorder:
    """Listens to a trainer from `attach` to `detach`.

    Args:
        trainer: a GRPO trainer.
        wanted: says of an optimizer step, counted from 1, whether it is to be compared.
    """

    def __init__(self, trainer: Any, wanted: Callable[[int], bool]):
        self.trainer, self.wanted = trainer, wanted
        self._attached = contextlib.ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._inside = False
        self._drawn: list[Drawn] = []
        self._asked: Asked | None = None
        self._batches: list[_Batch] = []
        self._micros: list[tuple[list[tuple[Ids, Ids]] | None, range]] = []  # rows by their ids, new batches
        self._gradient: tuple[Gradient, list[str]] | None = None
        self._problems: list[str] = []

    def _safely(self, work: Callable[..., None], *args: Any) -> None:
        """Do work of our own: an error in it must not end the run, and the step is not judged."""
        try:
            work(*args)
        except Exception as error:
            self._problems.append(f"{work.__name__.strip('_')}: {type(error).__name__}: {error}")

    def attach(self) -> None:
        """Begin to listen."""
        self.detach()
        self._forget()
        trainer, stack = self.trainer, self._attached
        model = trainer.accelerator.unwrap_model(trainer.model)
        if getattr(trainer, "rollout_func", None) is not None:
            stack.enter_context(wrap_method(trainer, "rollout_func", self._rollout, "textbook: rollouts recorded"))
        stack.enter_context(wrap_method(model, "generate", self._generate, "textbook: drawn tokens recorded"))
        stack.enter_context(wrap_method(trainer, "training_step", self._training_step, "textbook: micro-batches"))
        stack.enter_context(wrap_method(trainer, "compute_loss", self._compute_loss, "textbook: rows recorded"))
        stack.enter_context(
            wrap_method(trainer.accelerator, "clip_grad_norm_", self._clip, "textbook: gradient before clipping")
        )
        self._listen_to_rewards()

    def detach(self) -> None:
        """Give everything back."""
        self._attached.close()

    # what is listened to

    def _listen_to_rewards(self) -> None:
        functions = self.trainer.reward_funcs
        before = list(functions)
        self.functions = before

        def put_back() -> None:
            for index, function in enumerate(before):
                if index < len(functions) and functions[index] is listened[index]:
                    functions[index] = function

        listened: list[Any] = list(before)
        self._attached.callback(put_back)
        for index, function in enumerate(before):
            if isinstance(function, nn.Module):
                hook = function.register_forward_hook(functools.partial(self._reward_model, index))
                self._attached.callback(hook.remove)
            else:
                listened[index] = self._listen(function, index)
                functions[index] = listened[index]

    def _listen(self, function: Callable[..., Any], index: int) -> Callable[..., Any]:
        """Return the function, listened to: what it gives is the same."""
        named = function if hasattr(function, "__name__") else type(function)
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

            @functools.wraps(named)
            async def listened(*args: Any, **kwargs: Any) -> Any:
                rewards = await function(*args, **kwargs)
                self._safely(self._rewards, index, args, kwargs, rewards)
                return rewards

        else:

            @functools.wraps(named)
            def listened(*args: Any, **kwargs: Any) -> Any:
                rewards = function(*args, **kwargs)
                self._safely(self._rewards, index, args, kwargs, rewards)
                return rewards

        return listened

    def _reward_model(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self._safely(self._rewards, index, (), {}, output.logits[:, 0].tolist())

    def _rewards(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], rewards: Any) -> None:
        if not self._inside:
            return
        values = [None if value is None else float(value) for value in rewards]
        if self._asked is None:
            self._asked = Asked([], [], {}, {})
        asked = self._asked
        asked.rewards[index] = values
        asked.kwargs[index] = (args, kwargs)
        asked.texts = list(kwargs.get("completions", asked.texts))
        asked.prompts = list(kwargs.get("prompts", asked.prompts))
        if len(asked.rewards) == len(self.functions):
            self._asked = None
            self._close_batch(asked)

    def _rollout(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inside, self._inside = self._inside, False  # what it draws on its way to the answer is its own affair
        try:
            output = method(*args, **kwargs)
        finally:
            self._inside = inside
        if inside:
            self._safely(self._record_rollouts, output)
        return output

    def _record_rollouts(self, output: dict[str, Any]) -> None:
        if "env_mask" in output:
            self._problems.append("rollout_func returns env_mask: tokens that are not the policy's own")
        prompts, completions = output["prompt_ids"], output["completion_ids"]
        width = max(map(len, prompts), default=0), max(map(len, completions), default=0)
        ends = self._ends(None)
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = tuple(int(token) for token in completion)  # of several turns: the last id says how it ended
            ended = bool(ids) and ids[-1] in ends
            self._drawn.append(Drawn(tuple(int(token) for token in prompt), ids, ended, width))

    def _generate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        if self._inside:
            self._safely(self._record_generation, args, kwargs, output)
        return output

    def _record_generation(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        if given is None:
            self._problems.append("generate was not given token ids")
            return
        attended = kwargs.get("attention_mask")
        attended = torch.ones_like(given) if attended is None else attended
        width, copies = given.shape[1], len(sequences) // len(given)
        ends = self._ends(kwargs.get("generation_config"))
        prompts = [tuple(row[kept.bool()].tolist()) for row, kept in zip(given, attended)]
        for number, row in enumerate(sequences.tolist()):
            completion, ended = cut_at_end(row[width:], ends)
            self._drawn.append(Drawn(prompts[number // copies], completion, ended, (width, len(row) - width)))

    def _ends(self, config: Any) -> frozenset[int]:
        """Return the ids that end a completion: of the call, else of the model, else of the tokenizer."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        for source in (config, getattr(model, "generation_config", None), _tokenizer(self.trainer)):
            ends = getattr(source, "eos_token_id", None)
            if ends is not None:
                return frozenset([ends] if isinstance(ends, int) else [int(end) for end in ends])
        return frozenset()

    def _training_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inside = True
        known = len(self._batches)
        try:
            result = method(*args, **kwargs)
        finally:
            self._inside = False
        self._safely(self._keep_old, known)
        return result

    def _compute_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        known = len(self._batches)
        result = method(*args, **kwargs)
        if self._inside:
            self._safely(self._record_micro, kwargs.get("inputs", args[1] if len(args) > 1 else None), known)
        return result

    def _record_micro(self, inputs: Any, known: int) -> None:
        self._micros.append((_ids_of(inputs), range(known, len(self._batches))))

    def _clip(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.wanted(self.trainer.state.global_step + 1):
            self._safely(self._keep_gradient)
        return method(*args, **kwargs)

    def _keep_gradient(self) -> None:
        self._gradient = self._take_gradient()

    def _take_gradient(self) -> tuple[Gradient, list[str]]:
        gradient, without = {}, []
        for name, parameter in self.trainer.model.named_parameters():
            if parameter.requires_grad:
                grad = parameter.grad
                if grad is None:
                    without.append(name)
                    grad = torch.zeros_like(parameter)
                gradient[name] = grad.detach().to(torch.float32, copy=True)
        return gradient, without

    # what is made of it

    def _close_batch(self, asked: Asked) -> None:
        """Put generation and rewards together."""
        count, number = len(asked.rewards[0]), len(self._batches)
        drawn, self._drawn = self._drawn, []
        problems: list[str] = []
        if any(len(values) != count for values in asked.rewards.values()):
            problems.append("the reward functions returned different numbers of rewards")
        if len(drawn) != count:
            drawn = self._find_drawn(drawn, asked, count)
            if len(drawn) != count:
                problems.append("the completions that reward functions were given are not those that were drawn")
        if problems:
            self._batches.append(_Batch([], asked, self.trainer.state.global_step, problems, 0, None))
            return
        groups, problem = _groups(drawn, asked.prompts, int(self.trainer.num_generations))
        rows = []
        for place, each in enumerate(drawn):
            given = tuple(asked.rewards[index][place] for index in range(len(self.functions)))
            rows.append(Row(each.prompt, each.completion, each.ended, given, groups[place], number, None, each.padded))
        other, example = self._compare_texts(rows, asked.texts)
        problems = [problem] if problem else []
        self._batches.append(_Batch(rows, asked, self.trainer.state.global_step, problems, other, example))

    def _find_drawn(self, drawn: list[Drawn], asked: Asked, count: int) -> list[Drawn]:
        """Return the draws that the reward functions were asked about, by the ids that they were given."""
        wanted = next(
            (kwargs["completion_ids"] for _, kwargs in asked.kwargs.values() if "completion_ids" in kwargs), ()
        )
        left, found = list(drawn), []
        for ids in wanted:
            match = next((each for each in left if each.completion == tuple(ids)), None)
            if match is not None:
                left.remove(match)
                found.append(match)
        return found if len(found) == count else []

    def _compare_texts(self, rows: Sequence[Row], texts: Sequence[Any]) -> tuple[int, tuple[str, str] | None]:
        """Return how many texts were not what was drawn, and one of them."""
        tokenizer, other, example = _tokenizer(self.trainer), 0, None
        for row, given in zip(rows, texts):
            text = _plain_text(given)
            if text is None:
                continue
            drawn = _decode(tokenizer, row.completion, special=False)
            bare, own = _without_spaces(text), _without_spaces(drawn)
            if bare == own or (given is not text and bare.endswith(own)):  # a message may begin with the prompt's
                continue
            whole, padding = _without_spaces(_decode(tokenizer, row.completion, special=True)), tokenizer.pad_token
            if not bare.startswith(whole) or (padding and bare[len(whole) :].replace(padding, "")):
                other += 1
                example = example or (drawn, text)
        return other, example

    def _keep_old(self, known: int) -> None:
        """Keep the log-probabilities of new rows where a later step that is to be compared trains on them again."""
        args = self.trainer.args
        lasts = (getattr(args, "steps_per_generation", None) or 1) * (getattr(args, "num_iterations", None) or 1)
        steps = math.ceil(lasts / max(1, args.gradient_accumulation_steps))
        now = self.trainer.state.global_step + 1
        if steps > 1 and any(self.wanted(step) for step in range(now + 1, now + steps + 1)):
            pad = pad_id(self.trainer)
            for batch in self._batches[known:]:
                if batch.rows:
                    batch.rows = score_old(self.trainer.model, batch.rows, float(args.temperature), pad)

    def evidence(self) -> Evidence:
        """Return what is known of the step that ends now; to be asked before the optimizer steps."""
        gradient, without = self._gradient or self._take_gradient()
        problems = list(self._problems)
        if not self._batches:
            problems.append("no reward function was asked, or no tokens were drawn")
        if not self._micros:
            problems.append("the trainer's training_step did not call compute_loss")
        rows, in_order = self._match(problems)
        used = {row.batch for row in rows if row.micro is not None}
        rows = [row for row in rows if row.batch in used]
        if not problems:
            now = self.trainer.state.global_step
            stale = any(self._batches[n].step != now for n in used)
            if stale and any(row.old_logps is None for row in rows if self._batches[row.batch].step != now):
                problems.append("the completions are of an earlier step, whose policy was not recorded")
        batches = [self._batches[number] for number in sorted(used)]
        for batch in batches:
            problems += batch.problems
        other = sum(batch.other_texts for batch in batches), sum(len(batch.rows) for batch in batches)
        example = next((batch.example for batch in batches if batch.example), None)
        asked = [batch.asked for batch in batches]
        return Evidence(rows, gradient, without, problems, other, example, asked, in_order)

    def next_step(self) -> None:
        """Forget this step; generations that later steps train on again are kept."""
        self._micros, self._gradient, self._problems = [], None, []
        if self._batches:
            last = self._batches[-1].step
            for batch in self._batches:
                if batch.step < last:
                    batch.rows, batch.asked = [], Asked([], [], {}, {})

    def _match(self, problems: list[str]) -> tuple[list[Row], bool]:
        """Return the rows of the generations, each with the number of the micro-batch that trains on it.

        By the ids that compute_loss was given. Where these are not what was drawn, and the step trains on as many rows
        as were drawn for it, in order.
        """
        rows = [list(batch.rows) for batch in self._batches]
        where: dict[tuple[Ids, Ids], collections.deque[tuple[int, int]]] = {}
        for number, batch in enumerate(rows):
            for place, row in enumerate(batch):
                where.setdefault((row.prompt, row.completion), collections.deque()).append((number, place))
        lost = False
        for micro, (ids, new) in enumerate(self._micros):
            if ids is None:  # trl 0.14 generates in compute_loss: the micro-batch is what came of it
                for number in new:
                    rows[number] = [dataclasses.replace(row, micro=micro) for row in rows[number]]
                continue
            for prompt, completion in ids:
                place = _find(where, prompt, completion)
                if place is None:
                    lost = True
                    break
                number, index = place
                rows[number][index] = dataclasses.replace(rows[number][index], micro=micro)
        if lost:
            return self._in_order(problems), True
        if self._ambiguous(rows):
            problems.append("rows of the same tokens got different rewards, and the step trains on a part of them")
        return [row for batch in rows for row in batch], False

    def _in_order(self, problems: list[str]) -> list[Row]:
        """Return the rows drawn in this step, dealt to its micro-batches in order."""
        now = self.trainer.state.global_step
        fresh = [row for batch in self._batches if batch.step == now for row in batch.rows]
        sizes = [len(ids) for ids, _ in self._micros if ids is not None]
        if sum(sizes) != len(fresh):
            problems.append("the trainer trains on tokens that are not those that were drawn, on a part of them")
            return fresh
        micros = [micro for micro, size in enumerate(sizes) for _ in range(size)]
        return [dataclasses.replace(row, micro=micro) for row, micro in zip(fresh, micros)]

    def _ambiguous(self, rows: list[list[Row]]) -> bool:
        """Whether a row that is trained on has the tokens of one that is not, and another reward."""
        seen: dict[tuple[Ids, Ids], list[Row]] = {}
        for batch in rows:
            for row in batch:
                seen.setdefault((row.prompt, row.completion), []).append(row)
        return any(
            len({row.micro is None for row in same}) > 1
            and len({(row.batch, row.group, row.rewards) for row in same}) > 1
            for same in seen.values()
        )


def _find(
    where: dict[tuple[Ids, Ids], "collections.deque[tuple[int, int]]"], prompt: Ids, completion: Ids
) -> tuple[int, int] | None:
    """Return the place of a row, and take it away; the completion may be padded behind its end."""
    for length in range(len(completion), -1, -1):
        places = where.get((prompt, completion[:length]))
        if places:
            return places.popleft()
    return None


def _ids_of(inputs: Any) -> list[tuple[Ids, Ids]] | None:
    """Return prompts and completions that compute_loss was given; None where it was given the dataset's rows."""
    if not isinstance(inputs, dict) or "prompt_ids" not in inputs or "completion_ids" not in inputs:
        return None
    mask = inputs.get("prompt_mask")
    mask = torch.ones_like(inputs["prompt_ids"]) if mask is None else mask
    prompts = [tuple(row[kept.bool()].tolist()) for row, kept in zip(inputs["prompt_ids"], mask)]
    return list(zip(prompts, (tuple(row) for row in inputs["completion_ids"].tolist())))


def _groups(drawn: Sequence[Drawn], prompts: Sequence[Any], size: int) -> tuple[list[int], str | None]:
    """Return each row's group: `size` completions, one after another, of one prompt; and what speaks against it."""
    keys: Sequence[Any] = prompts if len(prompts) == len(drawn) else [each.prompt for each in drawn]
    groups = [place // size for place in range(len(drawn))]
    for place in range(len(drawn)):
        if keys[place] != keys[place - place % size]:
            return groups, f"the completions of a prompt do not stand together in groups of {size}"
    return groups, f"{len(drawn)} completions are no groups of {size}" if len(drawn) % size else None


def _plain_text(completion: Any) -> str | None:
    """Return the text of a completion; None where it was parsed into more than text."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and len(completion) == 1 and set(completion[0]) <= {"role", "content"}:
        content = completion[0].get("content")
        return content if isinstance(content, str) else None
    return None


def pad_id(trainer: Any) -> int:
    """Return the token id of the padding; 0 where the tokenizer names none."""
    return getattr(_tokenizer(trainer), "pad_token_id", None) or 0


def _without_spaces(text: str) -> str:
    """Return a text without blanks: decoders tidy them up in ways of their own."""
    return "".join(text.split())


def _decode(tokenizer: Any, ids: Ids, special: bool) -> str:
    """Return the text of ids, by the library below the tokenizer where there is one: `decode` may be overridden."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decode = tokenizer.decode if backend is None else backend.decode
    return decode(list(ids), skip_special_tokens=not special)


def _tokenizer(trainer: Any) -> Any:
    processing = trainer.processing_class
    return getattr(processing, "tokenizer", processing)
