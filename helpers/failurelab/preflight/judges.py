"""The judges that need no training run, in two tuples: before the script trains, and after its few steps."""

from failurelab.preflight.batch import judge_batch
from failurelab.preflight.engine import judge_engine
from failurelab.preflight.findings import Judge
from failurelab.preflight.lengths import judge_lengths
from failurelab.preflight.memory import judge_memory
from failurelab.preflight.reference import judge_reference
from failurelab.preflight.reward import judge_rewards
from failurelab.preflight.scores import judge_scores
from failurelab.preflight.tokens import judge_ends, judge_template
from failurelab.preflight.updates import judge_updates

BEFORE: tuple[Judge, ...] = (
    judge_batch,
    judge_rewards,
    judge_template,
    judge_ends,
    judge_scores,
    judge_reference,
    judge_updates,
    judge_memory,
)
AFTER: tuple[Judge, ...] = (judge_lengths, judge_engine)
