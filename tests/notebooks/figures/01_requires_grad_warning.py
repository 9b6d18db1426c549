"""Notebook 01: the warning comes in the harmless run and in the silent one; what changes tells them apart."""

REQUESTS = {
    "trl-0.14": {"nothing": 25, "reentrant": 1, "non-reentrant": 25, "off": 25, "reentrant + method": 25},
    "trl-0.15": {"nothing": 25, "reentrant": 1, "non-reentrant": 25, "off": 25, "reentrant + method": 25},
    "trl-0.22": {"nothing": 1, "reentrant": 1, "non-reentrant": 1, "off": 25, "reentrant + method": 25},
    "today": {"nothing": 25, "reentrant": 25, "non-reentrant": 25, "off": 25, "reentrant + method": 25},
}


def check(result):
    for trainer in ("GRPO", "Online DPO"):
        full = result.figures(case=f"notebook 01: {trainer}, full")
        frozen = result.figures(case=f"notebook 01: {trainer}, embeddings frozen")
        assert full["warnings"] > 0 and frozen["warnings"] > 0
        assert (full["changed"], full["trainable"]) == (26, 26)
        assert (frozen["changed"], frozen["trainable"]) == (1, 25)
    filtered = result.figures(case="notebook 01: a filter")
    assert (filtered["warnings"], filtered["changed"]) == (0, 1)
    repaired = result.figures(case="notebook 01: repaired")
    assert repaired["warnings"] > 0 and repaired["changed"] == 25
    memory = result.figures(case="notebook 01: peak MiB")
    assert memory["off"] > 2 * memory["non-reentrant"]
    changed = {
        record["era"]: record["figures"]
        for record in result.records
        if record["case"] == "notebook 01: tensors changed, by request"
    }
    assert changed == REQUESTS
