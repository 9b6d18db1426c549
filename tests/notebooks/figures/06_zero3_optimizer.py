"""Notebook 06: the whole model for each of 24 tokens, and once with the engine; only the engine has an optimizer."""


def check(result):
    states = {record["state"]: record["figures"] for record in result.records if record["case"].endswith("processes")}
    broken, healed = states["broken"], states["right_fix"]
    assert [round(models) for models in broken["tokens"]] == [1] * 24
    assert [round(models) for models in healed["tokens"]] == [1] + [0] * 23
    assert max(broken["held"]) < 0.5 and min(healed["held"]) == 1
    assert broken["hooks"] > 20 and healed["hooks"] == 0
    # Times are told, not asserted: evidence/ holds those of a run of their own.
    assert broken["seconds"] > 0 < healed["seconds"]
    assert result.figures(case="notebook 06: who has one") == {"model": False, "model_wrapped": True}
