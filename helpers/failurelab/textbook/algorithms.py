"""The algorithms that there is a definition of, and which one a trainer means to be."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from transformers import Trainer

from failurelab.textbook.definition import GRPO, Definition
from failurelab.textbook.definition_online_dpo import ONLINE_DPO, PREFERENCES
from failurelab.textbook.definition_rloo import RLOO
from failurelab.textbook.fields import LOSSES, Left, Options


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An algorithm."""

    definition: Definition  # of its loss
    losses: tuple[str, ...] = LOSSES  # values of `loss_type` that the definition has
    # fields that are GRPO's alone, or whose evidence is taken from its trainer alone
    not_here: Mapping[str, Left] = dataclasses.field(default_factory=dict)
    # what options are otherwise than the arguments of these names say, from the trainer and these options
    change: Callable[[Any, Options], dict[str, Any]] = lambda trainer, options: {}

    def options(self, trainer: Any, temperature: float | None = None) -> Options:
        """Return the options that a trainer's arguments ask for, by the temperature that tokens were drawn at."""
        options = Options.of(trainer.args)
        options = dataclasses.replace(options, temperature=temperature or options.temperature)
        return dataclasses.replace(options, **self.change(trainer, options))


_OTHER_ENGINE = "another engine draws the tokens, and of this trainer they are not taken from it"
_NOT_HERE = {
    "fp16": Left((False,), "the gradients are scaled by a factor that the scaler changes"),
    "neftune_noise_alpha": Left((None, 0), "noise is added to the embeddings"),
    "sync_ref_model": Left((False,), "the reference model changes during training"),
    "use_transformers_continuous_batching": Left((False,), _OTHER_ENGINE),
    "use_transformers_paged": Left((None, False), _OTHER_ENGINE),
    "use_vllm": Left((False,), _OTHER_ENGINE),
}


def _of_rloo(trainer: Any, options: Options) -> dict[str, Any]:
    """The KL divergence is a part of the reward, and none of the loss; a loss of one kind, and no other scale."""
    return {"kl_in_reward": options.beta, "beta": 0.0, "scale_rewards": "none"}


def _of_online_dpo(trainer: Any, options: Options) -> dict[str, Any]:
    """The policy has no temperature; `beta` may be a list, with one for each epoch, and the last one for the rest."""
    beta: Any = trainer.args.beta
    if isinstance(beta, list | tuple):
        beta = beta[min(int(trainer.state.epoch or 0), len(beta) - 1)]
    return {"beta": float(beta), "temperature": 1.0, "asked_temperature": options.temperature}


def _of_async_grpo(trainer: Any, options: Options) -> dict[str, Any]:
    """A mean over all tokens of the step, with the ratio to what drew them; no KL divergence."""
    return {"loss_type": "dapo", "scale_rewards": "none", "beta": 0.0}


# Rewards of a row are the advantage that the queue gave it.
QUEUED = dataclasses.replace(GRPO, advantages=lambda rewards, *_: rewards.nansum(1))
ALGORITHMS: Mapping[str, Algorithm] = {
    "GRPOTrainer": Algorithm(GRPO),
    "RLOOTrainer": Algorithm(RLOO, not_here=_NOT_HERE, change=_of_rloo),
    "OnlineDPOTrainer": Algorithm(ONLINE_DPO, tuple(PREFERENCES), _NOT_HERE, _of_online_dpo),
    "AsyncGRPOTrainer": Algorithm(QUEUED, change=_of_async_grpo),
}


def algorithm_of(trainer: Any) -> Algorithm:
    """Return the algorithm that a trainer means to be; to be asked where `no_textbook` returns None."""
    return next(ALGORITHMS[kind.__name__] for kind in type(trainer).__mro__ if kind.__name__ in ALGORITHMS)


def no_textbook(trainer: Any) -> str | None:
    """Return why there is no textbook for a trainer, or None.

    A subclass that trl ships has an objective of its own, such as GMPO's. One of the user's is meant to be its base.
    """
    kinds = type(trainer).__mro__
    bases = [place for place, kind in enumerate(kinds) if kind.__name__ in ALGORITHMS]
    if not bases:
        return f"no textbook here for {type(trainer).__name__}"
    base = kinds[bases[-1]].__name__
    for kind in kinds[: bases[-1]]:
        if kind.__module__.partition(".")[0] == "trl":
            own = base.removesuffix("Trainer")
            return f"no textbook here for {kind.__name__}: a subclass of trl's own, with another objective than {own}'s"
    if getattr(type(trainer), "train", None) is not Trainer.train and not hasattr(trainer, "reward_funcs"):
        return (
            f"no textbook here for {base} of trl before 0.22: its training loop is its own, in which no step begins or "
            "ends where one could listen"
        )
    return None


def group_size(trainer: Any) -> int:
    """Return how many completions are drawn of a prompt: Online DPO draws two, and has no number of old."""
    return int(getattr(trainer, "num_generations", 2))


def count_uses(args: Any) -> int:
    """Return how many micro-batches train on a generation, where the arguments say so; else 1."""
    return int((getattr(args, "steps_per_generation", None) or 1) * (getattr(args, "num_iterations", None) or 1))
