"""SkyRL (PyPI: skyrl): `skyrl.backends.skyrl_train.utils.ppo_utils`, and how its trainer scales advantages.

Imported: no package's `__init__` is run; ray, jaxtyping, loguru and cloudpickle are stood in for where they are not
installed, and so is its config, whose classes need Python 3.12 (the options are given by their names).
"""

import inspect

import torch

from failurelab.known_gradients import adapters as kit

_SOURCE = "skyrl_train/workers/worker.py: KL terms are not pre-scaled, but averaged across micro-batches and ranks"
_OTHERS = {"beta": bool, "reduce": lambda how: how != "sequence_mean"}
DECLARES = [kit.Declared(_OTHERS, {"kl_reduce": "sequence_mean"}, _SOURCE)]
REDUCES = {name: name for name in ("token_mean", "sequence_mean", "prompt_mean")}
REDUCES |= {"constant": "seq_mean_token_sum_norm"}
FUNCTIONS = {("clip", "token"): "ppo_policy_loss", ("clip", "sequence"): "gspo_policy_loss"}
FUNCTIONS |= {("cispo", "token"): "compute_policy_loss_cispo", ("sapo", "token"): "sapo_policy_loss"}
library = kit.Library(
    "skyrl", "skyrl.backends.skyrl_train.utils.ppo_utils",
    missing=("ray", "jaxtyping", "loguru", "cloudpickle", "omegaconf", "skyrl.train"),
    old=(lambda library: not hasattr(library.ppo_utils, "apply_loss_reduction_to_advantages_minibatch"),
         "in this release each micro-batch is reduced by itself, by its worker"),
)  # fmt: skip
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Scale the step's advantages, and call the policy loss and the KL term by micro-batch, as its workers do."""
    asked, algorithms, batch = case.asked, library.ppo_utils, case.batch
    how = asked.choose("reduce", REDUCES)
    asked.only(objective=("clip", "cispo", "sapo"), cispo_bound="margin")
    function = getattr(algorithms, FUNCTIONS[asked.objective, asked.ratio])
    low, high = asked.epsilon_low, asked.epsilon_high
    level = asked.choose("engine", {None: None, "token_truncate": "token", "sequence_truncate": "sequence"})
    if level and asked.engine_low != 0:
        raise kit.NotOffered("no engine_low")
    bounds = {"token_tis_ratio_clip_high": asked.engine_high, "sequence_tis_ratio_clip_high": asked.engine_high}
    config = kit.Config(
        eps_clip_low=low, eps_clip_high=high, loss_reduction=how, clip_ratio_c=asked.dual_clip or 3.0,
        policy_loss_type="dual_clip" if asked.dual_clip else "regular",
        sapo=kit.Config(tau_pos=1.0, tau_neg=1.05), cispo=kit.Config(cispo_eps_clip_low=low, cispo_eps_clip_high=high),
        off_policy_correction=kit.Config(tis_ratio_type=level, **bounds),
    )  # fmt: skip
    places = [(batch.group == each).nonzero()[:, 0].tolist() for each in batch.group.unique()]
    scale = algorithms.apply_loss_reduction_to_advantages_minibatch
    is_told = "prompt_boundaries" in inspect.signature(scale).parameters
    more = ([(rows[0], rows[-1] + 1) for rows in places],) if is_told else ()
    given = (kit.spread(batch.advantages, batch.mask), batch.mask, how, len(batch.cut[0][0]), asked.max_length)
    worth = scale(*given, *more)
    beta, estimator = asked.beta, kit.kl_by(asked, {"k1": "k1", "k2": "k2", "k3": "k3"})

    def micro(part: kit.Part) -> object:
        engine = part.engine if level else None
        value = function(part.logps, part.old, worth[part.rows], config, part.mask, engine)[0] * part.ranks
        if beta:
            term = algorithms.compute_approx_kl(part.logps, part.reference, part.mask, estimator)
            share = len(part.rows) * part.ranks / part.step_rows
            value = value + beta * algorithms.masked_mean(term, part.mask, dim=-1).mean() * share
        return value

    return case.accumulate(micro)


def advantages(case: kit.LossCase) -> torch.Tensor:
    """Call its estimator for outcomes."""
    return kit.outcome_advantages(library.ppo_utils.compute_grpo_outcome_advantage, "grpo_norm_by_std", case)
