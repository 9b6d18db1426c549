"""Notebook 00: the healthy run learns in both library stacks."""


def check(result):
    for era in ("today", "trl-0.14"):
        figures = result.figures(case=f"notebook 00, {era}")
        assert figures["steps"] == 200
        assert figures["accuracy_after"] - figures["accuracy_before"] >= 0.1, (era, figures)
