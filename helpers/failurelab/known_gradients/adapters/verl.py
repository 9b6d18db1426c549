"""verl (PyPI): `verl.trainer.ppo.core_algos`, with the step's counts that its `ppo_loss` hands on.

Imported: `verl`'s own `__init__` is not run; ray, tensordict, hydra and omegaconf are stood in for where they are not
installed. Rank gradients are averaged (FSDP), which `dp_size` undoes.
"""

import inspect

import torch

from failurelab.known_gradients import adapters as kit

_ACTOR, _KL = "verl/workers/config/actor.py, ActorConfig", "verl/trainer/ppo/core_algos.py, kl_penalty"
_PLAIN = {"objective": "clip", "ratio": "token", "dual_clip": None}
_K2 = {"kl": "k2", "kl_gradient": "pathwise"}
DECLARES = [
    kit.Declared(_PLAIN, {"dual_clip": 3.0}, f"{_ACTOR}.clip_ratio_c: 3.0"),
    kit.Declared({"beta": bool, "kl_gradient": "total"}, _K2, f"{_KL}: k3+ has k2's gradient"),
]
REDUCES = {
    "token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm",
    "sequence_sum": "seq-mean-token-sum",
}  # fmt: skip
KINDS = {("clip", "token"): "vanilla", ("clip", "sequence"): "gspo", ("cispo", "token"): "cispo"}
KINDS |= {("sapo", "token"): "sapo"}
KLS = {("k1", "pathwise"): "k1", ("k2", "pathwise"): "k2", ("k3", "pathwise"): "low_var_kl", ("k1", "total"): "k1+"}
KLS |= {("k2", "total"): "k2", ("k3", "total"): "k3+"}
library = kit.Library(
    "verl", "verl.trainer.ppo.core_algos",
    missing=("ray", "tensordict", "omegaconf", "verl.workers", "verl.trainer.config", "verl.utils.config",
             "verl.utils.tokenizer"),
    old=(lambda library: "dp_size" not in inspect.signature(library.core_algos.agg_loss).parameters,
         "agg_loss is not told the counts of a step: in this release its trainer divides"),
)  # fmt: skip
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call the policy loss that is registered, and the KL term, by micro-batch."""
    asked, algorithms = case.asked, library.core_algos
    algorithms.ActorConfig = kit.Config  # the real one needs hydra
    mode = asked.choose("reduce", REDUCES)
    asked.only(objective=("clip", "cispo", "sapo"), cispo_bound="margin")
    function = algorithms.get_policy_loss_fn(KINDS[asked.objective, asked.ratio])
    config = kit.Config(
        clip_ratio=0.2, clip_ratio_low=asked.epsilon_low, clip_ratio_high=asked.epsilon_high, tau_pos=1.0,
        clip_ratio_c=asked.dual_clip or 3.0, tau_neg=1.05,
    )  # fmt: skip
    beta = asked.beta
    kl = KLS.get((asked.kl, asked.kl_gradient)) if beta else None
    level = asked.choose("engine", {None: None, "token_truncate": "token", "sequence_truncate": "sequence"})

    def micro(part: kit.Part) -> object:
        config.global_batch_info = {
            "dp_size": part.ranks, "batch_num_tokens": part.step_tokens, "global_batch_size": part.step_rows,
            "loss_scale_factor": asked.max_length,
        }  # fmt: skip
        logs = (part.old - part.engine) * part.mask
        logs = logs if level == "token" else logs.sum(1, keepdim=True)
        held = logs.exp().clamp(max=asked.engine_high) if level and asked.engine_low == 0 else None
        given = (part.old, part.logps, kit.spread(part.advantages, part.logps), part.mask, mode, config, held)
        value = function(*given)[0]
        if beta:
            term = algorithms.kl_penalty(part.logps, part.reference, kl)
            value = value + beta * algorithms.agg_loss(term, part.mask, mode, **config.global_batch_info)
        return value

    return case.accumulate(micro)


def advantages(case: kit.LossCase) -> torch.Tensor:
    """Call its estimator for outcomes."""
    return kit.outcome_advantages(library.core_algos.compute_grpo_outcome_advantage, "norm_adv_by_std_in_grpo", case)
