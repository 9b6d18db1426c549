"""Notebook 01: the same warning with every gradient there and with nearly none; its pass tells them apart."""

ALL = {"all weights": "26 of 26", "frozen": "25 of 25", "frozen, non-reentrant": "25 of 25", "LoRA": "28 of 28"}
OLD = ALL | {"frozen": "1 of 25", "LoRA": "RuntimeError"}
OUTCOMES = {
    "trl-0.14": OLD,
    "trl-0.15": OLD,
    "trl-0.22": ALL | {"frozen": "1 of 25", "frozen, non-reentrant": "1 of 25"},
    "today": ALL,
}
REPAIRS = {"the hook": (25, True), "the method": (25, True), "use_reentrant=False": (25, False), "a filter": (1, False)}


def check(result):
    assert result.figures(case="notebook 01: frozen") == {"changed": 1, "lost": 24, "trainable": 25}
    assert result.figures(case="notebook 01: all weights")["lost"] == 0
    for name, trains in (("all weights", True), ("frozen", False), ("frozen, repaired", True)):
        passes = result.figures(case=f"notebook 01: passes, {name}")
        assert passes["generation"] > 0 and ("training" in passes) != trains, (name, passes)
    for name, (gradients, warns) in REPAIRS.items():
        found = result.figures(case=f"notebook 01: {name}")
        assert (found["gradients"], found["warnings"] > 0) == (gradients, warns), (name, found)
    for era, outcomes in OUTCOMES.items():
        assert result.figures(case=f"notebook 01: in {era}") == outcomes, era
