"""Notebook 07: the early map says GPU 0; of the cures one is accepted; today the model is asked to move."""

DIFFERENT = "on a different device than the one you're training on"


def check(result):
    def said(name):
        return result.figures(case=f"notebook 07: {name}")["said"]

    for name in ("as it was", "ddp_find_unused_parameters=False", 'fsdp=""'):
        assert DIFFERENT in said(name), name
    assert "`device_map='auto'` in any distributed mode" in said('device_map="auto"')
    assert said('{"": str(PartialState().device)}') == "accepted"
    measured = result.figures(case="notebook 07: maps")
    assert measured == {"maps": [0, 0], "moved_to": ["sim:1"], "steps": [0, 1]}
