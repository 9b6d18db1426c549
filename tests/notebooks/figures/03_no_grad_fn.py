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
    "detached": "element 0",
}


def check(result):
    found = result.figures(case="notebook 03")
    assert {name: found[name] for name in RUNS} == RUNS
    hook, both = found["rewards"]
    assert hook < 0.3 < both, found["rewards"]
    for era in ("trl-0.14", "trl-0.15", "trl-0.22", "today"):
        row = result.figures(case=f"notebook 03: in {era}")
        assert (row["LoRA, checkpointing"] == "28 of 28") == (era in ("trl-0.22", "today")), (era, row)
        assert row["loaded frozen"] != "28 of 28" != row["the same, beta 0.04"], (era, row)
        assert row["with checkpointing"] == ("element 0" if era in ("trl-0.14", "trl-0.15") else "0 of 28"), (era, row)
        assert row["is_trainable=True"] == "28 of 28", (era, row)
