"""The judges in their order: before the script trains, as that begins, during it, and after it.

One that listens while the script trains is a class: inside `listening()` it hears, and `answers()` yields what it saw.
"""

from failurelab_preflight.judges.batch import judge_batch
from failurelab_preflight.judges.between import BetweenJudge
from failurelab_preflight.judges.four_bit_placement import judge_four_bit_placement
from failurelab_preflight.judges.gradients import GradientJudge
from failurelab_preflight.judges.lengths import judge_lengths
from failurelab_preflight.judges.logits import LogitsJudge
from failurelab_preflight.judges.optimizer import judge_optimizer
from failurelab_preflight.judges.preferences import judge_preferences
from failurelab_preflight.judges.reference import judge_reference
from failurelab_preflight.judges.replaced_adapter import judge_replaced_adapter
from failurelab_preflight.judges.rewards import judge_rewards
from failurelab_preflight.judges.rollouts import RolloutJudge
from failurelab_preflight.judges.tokens import judge_ends, judge_template
from failurelab_preflight.judges.updates import judge_updates

BEFORE = (judge_four_bit_placement, judge_template, judge_ends)
# behind what the script's callbacks make of the models as training begins
BEGINNING = (judge_reference, judge_updates, judge_replaced_adapter)
DURING = (
    GradientJudge,
    RolloutJudge,
    LogitsJudge,
    BetweenJudge,
)  # the hooks of the first, the outermost, are called first
AFTER = (judge_batch, judge_optimizer, judge_rewards, judge_preferences, judge_lengths)
