"""Notebook 02: it takes three switches; undoing the cause heals in both stacks; one place reaches the trainer."""


def check(result):
    grid = {name: result.figures(case=f"notebook 02: {name}") for name in MODES}
    able = grid["eval, cache"]["off"]
    for name, row in grid.items():
        for kind, share in row.items():
            garbage = name == "train, cache" and kind != "off"
            assert share < 0.7 * able if garbage else abs(share - able) < 0.01, (name, kind, share)
    found = result.figures(case="notebook 02")
    assert found["first"] < found["by_hand"] - 0.05, found
    assert abs(found["undone"] - able) < 0.01 and abs(found["undone_today"] - able) < 0.01
    assert found["callback"] < 0.3 * able
    for name in ("nowhere", "model.config", "model.generation_config", "trainer.generation_config"):
        assert (found[name] > found["by_hand"] - 0.05) == name.startswith("trainer"), (name, found)
    old, new = (result.figures(case=f"notebook 02: calls in {era}") for era in ("trl-0.14", "today"))
    for calls in (old["eval"], new["eval"]):  # tokens handed in, tokens in the cache
        assert [call[:2] for call in calls] == [[6, 0], [1, 6], [1, 7]]
    assert old["train"] == [[6, 0, 6], [7, 0, 1], [8, 0, 1]]
    assert [call[:2] for call in new["train"]] == [[6, 0], [1, 0], [1, 0]]


MODES = ("train, cache", "train, no cache", "eval, cache", "eval, no cache")
