"""Guards: callbacks that stop or warn about a run that trains nothing, or trains on garbage.

trainer = GRPOTrainer(..., callbacks=[guards.GradientGuard(), guards.RolloutGuard(), guards.LogitsGuard()])
"""

from failurelab.guards.base import GuardTripped, GuardWarning
from failurelab.guards.engines import EngineMismatchGuard, EngineMismatchReport
from failurelab.guards.gradients import GradientGuard
from failurelab.guards.logits import LogitsGuard, LogitsReport
from failurelab.guards.placement import PlacementGuard
from failurelab.guards.reward import RewardGuard, RewardReport
from failurelab.guards.rollouts import RolloutGuard
from failurelab.guards.updates import RoundedReport, UpdateGuard
from failurelab.guards.zero3 import EngineGuard, HandOver

__all__ = [
    "EngineGuard",
    "EngineMismatchGuard",
    "EngineMismatchReport",
    "GradientGuard",
    "GuardTripped",
    "GuardWarning",
    "HandOver",
    "LogitsGuard",
    "LogitsReport",
    "PlacementGuard",
    "RewardGuard",
    "RewardReport",
    "RolloutGuard",
    "RoundedReport",
    "UpdateGuard",
]
