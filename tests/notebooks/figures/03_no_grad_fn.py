"""Notebook 03: three things together, and three ways to one message; what is repaired trains every tensor."""

RUNS = {
    "the script": "element 0",
    "all weights": "26 of 26",
    "checkpointing off": "28 of 28",
    "non-reentrant": "28 of 28",
    "checkpointing first": "28 of 28",
    "cured": "28 of 28",
    "loaded": "element 0",
    "hooked": "0 of 28",
}
# The embeddings, two layers, the norm and the head: tensors with a gradient, and whether the output has a graph.
TRACES = [
    ["LoRA, reentrant", "0 of 0 False", "0 of 14 False", "0 of 14 False", "0 of 0 False", "0 of 0 False"],
    ["LoRA, non-reentrant", "0 of 0 False", "14 of 14 True", "14 of 14 True", "0 of 0 True", "0 of 0 True"],
]
TODAY = [
    "is_trainable=False, checkpointing=False: False, frozen",
    "is_trainable=False, checkpointing=True: True, frozen",
    "is_trainable=True, checkpointing=False: True, nowhere",
    "is_trainable=True, checkpointing=True: True, nowhere",
]


def check(result):
    found = result.figures(case="notebook 03")
    assert {name: found[name] for name in RUNS} == RUNS
    assert found["traces"] == TRACES and found["today"] == TODAY, found
    # The story ends on the reward: with the hook alone it stays below what the model earns by hand.
    hook, both = found["last"]
    assert max(hook) < 0.4 < 0.55 < min(both), found["last"]
