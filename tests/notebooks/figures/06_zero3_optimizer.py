"""Notebook 06: the engine heals; two processes show what the hooks cost, and that rank 0 alone waits."""


def check(result):
    engine = result.figures(case="notebook 06: the engine")
    assert (engine["steps"], engine["hooks"]) == (2, 0)
    guarded = result.figures(case="notebook 06: trl 0.15 as it is, two processes")
    bare = result.figures(case="notebook 06: bare generate, two processes")
    healed = result.figures(case="notebook 06: the engine, two processes")
    assert guarded["hooks"] == bare["hooks"] > 100 and healed["hooks"] == 0
    # The whole model is gathered for each of 24 tokens; with the engine handed over once.
    assert (guarded["gathered"], bare["gathered"], healed["gathered"]) == (24, 24, 1)
    # Times are told, not asserted: evidence/ holds those of a run of their own.
    assert min(way["times"] for way in (guarded, bare, healed)) > 0
    both = result.figures(case="notebook 06: two processes")
    assert both["holds"] == [both["whole"] / 2] * 2 and both["same_tokens"]
    assert both["waits"] == [True, True, False]
