"""Liger (PyPI: liger-kernel): `chunked_loss.grpo_loss`; from logits by the whole fused loss, with an identity as head.

Imported: triton is stood in for where it is not installed, and the kernels' `__init__` is not run. Where it divides by
all tokens it asks torch.distributed for the number of ranks, so there cuts into ranks are NOT RUN.
"""

import inspect

import torch

from failurelab.known_gradients import adapters as kit


def _parameters(library: kit.Library) -> list[str]:
    return list(inspect.signature(library.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn).parameters)


DECLARES = kit.declare_cispo("liger_kernel/chunked_loss/grpo_loss.py, clip_coef_fn: upper_bound = epsilon_high")
_OLD = (lambda library: "per_token_logps" not in _parameters(library), "in this release the loss takes logits")
library = kit.Library("liger-kernel", "liger_kernel.chunked_loss.grpo_loss", missing=("triton",), old=_OLD)
prepare = library.prepare


def loss(case: kit.LossCase) -> kit.Answer:
    """Call `ppo_loss_fn` by micro-batch; all but means over all tokens are divided by the micro-batches, as in trl."""
    asked, options, whole = case.asked, kit.options_as_trl(case), case.asked.reduce == "token_mean"
    if whole and len(case.batch.cut) > 1:
        raise kit.NotOffered("the number of ranks is asked of torch.distributed")
    level = asked.choose("engine", {None: None, "token_truncate": "token", "sequence_truncate": "sequence"})
    function = library.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn
    is_counted = whole and "num_items_in_batch" in _parameters(library)

    def micro(part: kit.Part) -> object:
        logs = (part.old - part.engine) * part.mask
        logs = logs if level == "token" else logs.sum(1, keepdim=True)
        held = logs.exp().clamp(asked.engine_low, asked.engine_high) if level else None
        given = (part.logps, part.mask, part.advantages, part.mask, part.reference, part.old)
        value = function(*given, vllm_is_ratio=held, num_items_in_batch=part.step_tokens, **options)[0]
        return value if is_counted else value / part.micros

    return case.accumulate(micro)


def loss_of_logits(case: kit.LossCase) -> kit.Answer:
    """Call the fused loss: hidden states are the logits, and the head's weight is the identity."""
    batch, options = case.batch, kit.options_as_trl(case) | {"temperature": case.asked.temperature}
    if batch.logits is None:
        raise kit.NotOffered("no logits")
    leaf = batch.logits.clone().requires_grad_()
    fused = library.grpo_loss.LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=False, chunk_size=1, **options)
    head = torch.eye(leaf.shape[-1], dtype=leaf.dtype)
    value = fused(leaf, head, batch.ids, batch.mask, batch.advantages, old_per_token_logps=batch.old)[0]
    return value.detach(), torch.autograd.grad(value, leaf)[0]
