"""slime (a checkout): `slime.utils.ppo_utils`, and the reducers of `megatron_utils.cp_utils`.

Imported: no package's `__init__` is run; megatron is stood in for. Its policy loss stands within a function that needs
megatron's parallel state; what that calls is called here in its order. Megatron divides by all tokens of a step, or the
step's rows.
"""

from types import SimpleNamespace

from failurelab.known_gradients import adapters as kit

library = kit.Library(
    "slime", "slime.utils.ppo_utils", "slime.backends.megatron_utils.cp_utils", missing=("megatron",)
)  # fmt: skip
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call the policy loss and the KL term by micro-batch."""
    asked, losses = case.asked, library.ppo_utils
    library.cp_utils.mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    is_cispo = asked.choose("objective", {"clip": False, "cispo": True})
    by_token = asked.choose("reduce", {"token_mean": True, "sequence_mean": False})
    asked.only(cispo_bound="margin")
    if is_cispo and not hasattr(losses, "compute_cispo_loss"):
        raise kit.NotOffered("no objective='cispo'")
    engine = asked.choose("engine", {None: None, "token_truncate": "truncate", "token_mask": "mask"})
    beta, kind = asked.beta, kit.kl_by(asked, {"k1": "k1", "k2": "k2", "k3": "k3"})

    def micro(part: kit.Part) -> object:
        width = part.mask.shape[1]
        logps, old, reference = (each.reshape(-1) for each in (part.logps, part.old, part.reference))
        kl, worth = old - logps, part.advantages.repeat_interleave(width)
        if asked.ratio == "sequence":
            kl = losses.compute_gspo_kl(list(part.logps), list(part.old), list(part.logps), list(part.mask))
        if is_cispo:
            value = losses.compute_cispo_loss(kl, logps, worth, asked.epsilon_low, asked.epsilon_high)[0]
        else:
            bounds = (asked.epsilon_low, asked.epsilon_high, asked.dual_clip)
            value = losses.compute_policy_loss(kl, worth, *bounds)[0]
        if engine:  # `vanilla_tis_function` and `icepop_function` stand in a file that needs all of megatron
            weight = (part.old - part.engine).exp().reshape(-1)
            held = weight.clamp(asked.engine_low, asked.engine_high)
            value = value * (held if engine == "truncate" else weight * (held == weight))
        lengths = [width] * len(part.rows)
        masks = list(part.mask)
        reduce = library.cp_utils.get_sum_of_sample_mean(lengths, lengths, masks, calculate_per_token_loss=by_token)
        total = reduce(value)
        if beta:
            ratio = (logps - old).exp() if asked.kl_times_ratio else None
            total = total + beta * reduce(losses.compute_approx_kl(logps, reference, kind, ratio))
        return total * part.ranks / (part.step_tokens if by_token else part.step_rows)

    return case.accumulate(micro)
