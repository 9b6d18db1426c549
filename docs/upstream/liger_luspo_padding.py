"""Liger's `luspo` at token level trains on padding (liger-kernel 0.8.5): the gradient moves with what is masked."""

import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

lengths = torch.tensor([7, 1, 4, 2])
generator = torch.Generator().manual_seed(0)
logps = -3 * torch.rand((4, 7), generator=generator)
old = logps + 0.3 * torch.randn((4, 7), generator=generator)
mask = (torch.arange(7) < lengths[:, None]).float()
advantages = torch.tensor([1.0, -0.5, 0.8, -1.3])


def gradient(values, level):
    leaf = values.clone().requires_grad_()
    options = {"beta": 0.0, "loss_type": "luspo", "importance_sampling_level": level}
    loss = LigerFusedLinearGRPOFunction.ppo_loss_fn(leaf, mask, advantages, mask, old_per_token_logps=old, **options)[0]
    loss.backward()
    return leaf.grad


padded = torch.where(mask.bool(), logps, logps - 2.0)  # other numbers where the mask is 0
for level in ("sequence", "token"):
    first, second = gradient(logps, level), gradient(padded, level)
    moved = (second - first).norm() / first.norm()
    print(f"{level}: largest gradient of a masked place {(first * (1 - mask)).abs().max():.4f}; "
          f"with other masked values the gradient moves by {100 * moved:.0f} %")  # fmt: skip
