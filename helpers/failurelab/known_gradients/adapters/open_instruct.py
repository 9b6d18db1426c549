"""open-instruct (a checkout): `grpo_utils.compute_grpo_loss`, its KL estimators and its mean over a mask.

Imported: functions are cut out of their files, for these import vllm and ray. DeepSpeed averages over ranks, which the
trainer multiplies back.
"""

from types import SimpleNamespace

import torch

from failurelab.known_gradients import adapters as kit

DECLARES = [
    kit.Declared({"objective": "cispo"}, {"cispo_low": False}, "compute_grpo_loss: directly clip ratio, no lower bound")
]
_CUT = {"grpo_utils": ["GRPOLossType", "compute_grpo_loss"], "model_utils": ["estimate_kl"]}
_CUT |= {"rl_utils": ["masked_mean"]}
library = kit.Library(
    "open-instruct", cut={f"open_instruct/{name}.py": names for name, names in _CUT.items()},
    given={"GRPOExperimentConfig": object, "ExperimentConfig": object},
)  # fmt: skip
library.names["model_utils"] = library  # whose `estimate_kl` the loss calls
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call it by micro-batch, divided by the tokens of the accumulation of all ranks."""
    asked = case.asked
    kind = library.GRPOLossType[asked.choose("objective", {"clip": "dapo", "cispo": "cispo"})]
    asked.only(reduce="token_mean", ratio="token", cispo_bound="margin")
    weights = asked.choose("engine", {None: None, "token_truncate": "clamp", "token_mask": "drop"})
    beta, estimator = asked.beta, kit.kl_by(asked, {"k1": 0, "k2": 1, "k3": 2})
    bounds = {"clip_lower": asked.epsilon_low, "clip_higher": asked.epsilon_high}
    config = SimpleNamespace(loss_fn=kind, kl_estimator=2 if estimator is None else estimator, **bounds)

    def micro(part: kit.Part) -> object:
        weight = (part.old - part.engine).exp()
        held = weight.clamp(asked.engine_low, asked.engine_high)
        rho = {None: torch.ones_like(weight), "clamp": held, "drop": weight * (held == weight)}[weights]
        ratio, worth = (part.logps - part.old).exp(), kit.spread(part.advantages, part.mask)
        given = (part.logps, ratio, worth, part.reference if beta else None, config, rho)
        policy, _, kl = library.compute_grpo_loss(*given)
        return library.masked_mean(policy + beta * kl, part.mask, None, part.step_tokens.item()) * part.ranks

    return case.accumulate(micro)
