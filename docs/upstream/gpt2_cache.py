"""GPT-2 draws without its cache in train mode under checkpointing (transformers 5.24). Takes no argument."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

set_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
model = GPT2LMHeadModel(config).eval()
prompts = torch.randint(1, 64, (16, 8))
calls = []  # of the first layer: how many tokens it was sent, and whether it was given a cache
model.transformer.h[0].register_forward_pre_hook(
    lambda _, given: calls.append((given[0].shape[1], given[1] is not None))
)


def draw():
    calls.clear()
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)


healthy = draw()
model.gradient_checkpointing_enable()
model.train()


def show(case):
    agree = int((draw() == healthy).all(1).sum())
    print(f"{case}: {agree} of 16 rows agree; tokens, cache: {calls[:3]}")


show("as it is")
model.generation_config.use_cache = False
show("without a cache")
model.generation_config.use_cache = True
model.transformer.gradient_checkpointing = False  # line 610 alone reads the model's own flag; the layers keep theirs
show("line 610 undone")
model.transformer.gradient_checkpointing = True
model.eval()
show("eval mode, for control")
