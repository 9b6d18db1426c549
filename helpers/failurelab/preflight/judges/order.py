"""The judges in the order in which they are asked: before the script trains, while it does, and after its few steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from failurelab.preflight.answer import Finding
from failurelab.preflight.judges.answers import judge_answers
from failurelab.preflight.judges.batch import judge_batch
from failurelab.preflight.judges.evaluation import judge_evaluation, judge_resume
from failurelab.preflight.judges.first_rewards import judge_first_rewards
from failurelab.preflight.judges.four_bit_placement import judge_four_bit_placement
from failurelab.preflight.judges.given import judge_deepspeed
from failurelab.preflight.judges.gradients import GradientJudge
from failurelab.preflight.judges.lengths import judge_lengths
from failurelab.preflight.judges.logits import LogitsJudge
from failurelab.preflight.judges.optimizer import OptimizerJudge
from failurelab.preflight.judges.padding import PaddingJudge
from failurelab.preflight.judges.plan import judge_groups, judge_plan
from failurelab.preflight.judges.preferences import judge_preferences
from failurelab.preflight.judges.reference import judge_reference
from failurelab.preflight.judges.replaced import OverrideJudge
from failurelab.preflight.judges.replaced_adapter import judge_replaced_adapter
from failurelab.preflight.judges.rewards import judge_rewards
from failurelab.preflight.judges.rollouts import RolloutJudge
from failurelab.preflight.judges.sampler import SamplerJudge
from failurelab.preflight.judges.states import judge_saved, judge_states
from failurelab.preflight.judges.tokens import judge_ends, judge_template
from failurelab.preflight.judges.updates import judge_updates
from failurelab.preflight.training import Training


class TrainingJudge(Protocol):
    """A judge that listens while the script trains."""

    def listening(self) -> AbstractContextManager[None]:
        """Inside, the training is listened to."""

    def answers(self) -> Iterator[Finding]:
        """Yield what was seen, after training, or after the error that ended it."""


Judge = Callable[[Training], Iterator[Finding]]
BEFORE: tuple[Judge, ...] = (
    judge_four_bit_placement,
    judge_deepspeed,
    judge_batch,
    judge_plan,
    judge_answers,
    judge_template,
    judge_ends,
    judge_reference,
    judge_updates,
    judge_replaced_adapter,
    judge_states,
    judge_saved,
    judge_resume,
)
# The first is the outermost: its hooks are called first.
DURING: tuple[Callable[[Training], TrainingJudge], ...] = (
    GradientJudge,
    RolloutJudge,
    LogitsJudge,
    OverrideJudge,
    PaddingJudge,
    OptimizerJudge,
    SamplerJudge,
)
AFTER: tuple[Judge, ...] = (
    judge_rewards,
    judge_preferences,
    judge_groups,
    judge_first_rewards,
    judge_lengths,
    judge_evaluation,
)
