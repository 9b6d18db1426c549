"""AReaL (a checkout): `areal.utils.functional.ppo_actor_loss_fn` and `sapo_loss_fn`.

Imported: functions are cut out of their file, for the package needs aiohttp and more. Its engine weighs micro-batches
by their tokens (`loss_weight_fn`).
"""

from failurelab.known_gradients import adapters as kit

_NAMES = ["ppo_actor_loss_fn", "sapo_loss_fn", "_compute_sequence_level_ratio_and_advantages"]
library = kit.Library(
    "areal", cut={"areal/utils/functional/functional.py": _NAMES}, given={"RejectionSamplingConfig": object}
)
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call it by micro-batch, weighed by its tokens."""
    asked = case.asked
    is_clip = asked.choose("objective", {"clip": True, "sapo": False})
    asked.only(reduce="token_mean")
    if is_clip:
        named = {"eps_clip": asked.epsilon_low, "eps_clip_higher": asked.epsilon_high, "c_clip": asked.dual_clip}
    else:
        named = {"tau_pos": asked.sapo_pos, "tau_neg": asked.sapo_neg}
    named["importance_sampling_level"] = asked.ratio

    def micro(part: kit.Part) -> object:
        given = {"logprobs": part.logps, "old_logprobs": part.old, "loss_mask": part.mask.bool()}
        given |= {"advantages": kit.spread(part.advantages, part.mask) * part.mask}
        given |= {"proximal_logprobs": part.old} if is_clip else {}
        function = library.ppo_actor_loss_fn if is_clip else library.sapo_loss_fn
        return function(**given, **named)[0] * part.mask.sum() * part.ranks / part.step_tokens

    return case.accumulate(micro)
