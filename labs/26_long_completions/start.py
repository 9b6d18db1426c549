"""Lab 26: long completions.

The part of a training loop of one's own that corrects for an engine: each completion's loss is multiplied by a weight.

"With completions of 16 tokens all is well. With 448, the run learns from a handful of completions in each batch, though
the engine has the same weights as the trainer and each token differs by a hundredth of a nat. The rest hardly count."

Let long completions count as short ones do. Where engine and policy agree the weight is 1, and where they really
differ (another temperature, say) the weights still say so. Return one weight for a sequence, (batch, 1), or one for
each token, (batch, tokens).
"""

import torch


def importance_weights(policy_logps, engine_logps, mask):
    """Return what the loss is multiplied with.

    Both log-probabilities are of the tokens that the engine drew, (batch, tokens); mask is 1 for those that count.
    """
    log_ratios = (policy_logps - engine_logps) * mask
    return log_ratios.sum(-1, keepdim=True).exp()  # (batch, 1)


if __name__ == "__main__":
    draw = torch.Generator().manual_seed(0)
    for tokens in (16, 448):
        gap = 0.03 * torch.randn(64, tokens, generator=draw)  # nats
        weights = importance_weights(gap, torch.zeros_like(gap), torch.ones_like(gap))[:, 0]
        share = weights.sum() ** 2 / (weights**2).sum() / len(weights)
        print(f"{tokens} tokens: weights {weights.min():.2f} to {weights.max():.2f}, effective sample size {share:.2f}")
