"""Plausible answers that miss something, and a part of what the checker says of each."""

_COMPARE = """
    return (first != second).any(-1).float().mean().item()"""

WRONG = [
    ("def rollout_gap(model, batch):\n    return ...", "not written yet"),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=1, do_sample=False)
    second = model.eval().generate(**batch, max_new_tokens=1, do_sample=False)
    model.train(was)"""
        + _COMPARE,
        "1 of 6 cases. At “checkpointing on” it returned 0. Compare the modes of one model, and draw several tokens",
    ),
    (
        """
def rollout_gap(model, batch):
    first, second = [model.generate(**batch, max_new_tokens=4, do_sample=False) for _ in range(2)]"""
        + _COMPARE,
        "1 of 6 cases. At “checkpointing on” it returned 0",
    ),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=4, min_new_tokens=4)
    second = model.eval().generate(**batch, max_new_tokens=4, min_new_tokens=4)
    model.train(was)"""
        + _COMPARE,
        "Chance made the gap",
    ),
    (
        """
def rollout_gap(model, batch):
    import torch
    was, drawn = model.training, []
    for mode in (True, False):
        torch.manual_seed(0)
        drawn.append(model.train(mode).generate(**batch, max_new_tokens=4, min_new_tokens=4))
    model.train(was)
    first, second = drawn"""
        + _COMPARE,
        "2 of 6 cases. At “a healthy model whose config says do_sample” it returned 1",
    ),
    (
        """
def rollout_gap(model, batch):
    second = model.eval().generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    first = model.train().generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)"""
        + _COMPARE,
        "4 of 6 cases. At “the model afterwards”",
    ),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    second = model.eval().generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    model.train(was)
    return float(not torch.equal(first, second))""",
        "3 of 6 cases. At “one token of one prompt of 16” it returned 1, and 0.0625 is right",
    ),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    second = model.eval().generate(**batch, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    model.train(was)
    start = batch["input_ids"].shape[1] + 1
    return (first != second)[:, start:].float().mean().item()""",
        "Return a share of the prompts: not of the tokens",
    ),
    (
        """
def rollout_gap(model, batch):
    first = model.train().generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    second = model.eval().generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)"""
        + _COMPARE,
        "5 of 6 cases. At “a model that came in train mode”",
    ),
]
