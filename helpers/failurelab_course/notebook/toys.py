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
        frozen: everything is; all but the layer if it is "rest"; all but the layer and the second expert if "most".
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
            self.layer.requires_grad_(frozen in ("rest", "most"))
            self.experts[1].requires_grad_(frozen == "most")
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
    """A model that draws, in train mode, one token of the first prompt otherwise than in eval mode.

    As with a model of transformers, 2 ends a completion, and what follows in its row is 0. A call of `generate` without
    the attention mask is a TypeError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(pad_token_id=0, eos_token_id=2)
        self.generation_config = SimpleNamespace(do_sample=False, pad_token_id=0, eos_token_id=2)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.weight.device

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the prompts with four tokens after each: (batch, length + 4)."""
        drawn = torch.full((len(input_ids), 4), 5)
        drawn[0, 1] += int(self.training)
        return torch.cat([input_ids, drawn], -1)


class GoesOn(OneToken):
    """A model that ends each completion after a token; in train mode the first prompt's goes on for two more.

    With `min_new_tokens` none may end: all go on with tokens that differ between the modes.
    """

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, min_new_tokens: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Return the prompts and what was drawn: (batch, length + 1), or more in train mode or for `min_new_tokens`."""
        if min_new_tokens:
            drawn = torch.full((len(input_ids), min_new_tokens), 5 + int(self.training))
        else:
            drawn = torch.tensor([[2, 0, 0]] * len(input_ids))
            if self.training:
                drawn[0] = torch.tensor([5, 5, 2])
            else:
                drawn = drawn[:, :1]
        return torch.cat([input_ids, drawn], -1)


class Sampling(OneToken):
    """A model whose config says do_sample: sampled, each call draws otherwise, whatever the seed; greedy, none does."""

    def __init__(self) -> None:
        super().__init__()
        self.generation_config.do_sample = True
        self.calls = 0

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        do_sample: bool | None = None,
        generation_config: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the prompts with four tokens after each: (batch, length + 4)."""
        self.calls += 1
        config = generation_config or self.generation_config
        sampled = config.do_sample if do_sample is None else do_sample
        drawn = torch.full((len(input_ids), 4), 5 + (self.calls if sampled else 0))
        return torch.cat([input_ids, drawn], -1)
