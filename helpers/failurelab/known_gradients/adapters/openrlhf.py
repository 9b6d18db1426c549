"""OpenRLHF (PyPI): `openrlhf.models.loss.PolicyLoss`, with the normalizers of an optimizer step of its `loss_utils`.

Imported: no package's `__init__` is run; deepspeed is stood in for. DeepSpeed averages gradients over ranks, and
divides by the micro-batches; so does this adapter.
"""

import inspect
from typing import Any

from failurelab.known_gradients import adapters as kit

_SOURCE = "openrlhf/models/loss.py: exclude fully masked sequences"
DECLARES = [kit.Declared({"reduce": "sequence_mean"}, {"empty_rows": False}, _SOURCE)]
_MODULES = ("openrlhf.models.loss", "openrlhf.models.utils", "openrlhf.utils.loss_utils")
library = kit.Library("openrlhf", *_MODULES, missing=("deepspeed",))
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call the policy loss and the KL term as `ActorPPOTrainer.training_step` does."""
    asked, losses, cut = case.asked, library.loss, case.batch.cut
    if asked.ratio == "sequence" and asked.reduce != "sequence_mean":
        raise kit.NotOffered(f"no reduce={asked.reduce!r} with ratio='sequence'")
    kinds: dict[Any, tuple[str, str]] = {None: ("off", "mask"), "token_truncate": ("token", "clip")}
    kinds |= {"token_mask": ("token", "mask"), "geometric_mask": ("seq", "mask")}
    level, mode = asked.choose("engine", kinds)
    named = {"policy_loss_type": asked.choose("ratio", {"token": "ppo", "sequence": "gspo"})}
    asked.only(objective="clip")
    if level != "off":
        if "is_correction_level" not in inspect.signature(losses.PolicyLoss).parameters:
            raise kit.NotOffered("no engine by this name")
        named |= {"is_correction_level": level, "is_correction_mode": mode}
        named["is_correction_threshold"] = [asked.engine_low, asked.engine_high]
    named["token_level_loss"] = asked.choose("reduce", {"token_mean": True, "sequence_mean": False})
    policy = losses.PolicyLoss(asked.epsilon_low, asked.epsilon_high, asked.dual_clip, **named)
    masks = [case.batch.mask[rows] for rank in cut for rows in rank]
    counts = library.loss_utils._optimizer_step_loss_norm(masks, None, len(cut), len(cut[0]))
    beta, kl = asked.beta, kit.kl_by(asked, {"k1": "k1", "k2": "k2", "k3": "k3"})

    def micro(part: kit.Part) -> object:
        value = policy(part.logps, part.old, kit.spread(part.advantages, part.logps), part.mask, part.engine, **counts)[
            0
        ]
        if beta:
            term = library.utils.compute_approx_kl(part.logps, part.reference, kl_estimator=kl)
            value = value + beta * losses.aggregate_loss(term, part.mask, **counts)
        return value / part.micros

    return case.accumulate(micro)
