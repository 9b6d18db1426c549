"""prime-rl (a checkout): `prime_rl.trainer.rl.loss.default_loss_fn`, by `compute_loss`.

Imported: no package's `__init__` is run; jaxtyping, beartype and its config are stood in for. Its KL term (`kl_tau`,
0.001) is to the policy that drew, and is switched off here.
"""

from types import SimpleNamespace
from typing import Any

import torch

from failurelab.known_gradients import adapters as kit

_SOURCE = "default_loss_fn: DPPO-Binary TV loss (arXiv 2602.04879)"
DECLARES = [kit.Declared({"objective": "clip"}, {"objective": "dppo"}, _SOURCE)]
_MISSING = ("jaxtyping", "beartype", "prime_rl.configs", "prime_rl.utils")
library = kit.Library("prime-rl", "prime_rl.trainer.rl.loss", missing=_MISSING, below="src")
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call it by micro-batch, divided by the tokens of the whole step."""
    asked, module = case.asked, library.loss
    asked.only(objective=("clip", "dppo"), reduce="token_mean")
    bounds = {"dppo_mask_low": asked.epsilon_low, "dppo_mask_high": asked.epsilon_high}
    config = SimpleNamespace(**bounds, adv_tau=1.0, kl_tau=0.0)

    def function(inputs: Any, **rest: Any) -> Any:
        return module.default_loss_fn(inputs, config)

    def micro(part: kit.Part) -> object:
        worth, mask = list(kit.spread(part.advantages, part.mask)), list(part.mask.bool())
        scale = part.step_tokens / part.ranks
        given = (list(part.logps), list(part.old), None, worth, mask, None, None, None, function, scale, 1, 1)
        return torch.as_tensor(module.compute_loss(*given)[0])

    return case.accumulate(micro)
