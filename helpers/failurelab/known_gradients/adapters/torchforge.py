"""torchforge (a checkout): `forge.losses.grpo_loss.SimpleGRPOLoss`.

Imported: no package's `__init__` is run. It takes no log-probabilities of the policy that drew.
"""

from failurelab.known_gradients import adapters as kit

_SOURCE = "SimpleGRPOLoss: simplified GRPO loss for simplified single step updates"
DECLARES = [kit.Declared({"objective": "clip"}, {"wrong": frozenset({"ratio is 1"})}, _SOURCE)]
library = kit.Library("torchforge", "forge.losses.grpo_loss", below="src")
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call it by micro-batch; each is a step's share by its rows."""
    asked = case.asked
    asked.only(objective="clip", reduce="sequence_mean")
    asked.epsilon_low, asked.epsilon_high  # noqa: B018 - a ratio of 1 lies within any bounds
    kit.kl_by(asked, {"k3": None})
    function = library.grpo_loss.SimpleGRPOLoss(asked.beta)

    def micro(part: kit.Part) -> object:
        value = function(part.logps, part.reference, part.advantages[:, None], part.mask)
        return value * len(part.rows) * part.ranks / part.step_rows

    return case.accumulate(micro)
