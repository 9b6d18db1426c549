"""Notebook 07: the early map says GPU 0; of the cures one is accepted wherever it runs; today the model is moved."""

DIFFERENT = "on a different device than the one you're training on"


def check(result):
    def said(name):
        figures = result.figures(case=f"notebook 07: {name}")
        return figures["two_visible"], figures["one_visible"]

    for name in ("as it was", "ddp_find_unused_parameters=False", 'fsdp=""'):
        assert DIFFERENT in said(name)[0] and said(name)[1] == "accepted", name
    assert "`device_map='auto'` in any distributed mode" in said('device_map="auto"')[0]
    two, one = said("PartialState().local_process_index")
    assert two == "accepted" and DIFFERENT in one
    assert said("PartialState().device") == ("accepted", "accepted")
    measured = result.figures(case="notebook 07: maps")
    assert measured == {"maps": [0, 0], "moved_to": ["sim:1"], "steps": [0, 0, 1]}
