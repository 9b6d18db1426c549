"""What said which completion of a pair is better before Online DPO had reward functions: a judge, or a reward model."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from failurelab.handles import Handle, wrap_method


def _as_rewards(better: Sequence[Any]) -> list[float | None]:
    """Return rewards of the first ones, then of the second ones, from which of each pair is better; -1 is neither."""
    known = [int(place) in (0, 1) for place in better]
    return [float(int(place) == own) if is_known else None for own in (0, 1) for place, is_known in zip(better, known)]


def listen_to_preference(trainer: Any, after: Callable[..., None]) -> Handle:
    """Tell `after` what a judge or a reward model says, as `handles.listen_to` tells it of a reward function.

    trl does not call the reward model: its function `get_reward` asks the model's parts. So that is listened to, in the
    module of the trainer, until the handle is removed.
    """

    def judge(method: Callable[..., Any], prompts: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(pairs)
        better = method(prompts, pairs, *args, **kwargs)
        texts = [[{"role": "assistant", "content": pair[place]}] for place in (0, 1) for pair in pairs]
        after(0, (), {"prompts": prompts, "completions": texts}, _as_rewards(better))
        return better

    def reward(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        after(0, (), {}, result[1].tolist())
        return result

    if trainer.reward_model is None:
        return wrap_method(trainer.judge, "judge", judge, "textbook: preferences recorded")
    base = next(kind for kind in type(trainer).__mro__ if kind.__name__ == "OnlineDPOTrainer")
    return wrap_method(sys.modules[base.__module__], "get_reward", reward, "textbook: rewards recorded")
