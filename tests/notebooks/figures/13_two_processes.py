"""Notebook 13: rank 1 trains with rank 0's advantages; cut at the right place, two processes learn as one does."""


def check(result):
    broken, repaired = (result.figures(case=f"notebook 13: {name}") for name in ("two processes", "two, repaired"))
    runs = result.figures(case="notebook 13: runs")
    assert broken["copied"] and broken["cosine"] < 0.9
    assert broken["cosines"][0] > 0.999 and abs(broken["cosines"][1]) < 0.6
    assert "advantages mixed between ranks" in runs["reason"]
    assert not repaired["copied"] and min(repaired["cosine"], *repaired["cosines"]) > 0.999
    assert repaired["late"] > broken["late"] + 0.06 and abs(repaired["late"] - runs["alone"]) < 0.08
    assert runs["twice"] < broken["late"] + 0.03  # no rate turns a step round
    assert runs["cosine"] > 0.999 and runs["alone_twice"] > runs["twice"] + 0.06  # the rate alone is not the whole fall
