"""Guards: callbacks that stop or warn about a run that trains nothing, or trains on garbage.

trainer = GRPOTrainer(..., callbacks=[guards.GradientGuard(), guards.RolloutGuard(), guards.LogitsGuard()])
"""

from failurelab.guards.base import Guard, GuardTripped, GuardWarning, Notice
from failurelab.guards.gradients import GradientGuard
from failurelab.guards.logits import LogitsGuard, LogitsReport
from failurelab.guards.mismatch import EngineMismatchGuard, EngineMismatchReport
from failurelab.guards.placement import PlacementGuard
from failurelab.guards.reward import RewardGuard, RewardReport
from failurelab.guards.rollouts import RolloutGuard
from failurelab.guards.step import StepGuard
from failurelab.guards.updates import RoundedReport, UpdateGuard
from failurelab.guards.zero3 import Zero3Guard

__all__ = [
    "EngineMismatchGuard",
    "EngineMismatchReport",
    "GradientGuard",
    "Guard",
    "GuardTripped",
    "GuardWarning",
    "LogitsGuard",
    "LogitsReport",
    "Notice",
    "PlacementGuard",
    "RewardGuard",
    "RewardReport",
    "RolloutGuard",
    "RoundedReport",
    "StepGuard",
    "UpdateGuard",
    "Zero3Guard",
]
