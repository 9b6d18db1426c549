"""Notebook 11: the tree names nine of ten known runs and the mystery, nine of 22 others, and two of 40 healthy runs.

With the column the reward starts where the model is.
"""


def check(result):
    broken, healed = (result.figures(case=f"notebook 11: {name}") for name in ("answers", "answer"))
    assert broken["first"] < 0.1 and broken["last"] < 0.15
    assert broken["after"] < broken["before"] - 0.1
    assert abs(healed["first"] - healed["before"]) < 0.15
    assert healed["after"] > healed["before"] + 0.03
    looks = result.figures(case="notebook 11: looks")
    assert looks["named"] == [letter != "C" for letter in "ABCDEFGHIJ"] and looks["mystery"] == "F14, blind reward"
    assert looks["above"] == "pays wrong answers" and looks["ahead"] == "F16, old engine"  # both sides count
    assert looks["healed"] == "none of these"
    assert looks["healthy"] == 40 and looks["accused"] == ["two_rewards", "two_rewards"]
    assert looks["unseen"] == [22, 9, 9]  # runs, named, not named
    assert looks["in_order"] == 1 and looks["as_asked"] < 0.2
