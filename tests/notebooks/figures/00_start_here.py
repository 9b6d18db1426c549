"""Notebook 00: the healthy run learns in both library stacks."""


def check(result):
    for name, era in (("today", "today"), ("trl 0.14", "trl-0.14")):
        (made,) = [each for each in result.records if each["case"] == f"notebook 00: {name}"]
        assert made["era"] == era
        figures = made["figures"]
        assert figures["accuracy_after"] - figures["accuracy_before"] >= 0.1, (era, figures)
