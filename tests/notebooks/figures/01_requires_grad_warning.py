"""Notebook 01: the same warning with every gradient there and with nearly none; its pass tells them apart."""

OLD = {
    "all weights": "26 of 26 (generation)",
    "LoRA": "element 0 (generation, scoring without gradients, training)",
    "frozen": "1 of 25 (generation, training)",
    "frozen, non-reentrant": "25 of 25 (no warning)",
    "frozen, the method": "25 of 25 (generation)",
}
TODAY = dict.fromkeys(OLD, "25 of 25 (no warning)") | {
    "all weights": "26 of 26 (no warning)",
    "LoRA": "28 of 28 (no warning)",
}
OUTCOMES = {
    "trl-0.14": OLD,
    "trl-0.15": OLD,
    "trl-0.22": TODAY
    | {
        "LoRA": "28 of 28 (scoring without gradients)",
        "frozen": "1 of 25 (training)",
        "frozen, non-reentrant": "1 of 25 (training)",
    },
    "today": TODAY,
}
REPAIRS = {  # what has a gradient, which passes warn
    "the hook": ("25 of 25", {"generation"}),
    "the method": ("25 of 25", {"generation"}),
    "the method, LoRA": ("28 of 28", {"generation", "scoring without gradients"}),
    "use_reentrant=False": ("25 of 25", set()),
    "a filter": ("1 of 25", set()),
}
# The embeddings, two layers, the norm and the head (which is the embeddings' tensor): tensors with a gradient, and
# whether the output has a graph.
TRACES = [
    ["all weights", "1 of 1 True", "12 of 12 True", "12 of 12 True", "1 of 1 True", "1 of 1 True"],
    ["frozen embeddings", "0 of 0 False", "0 of 12 False", "0 of 12 False", "1 of 1 True", "0 of 0 True"],
]


def check(result):
    assert result.figures(case="notebook 01") == {"lost": 24, "trainable": 25}
    why = result.figures(case="notebook 01: why")
    assert why["traces"] == TRACES, why
    lost = [line.partition("without a gradient: ")[2] for line in why["own"]]
    assert lost == ["[]", "['layer.weight', 'layer.bias']", "[]", "[]"], lost
    # The story ends on the reward: with gradients alone it starts below what the model earns by hand, 0.40.
    broken, gradients, both = why["last"]
    assert max(why["first"]) < 0.3 and max(broken) < min(gradients) and max(gradients) < 0.4 < min(both), why
    for name, (gradients, passes) in REPAIRS.items():
        found = result.figures(case=f"notebook 01: {name}")
        assert found.pop("gradients") == gradients and found.keys() == passes, (name, found)
    for era, outcomes in OUTCOMES.items():
        assert result.figures(case=f"notebook 01: in {era}") == outcomes, era
