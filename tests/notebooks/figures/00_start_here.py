"""Notebook 00: the check by the first rewards passes a healthy run and fires in a broken one; defaults have moved."""


def check(result):
    found = result.figures(case="notebook 00")
    assert found["first"] > found["by_hand"] - 0.05 and found["last"] > found["first"] + 0.1, found
    assert found["first_cut"] < found["by_hand"] - 0.2 and found["grad_norm_cut"] > 0.1, found
    assert found["grad_norm_long"] == 0 and found["clipped"] == 1 and found["same"] == [], found
    assert abs(found["by_hand_long"] - found["by_hand"]) < 0.1, found
    # The exercise's share of silent groups is TRL's own, of the same completions.
    assert all(abs(own - trl) < 1e-3 for own, trl in zip(found["silent"], found["silent_trl"])), found
    script, cut, cut_two_digits = found["silent"]
    assert script < 0.5 < cut < 1 == cut_two_digits, found
    # Of the archive: the healthy and repaired, those with broken rollouts, and those that are broken after the rollout.
    healthy, rollouts, later = (count.split(" of ") for count in found["fired"])
    assert healthy[0] == later[0] == "0" and rollouts[0] == rollouts[1] and int(rollouts[1]) >= 9, found
    assert sum(int(runs) for _, runs in (healthy, rollouts, later)) >= 40, found
