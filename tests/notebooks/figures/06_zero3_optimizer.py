"""Notebook 06: the whole model for each of 24 tokens, and once with the engine; only the engine has an optimizer."""


def check(result):
    states = {record["state"]: record["figures"] for record in result.records if record["case"].endswith("processes")}
    broken, healed = states["broken"], states["right_fix"]
    assert (round(broken["gathered"]), round(healed["gathered"])) == (24, 1)
    assert round(broken["before"]) == round(healed["before"]) == 1
    assert broken["hooks"] > 20 and healed["hooks"] == 0
    # Times are told, not asserted: evidence/ holds those of a run of their own.
    assert broken["seconds"] > 0 < healed["seconds"]
    assert result.figures(case="notebook 06: who has one") == {"model": False, "model_wrapped": True}
