"""F16 in a script's own rollouts: another model than the policy draws, and does not get the weights that are trained.

The model that is run while the script's own code draws is asked for its logits after each draw, and so is the policy.
One that stays bit for bit as it was while the policy moves is stale; one that has the policy's logits was synchronized.

Upstream: the registry's F16; miles PR #2075.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from failurelab.handles import is_unseen, keep_random_state, unseen, wrap_method
from failurelab.preflight.answer import Finding, Location, Quantity
from failurelab.preflight.judges.padding import find_maker
from failurelab.preflight.script_text import location, read_source
from failurelab.preflight.stage import models
from failurelab.preflight.training import Training

_SYNCHRONIZED = 0.1  # of the distance that the policy moved: merged weights are not the adapter's bit for bit


class SamplerJudge:
    """Looks at which model is run in a rollout of the script's own, and whether it moves as the policy does."""

    def __init__(self, training: Training):
        self._trainer = training.trainer
        self._maker, code = find_maker(training)
        self._place: Location | None = None
        if code is not None:
            self._place = location(code.co_filename, code.co_firstlineno, read_source(code.co_filename))
        self._draws = False
        self._run: dict[int, Any] = {}  # weak references to the models that were run in a rollout
        self._policy_draws = False
        self._policy: list[torch.Tensor] = []  # its logits after each draw
        self._others: dict[int, list[torch.Tensor]] = {}  # those of each other model that was run
        self._names: dict[int, str] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the rollouts are looked at."""
        with contextlib.ExitStack() as stack:
            if self._maker:
                stack.enter_context(wrap_method(self._trainer, self._maker, self._note_rollout, "watched"))
                hook = torch.nn.modules.module.register_module_forward_pre_hook(self._note_forward)
                stack.callback(hook.remove)
            yield

    def _note_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not self._draws or is_unseen() or id(module) in self._run:
            return
        if isinstance(module, transformers.PreTrainedModel) and module.get_output_embeddings() is not None:
            self._run[id(module)] = weakref.ref(module)

    def _note_rollout(self, rollout: Any, *args: Any, **kwargs: Any) -> Any:
        if is_unseen():
            return rollout(*args, **kwargs)
        self._draws, self._run = True, {}
        try:
            output = rollout(*args, **kwargs)
        finally:
            self._draws = False
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        trained = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
        run = [model for model in (reference() for reference in self._run.values()) if model is not None]
        shares = (any(id(parameter) in trained for parameter in model.parameters()) for model in run)
        self._policy_draws = self._policy_draws or any(shares)
        if run and not self._policy_draws:
            with unseen(), keep_random_state():
                self._policy.append(models.probe(policy))
                for model in run:
                    self._names[id(model)] = type(model).__name__
                    self._others.setdefault(id(model), []).append(models.probe(model))
        return output

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen, after training, or after the error that ended it."""
        if self._policy_draws or len(self._others) != 1:  # of several models it is not known which one draws
            return
        ((own, logits),) = self._others.items()
        who = f"{self._maker} draws with another model ({self._names[own]}) than the one that is trained"
        moved = _apart(self._policy[0], self._policy[-1])
        if len(logits) != len(self._policy) or not moved:
            why = f"{who}, and the policy did not move between two draws: whether it gets the weights does not show"
            yield Finding.not_checked("F16", why, part=self._maker)
            return
        stayed, away = _apart(logits[0], logits[-1]), _apart(logits[-1], self._policy[-1])
        draws = f"over {len(logits)} draws the policy's logits moved by {moved:.2g}"
        figures = (Quantity("distance of the logits from the policy's", away, "", moved),)
        if not stayed:
            yield Finding.suspected(
                "F16",
                f"{who}: {draws}, and those of the one that draws stayed bit for bit",
                "it may be given the weights after more steps than were run",
                "Let the trainer's model draw, or hand its weights over at each step, those of an adapter merged.",
                part=self._maker,
                figures=figures,
                place=self._place,
            )
        elif away <= _SYNCHRONIZED * moved:
            said = f"{who}, and has its weights: {draws}, and are {away:.2g} away from its own"
            control = f"with the weights of its first draw they would be {_apart(logits[0], self._policy[-1]):.2g} away"
            yield Finding.held("F16", said, control, part=self._maker, figures=figures)
        else:
            why = f"{who}: {draws}, and its own by {stayed:.2g}, but they are {away:.2g} apart"
            yield Finding.not_checked("F16", why, part=self._maker)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two models' logits, infinite where their vocabularies differ."""
    return (one - other).abs().max().item() if one.shape == other.shape else float("inf")
