"""Notebook 14: the tool's words leave the loss by a mask; only ids that are joined as drawn keep the ends."""


def check(result):
    found, masked, by_ids = (
        result.figures(case=f"notebook 14: {name}") for name in ("as found", "masked by text", "by ids")
    )
    figures = result.figures(case="notebook 14: figures")
    assert 60 < figures["share"] < 95
    tools, own = figures["odds"]  # medians of probabilities
    assert tools < 1e-4 and own > 0.2
    assert found["cosine"] < 0.9 and min(masked["cosine"], by_ids["cosine"]) > 0.999
    assert found["apart"] > 60 and masked["apart"] > 60 and by_ids["apart"] == 0
    assert figures["grad_norm"] == 0 < figures["kept_norm"]  # every completion counts as cut
    assert by_ids["last"] > found["last"] + 0.04
