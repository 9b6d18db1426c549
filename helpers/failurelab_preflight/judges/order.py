"""The judges in their order: before the script trains, as that begins, while it does, and after its few steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from failurelab_preflight.answer import Finding
from failurelab_preflight.judges.batch import judge_batch
from failurelab_preflight.judges.four_bit_placement import judge_four_bit_placement
from failurelab_preflight.judges.given import judge_dataset
from failurelab_preflight.judges.gradients import GradientJudge
from failurelab_preflight.judges.lengths import judge_lengths
from failurelab_preflight.judges.logits import LogitsJudge
from failurelab_preflight.judges.optimizer import judge_optimizer
from failurelab_preflight.judges.preferences import judge_preferences
from failurelab_preflight.judges.reference import judge_reference
from failurelab_preflight.judges.replaced_adapter import judge_replaced_adapter
from failurelab_preflight.judges.rewards import judge_rewards, leave_first_rewards
from failurelab_preflight.judges.rollouts import RolloutJudge
from failurelab_preflight.judges.tokens import judge_ends, judge_template
from failurelab_preflight.judges.updates import judge_updates
from failurelab_preflight.training import Training


class TrainingJudge(Protocol):
    """A judge that listens while the script trains."""

    def listening(self) -> AbstractContextManager[None]:
        """Inside, the training is listened to."""

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen, after training, or after the error that ended it."""


Judge = Callable[[Training], Iterator[Finding]]
BEFORE: tuple[Judge, ...] = (
    judge_four_bit_placement,
    judge_dataset,
    judge_template,
    judge_ends,
)
BEGINNING: tuple[Judge, ...] = (  # behind what the script's callbacks make of the models as training begins
    judge_reference,
    judge_updates,
    judge_replaced_adapter,
)
# The first is the outermost: its hooks are called first.
DURING: tuple[Callable[[Training], TrainingJudge], ...] = (
    GradientJudge,
    RolloutJudge,
    LogitsJudge,
)
AFTER: tuple[Judge, ...] = (
    judge_batch,
    judge_optimizer,
    judge_rewards,
    leave_first_rewards,
    judge_preferences,
    judge_lengths,
)
