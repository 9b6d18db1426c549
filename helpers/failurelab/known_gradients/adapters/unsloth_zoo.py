"""unsloth_zoo (PyPI): `rl_replacements.grpo_compute_loss`, which its trainers compile.

Imported: the function is cut out of its file, for the package refuses to be imported without a GPU.
"""

import torch

from failurelab.known_gradients import adapters as kit

DECLARES = kit.declare_cispo("as trl, whose options it takes: GRPOConfig, epsilon_high")
library = kit.Library("unsloth-zoo", cut={"unsloth_zoo/rl_replacements.py": ["grpo_compute_loss"]})
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call it by micro-batch, with the counts that trl's trainer has."""
    asked, named, cut = case.asked, kit.options_as_trl(case), case.batch.cut
    beta, ids = named.pop("beta"), torch.zeros(case.batch.mask.shape, dtype=torch.long)
    named |= {"num_processes": len(cut), "current_gradient_accumulation_steps": len(cut[0])}
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    if mode := asked.choose("engine", {None: None} | {each: each for each in modes}):
        named |= {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode}
        named["vllm_importance_sampling_clip_min"] = asked.engine_low
        named["vllm_importance_sampling_clip_max"] = asked.engine_high
    function = library.grpo_compute_loss
    known = {*function.__code__.co_varnames, *function.__code__.co_consts}  # it takes anything, and reads what it knows
    if mode and "vllm_importance_sampling_clip_max" not in known:
        raise kit.NotOffered("no engine by these names")
    if asked.kl_times_ratio and "use_bias_correction_kl" not in known:
        raise kit.NotOffered("no kl_times_ratio")

    def micro(part: kit.Part) -> object:
        engine = part.engine if mode else None
        given = (part.reference, part.logps, part.old, engine, ids[part.rows], part.mask, beta, part.advantages)
        return function(*given, num_items_in_batch=part.step_tokens, **named)[0]

    return case.accumulate(micro)
