"""NeMo-RL (a checkout; on PyPI is a placeholder): `nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn`.

Imported: no package's `__init__` is run; its modules for data, models and logs are stood in for. The counts of tokens
and rows are those of the whole step; gradients are added up over the ranks.
"""

import torch

from failurelab.known_gradients import adapters as kit

_KL = "nemo_rl/algorithms/loss/loss_functions.py: the KL loss must include the score-function gradient"
DECLARES = [
    kit.Declared({"beta": bool, "kl_gradient": "pathwise"}, {"kl_gradient": "total"}, _KL),
    kit.Declared({"beta": bool}, {"kl_cap": 10.0}, "ClippedPGLossConfig.kl_output_clamp_value: 10"),
]
library = kit.Library(
    "nemo-rl", "nemo_rl.algorithms.loss.loss_functions",
    missing=[f"nemo_rl.{name}" for name in ("data", "models", "utils", "distributed", "algorithms.x_token")],
    old=(
        lambda library: not hasattr(library.loss_functions.ClippedPGLossConfig, "model_fields"),
        "in this release its config is a dict without defaults",
    ),
)  # fmt: skip
prepare = library.prepare


def behind(values: torch.Tensor) -> torch.Tensor:
    """Put a place before those of each row: the prompt's, which the loss cuts off."""
    return torch.cat([values.new_zeros(len(values), 1), values], 1)


def loss(case: kit.LossCase) -> kit.Answer:
    """Call it by micro-batch."""
    asked, module = case.asked, library.loss_functions
    by_token, by_row = asked.choose("reduce", {"token_mean": True, "sequence_mean": False}), asked.ratio == "sequence"
    if by_row and by_token:
        raise kit.NotOffered("no reduce='token_mean' with ratio='sequence'")
    named = {
        "ratio_clip_min": asked.epsilon_low, "ratio_clip_max": asked.epsilon_high, "ratio_clip_c": asked.dual_clip,
        "token_level_loss": by_token, "sequence_level_importance_ratios": by_row,
        "use_cispo": asked.choose("objective", {"clip": False, "cispo": True}),
        "reference_policy_kl_penalty": asked.beta, "positive_example_nll_weight": asked.nll_weight,
    }  # fmt: skip
    if kl := kit.kl_by(asked, {"k1": "k1", "k2": "k2", "k3": "k3"}, ("total", "pathwise")):
        named["reference_policy_kl_type"] = kl
    asked.only(cispo_bound="margin")
    kinds = {None: None, "token_truncate": "tis", "token_mask": "icepop", "geometric_mask": "seq-mask-tis"}
    if kind := asked.choose("engine", kinds):
        named |= {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": kind}
        named["truncated_importance_sampling_ratio"] = asked.engine_high
        named["truncated_importance_sampling_ratio_min"] = asked.engine_low
    function = module.ClippedPGLossFn(module.ClippedPGLossConfig(**named))

    def micro(part: kit.Part) -> object:
        data = {"token_mask": behind(part.mask), "sample_mask": torch.ones_like(part.rewards), "rewards": part.rewards}
        data |= {"advantages": behind(kit.spread(part.advantages, part.mask)), "prev_logprobs": behind(part.old)}
        data |= {"generation_logprobs": behind(part.engine), "reference_policy_logprobs": behind(part.reference)}
        data |= {"input_ids": behind(part.mask).long()}
        return function(part.logps, data, torch.tensor(float(part.step_rows)), part.step_tokens)[0]

    return case.accumulate(micro, average=False)
