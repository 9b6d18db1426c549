"""The judges in the order in which they are asked: before the script trains, and after its few steps."""

from collections.abc import Callable, Iterator

from failurelab.preflight.answers import Answer
from failurelab.preflight.inputs import Seen
from failurelab.preflight.judges.batch import judge_batch
from failurelab.preflight.judges.first_rewards import judge_first_rewards
from failurelab.preflight.judges.four_bit_placement import judge_four_bit_placement
from failurelab.preflight.judges.lengths import judge_lengths
from failurelab.preflight.judges.plan import judge_plan
from failurelab.preflight.judges.reference import judge_reference
from failurelab.preflight.judges.rewards import judge_rewards
from failurelab.preflight.judges.scores import judge_scores
from failurelab.preflight.judges.tokens import judge_ends, judge_template
from failurelab.preflight.judges.updates import judge_updates

Judge = Callable[[Seen], Iterator[Answer]]
BEFORE: tuple[Judge, ...] = (
    judge_four_bit_placement,
    judge_batch,
    judge_plan,
    judge_template,
    judge_ends,
    judge_reference,
    judge_updates,
)
AFTER: tuple[Judge, ...] = (
    judge_scores,
    judge_rewards,
    judge_first_rewards,
    judge_lengths,
)
