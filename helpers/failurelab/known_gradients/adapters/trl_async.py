"""trl's AsyncGRPOTrainer (experimental): `compute_loss` itself, on a trainer without a model or an engine.

Imported: as it is installed. A micro-batch's tokens and counts are those that its collator gives: of this micro-batch
over all ranks.
"""

from types import SimpleNamespace

import torch

from failurelab.known_gradients import adapters as kit
from failurelab.known_gradients.adapters.trl import bare_trainer

library = kit.Library("trl", "trl.experimental.async_grpo.async_grpo_trainer", missing=("aiohttp",), bare=False)
prepare = library.prepare
_COUNTED = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
_PLACES = ("position_ids", "shift_labels", "tree_kv_index", "token_index")


def loss(case: kit.LossCase) -> kit.Answer:
    """Call it by micro-batch."""
    asked = case.asked
    asked.only(objective="clip", reduce="token_mean", ratio="token")
    bounds = {"epsilon_low": asked.epsilon_low, "epsilon_high": asked.epsilon_high}
    counted = {f"_step_{name}": 0.0 for name in _COUNTED}
    trainer = bare_trainer(library.async_grpo_trainer.AsyncGRPOTrainer, case, **bounds, **counted)

    def micro(part: kit.Part) -> object:
        kept = part.mask.bool()
        count = int(kept.sum())
        flat = dict.fromkeys(("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_max_seqlens"), torch.tensor([[0, count]]))
        flat |= dict.fromkeys(_PLACES, torch.arange(count)[None])
        flat |= {"input_ids": torch.zeros(1, count), "attention_mask": torch.ones(1, count)}
        flat |= {"old_log_probs": part.old[kept][None], "global_n_tokens": part.turn_tokens[None]}
        flat |= {"advantages": kit.spread(part.advantages, part.mask)[kept][None]}
        flat["segment_id"] = torch.arange(len(kept))[:, None].expand_as(kept)[kept][None]
        flat |= {"global_n_forward_tokens": torch.ones(1), "mean_seq_len": torch.ones(1)}
        scores = SimpleNamespace(log_probs=part.logps[kept], entropy=torch.zeros(count))
        return trainer.compute_loss(lambda **given: scores, flat)

    return case.accumulate(micro)
