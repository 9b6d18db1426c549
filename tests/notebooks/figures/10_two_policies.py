"""Notebook 10: only old weights take the gap away; without the reload the reward climbs; the weights carry the run."""


def check(result):
    broken, awake, repaired = (
        result.figures(case=f"notebook 10: {name}") for name in ("as trl 1.9", "no sleep mode", "as trl 1.10")
    )
    assert broken["last"] < broken["first"] + 0.08 < awake["last"] and broken["gap"] > 0.1
    assert broken["after"] > broken["before"] + 0.05  # trl's importance weights
    for healed in (awake, repaired):
        assert healed["last"] > healed["first"] + 0.08 and healed["gap"] < 0.02
        assert healed["after"] > healed["before"] + 0.1
    found = result.figures(case="notebook 10: suspects")
    assert 0 < found["gap_first"] < 0.02 and max(found["uncorrected"]) < broken["after"] - 0.03
    assert found["old weights"] < found["nothing"] / 10
    for suspect in ("the format", "the temperature", "the token beside"):
        assert found[suspect] > found["nothing"] / 3, suspect
    assert found["copied"] == 0  # a deep copy runs the original
    assert found["draws_then"] == ["first"] and found["draws_now"] == ["trained"]
