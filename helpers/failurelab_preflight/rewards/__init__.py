"""Reward functions asked about completions whose worth is known: what each pays, as a table that one reads at a glance.

    from failurelab_preflight.rewards import ask
    ask(reward, prompt="What is 3 + 4?", answer="7")

`references` reads a dataset's answers and makes wrong ones, `forms` writes completions, `inputs` is what a function is
called with, `asking` calls it in a fork, `judging` and `causes` judge one function (`examination`), `survey` all of a
trainer. A `RewardTable` comes of it. Preflight asks by the same code.

Upstream: TRL #3452, #3857 (equal rewards), #4501, #2771, #6966, PR #5775, #5902, open-r1 #237, unsloth #1761 (rewards
that never see what they need).
"""

from failurelab_preflight.reward_table import Line, RewardTable
from failurelab_preflight.rewards.survey import ask

__all__ = ["Line", "RewardTable", "ask"]
