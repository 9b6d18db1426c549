"""F7: completions that the trainer generates and that are not the policy's, for its cache goes wrong.

Upstream: the registry's F7.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from failurelab import _greedy, guards
from failurelab._unwrap import unwrap
from failurelab.errors import attempt
from failurelab.handles import is_unseen, wrap_method
from failurelab.textbook.draws import ends_of, read_generation
from failurelab.textbook.rows import Ids
from failurelab_preflight.finding import Finding, Quantity
from failurelab_preflight.judges.guarded import Guarded
from failurelab_preflight.judges.ledger import find_maker
from failurelab_preflight.judges.rows import prompt_ids, prompted
from failurelab_preflight.judges.settled import settle
from failurelab_preflight.repairs import Statement
from failurelab_preflight.stage import cuts
from failurelab_preflight.stage.cuts import NEW_TOKENS
from failurelab_preflight.training import Training

_MANY = 256  # rows of the dataset whose lengths are looked at
_OTHER_ENGINES = ("use_vllm", "use_transformers_continuous_batching", "use_transformers_paged")
_SAMPLING = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "num_beams",
    "repetition_penalty", "no_repeat_ngram_size",
)  # fmt: skip
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PREPARE = "_prepare_generation_config"  # where transformers puts a call's options and the model's together


class RolloutJudge:
    """Listens with a RolloutGuard, and notes the modes in which the trainer generates, and what options it gets."""

    def __init__(self, training: Training):
        self._training, self._trainer = training, training.trainer
        self._tokenizer = getattr(self._trainer, "processing_class", None)
        prompts = prompts_of_a_batch(training, self._tokenizer)
        more: dict[str, Any] = {"prompts": prompts, "max_new_tokens": NEW_TOKENS, "tokenizer": self._tokenizer}
        self._guarded = Guarded(lambda action: guards.RolloutGuard(action, **more), training.trainer)
        self._generated: set[bool] = set()  # in train mode, in eval mode
        self._prepared = any(training.arguments.get(option) for option in _OTHER_ENGINES)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the training is listened to."""
        self._guarded.listen()
        with contextlib.ExitStack() as stack:
            if callable(getattr(self._trainer.model, "generate", None)):
                stack.enter_context(wrap_method(self._trainer.model, "generate", self._note_mode, "watched"))
            inner = unwrap(self._trainer.model)
            if callable(getattr(inner, _PREPARE, None)) and not self._prepared:
                stack.enter_context(wrap_method(inner, _PREPARE, self._note_sampling, "options of generation noted"))
            yield

    def _note_sampling(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        """Note at the trainer's first generation which options of sampling come from the model's generation config.

        Some releases of transformers take the model's value where the trainer's is the library's default: no trainer
        can tell that it was chosen. Asked is the same call, with a model whose generation config has ends alone.
        """
        prepared = prepare(*args, **kwargs)
        if self._prepared or is_unseen():
            return prepared
        self._prepared = True
        model = prepare.__self__
        ends = {name: getattr(model.generation_config, name, None) for name in _ENDS}
        plain = type(model.generation_config)(**{name: value for name, value in ends.items() if value is not None})
        with mock.patch.object(model, "generation_config", plain):
            others = prepare(*args, **kwargs)[0]
        values = {name: (getattr(prepared[0], name, None), getattr(others, name, None)) for name in _SAMPLING}
        taken = {name: (value, other) for name, (value, other) in values.items() if value != other}
        self._training.model_defaults.update(taken)
        return prepared

    def _note_mode(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        self._generated.add(generate.__self__.training)
        output = generate(*args, **kwargs)
        if not is_unseen():
            attempt(self._note_draws, args, kwargs, output)  # after an error of ours these draws are not known
        return output

    def _note_draws(self, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Keep the completions of each prompt, as they were drawn: whether any of them differ is F10's."""
        model = unwrap(self._trainer.model)
        rows = read_generation(
            model, ends_of(kwargs.get("generation_config"), model, self._tokenizer), args, kwargs, output
        )
        groups: dict[Ids, list[Ids]] = {}  # Online DPO draws first one for each prompt, and then another
        for row in rows:
            groups.setdefault(row.prompt, []).append(row.completion)
        self._training.drawn += [group for group in groups.values() if len(group) > 1]

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen, after training, or after the error that ended it."""
        yield self._answer()

    def _answer(self) -> Finding:
        for option in _OTHER_ENGINES:
            if self._training.arguments.get(option):
                why = f"with {option} the trainer does not call model.generate, whose cache goes wrong"
                return Finding.not_applicable("F7", why)
        report = self._guarded.report
        if report is None:
            return self._not_judged()
        error = Quantity("draw_gap", report.error, "nats", report.rounding)
        evidence = f"tokens are drawn from the policy: log-probabilities differ by {report.error:.1e} at most"
        one = cuts.generates_for_one(self._trainer.args)
        evidence += "; held with one prompt a batch, and with two a failure of padding could show" * one
        if settled := settle("F7", [report.figures], report.planted, evidence, figures=(error,)):
            return settled
        own_config = "generation_config" in vars(self._trainer)
        return Finding(
            "F7",
            f"the completions that the trainer generates are not the policy's: log-probabilities are off by "
            f"{report.mean_error:.2f} a token on average, {report.error:.2f} at most, where rounding gives "
            f"{report.rounding:g} (gradient checkpointing {report.checkpointing}, "
            f"use_cache={report.use_cache}; figures of {self._training.model_name})",
            "trainer.generation_config.use_cache = False before training",
            undo=Statement("{trainer}.generation_config.use_cache = False") if own_config else None,
            figures=(Quantity("mean difference of a log-probability", report.mean_error, "nats a token"), error),
        )

    def _not_judged(self) -> Finding:
        """Return why the guard has no report."""
        why = self._guarded.failed
        if not why and True in self._generated:
            why = "tokens are generated in train mode, and no tokenizer is there to judge them"
        elif not why and self._generated and (maker := find_maker(self._training)[0]):
            why = f"{maker} of the script draws: whether it pads and masks prompts rightly was not looked at"
        elif not why and self._generated:
            return Finding.not_applicable("F7", "the trainer generates in eval mode, where nothing goes wrong")
        elif not why and not self._training.finished:
            why = "training ended before the trainer generated anything"
        elif not why and getattr(self._trainer, "reward_funcs", None):
            why = "the trainer's model generated nothing: something else draws"
        return Finding.not_checked("F7", why) if why else Finding.not_applicable("F7", "this trainer generates nothing")


def prompts_of_a_batch(training: Training, tokenizer: Any) -> list[Any] | None:
    """Return the shortest prompt and the longest that fits the model: in one batch, one of them is padded.

    Where those that are trained on have one length in tokens, another of the dataset stands for the longest. Of a
    trainer that generates for one prompt at a time, the longest alone. None where prompts are no plain texts.
    """
    trainer = training.trainer
    dataset = trainer.train_dataset
    if "prompt" not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "__len__"):
        return None
    own, others = ([row["prompt"] for row in rows] for rows in (dataset, prompted(training, _MANY)))
    if tokenizer is None or not own or not all(map(_is_text, own + others)):
        return None

    def fitting(prompts: list[Any]) -> list[tuple[int, Any]]:
        sizes = map(len, prompt_ids(trainer, prompts, tokenizer))
        ordered = sorted(zip(sizes, prompts), key=lambda pair: pair[0])
        return [pair for pair in ordered if _fits(trainer.model, tokenizer, pair[1])] or ordered

    own = fitting(own)
    if cuts.generates_for_one(trainer.args):
        return [own[-1][1]]
    (least, shortest), (most, longest) = own[0], own[-1]
    if least == most:
        longest = next((prompt for size, prompt in fitting(others) if size != least), longest)
    return [shortest, longest]


def _fits(model: Any, tokenizer: Any, prompt: Any) -> bool:
    """Whether a prompt leaves room for new tokens in the model's context."""
    with contextlib.suppress(ValueError):
        _greedy.encode(model, tokenizer, [prompt], NEW_TOKENS)
        return True
    return False


def _is_text(prompt: Any) -> bool:
    turns = prompt if isinstance(prompt, list) else [{"content": prompt}]
    return bool(prompt) and all(isinstance(turn.get("content"), str) for turn in turns)
