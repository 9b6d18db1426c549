"""Notebook 10: only sent weights take the gap away; long completions lose weight, though nothing is stale."""


def check(result):
    broken = result.figures(case="notebook 10: never sent")
    assert broken["last"] < broken["first"] + 0.08 and broken["after"] < broken["before"] + 0.05
    assert broken["gap_before"] < 0.05 < 0.1 < broken["gap_after"]
    assert broken["left, old weights"] < broken["gap_after"] / 3
    for suspect in ("dtype", "temperature", "other tokens"):
        assert broken[f"left, {suspect}"] > broken["gap_after"] / 3, suspect
    healed = result.figures(case="notebook 10: sent at every step")
    assert healed["last"] > broken["first"] + 0.08 and healed["gap"] < 0.05
    behind = result.figures(case="notebook 10: sent every 20 steps")
    assert behind["gap"] > 10 * healed["gap"]
    short, long = (result.figures(case=f"notebook 10: {length} tokens") for length in (16, 448))
    assert long["left"] < short["left"] - 0.05 and abs(long["gap"] - short["gap"]) < 0.02
