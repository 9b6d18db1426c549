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
        "1 of 4 cases. At “checkpointing on” it returned 0. Compare the modes of one model, and draw several tokens",
    ),
    (
        """
def rollout_gap(model, batch):
    first, second = [model.generate(**batch, max_new_tokens=4, do_sample=False) for _ in range(2)]"""
        + _COMPARE,
        "1 of 4 cases. At “checkpointing on” it returned 0",
    ),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=4, min_new_tokens=4)
    second = model.eval().generate(**batch, max_new_tokens=4, min_new_tokens=4)
    model.train(was)"""
        + _COMPARE,
        "Chance made the gap: pass do_sample=False",
    ),
    (
        """
def rollout_gap(model, batch):
    second = model.eval().generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    first = model.train().generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)"""
        + _COMPARE,
        "3 of 4 cases. At “the model afterwards”",
    ),
]
