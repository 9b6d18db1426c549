"""Notebook 00: the check by the first rewards passes a healthy run and fires in a broken one; defaults have moved."""


def check(result):
    found = result.figures(case="notebook 00")
    assert found["first"] > found["by_hand"] - 0.05 and found["last"] > found["first"] + 0.1, found
    assert found["first_cut"] < found["by_hand"] - 0.2 and found["grad_norm_cut"] > 0.1, found
    assert found["grad_norm_long"] == 0 and found["clipped"] == 1 and found["same"] == [], found
