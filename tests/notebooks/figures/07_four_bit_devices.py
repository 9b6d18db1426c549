"""Notebook 07: the early map says GPU 0; a config before it heals; today the model is asked to move, without a word."""

DIFFERENT = "on a different device than the one you're training on"


def check(result):
    def said(name):
        return result.figures(case=f"notebook 07: {name}")["said"]

    for name in ("as it was", "ddp_find_unused_parameters=False", 'fsdp=""'):
        assert DIFFERENT in said(name), name
    assert "`device_map='auto'` in any distributed mode" in said('device_map="auto"')
    for name in ("GRPOConfig first, the map unchanged", '{"": str(PartialState().device)}'):
        assert said(name) == "accepted", name
    measured = result.figures(case="notebook 07: maps")
    assert measured["maps"] == [0, 0] and measured["moved_to"] == ["sim:1"]
    assert [[gpu for _, gpu in trace] for trace in measured["traces"]] == [[0, 0, 0, 0], [0, 0, 0, 1]]
    early_0, early_1, repaired_0, repaired_1 = measured["elsewhere"]
    assert early_1 > 20 and early_0 == repaired_0 == repaired_1 == 0
