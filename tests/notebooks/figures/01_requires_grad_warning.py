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


def check(result):
    assert result.figures(case="notebook 01") == {"lost": 24, "trainable": 25}
    for name, (gradients, passes) in REPAIRS.items():
        found = result.figures(case=f"notebook 01: {name}")
        assert found.pop("gradients") == gradients and found.keys() == passes, (name, found)
    for era, outcomes in OUTCOMES.items():
        assert result.figures(case=f"notebook 01: in {era}") == outcomes, era
