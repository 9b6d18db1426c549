"""A model of a few numbers in which one thing is wrong, for the checker of an exercise."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class Toy(torch.nn.Module):
    """Frozen embeddings, a layer, two experts and a head; `model(expert=1).loss` is a number.

    Args:
        checkpointed: in train mode the layer runs under a reentrant checkpoint, which cuts it off.
        zero_head: the head's weights are 0, so that all gradients before it are zeros.
        again: the second expert stands in the model under a second name.
        stale: the layer has a gradient already, from an earlier pass.
        frozen: everything is, or all but the layer if it is "rest".
        hooked: the output of the embeddings requires a gradient, as `enable_input_require_grads` makes it.
    """

    def __init__(
        self,
        checkpointed: bool = False,
        zero_head: bool = False,
        again: bool = False,
        stale: bool = False,
        frozen: bool | str = False,
        hooked: bool = False,
    ):
        super().__init__()
        self.embed = torch.nn.Embedding(2, 2).requires_grad_(False)
        self.layer, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        self.checkpointed, self.hooked = checkpointed, hooked
        if frozen:
            self.requires_grad_(False)
            self.layer.requires_grad_(frozen == "rest")
        if zero_head:
            torch.nn.init.zeros_(self.head.weight)
        if again:
            self.again = self.experts[1]
        if stale:
            for tensor in self.layer.parameters():
                tensor.grad = torch.ones_like(tensor)

    def forward(self, expert: int = 0) -> Any:
        """Return the loss, under the name that models of transformers give it."""
        x = self.embed(torch.tensor([0, 1]))  # (tokens, width)
        if self.hooked:
            x.requires_grad_()
        cut = self.checkpointed and self.training
        x = checkpoint(self.layer, x, use_reentrant=True) if cut else self.layer(x)
        return SimpleNamespace(loss=self.head(self.experts[expert](x)).mean())


class OneToken(torch.nn.Module):
    """A model that draws, in train mode, one token of the first prompt otherwise than in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the prompts with four tokens after each: (batch, length + 4)."""
        drawn = torch.zeros(len(input_ids), 4, dtype=torch.long)
        drawn[0, 1] = int(self.training)
        return torch.cat([input_ids, drawn], -1)


class Sampling(OneToken):
    """A model whose config says do_sample: sampled, each call draws otherwise, whatever the seed; greedy, none does."""

    def __init__(self) -> None:
        super().__init__()
        self.generation_config = SimpleNamespace(do_sample=True)
        self.calls = 0

    def generate(
        self, input_ids: torch.Tensor, do_sample: bool | None = None, generation_config: Any = None, **_: Any
    ) -> torch.Tensor:
        """Return the prompts with four tokens after each: (batch, length + 4)."""
        self.calls += 1
        config = generation_config or self.generation_config
        sampled = config.do_sample if do_sample is None else do_sample
        drawn = torch.full((len(input_ids), 4), self.calls if sampled else 0)
        return torch.cat([input_ids, drawn], -1)
