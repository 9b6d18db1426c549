"""Notebook 00: the healthy run learns in both library stacks; in bfloat16 a small step changes next to nothing."""


def check(result):
    for name, era in (("today", "today"), ("trl 0.14", "trl-0.14")):
        (record,) = [record for record in result.records if record["case"] == f"notebook 00: {name}"]
        assert record["era"] == era
        figures = record["figures"]
        assert figures["accuracy_after"] - figures["accuracy_before"] >= 0.1, (era, figures)
        assert figures["reward_last"] - figures["reward_first"] >= 0.05, (era, figures)
    changed = result.figures(case="notebook 00: share of weights that a step changes")
    assert changed["float32"] > 0.99 and changed["bfloat16"] < 0.05
