"""Notebook 02: generation in training, by version; and the run that only both repairs heal."""


def check(result):
    matrix = {each["era"]: each["figures"] for each in result.records if each["case"] == "notebook 02: matrix"}
    assert set(matrix) == {"trl-0.14", "trl-0.14-tf-4.52", "today"}
    for era, found in matrix.items():
        able = found["eval mode"]
        assert found["train mode"] == found["train, checkpointing, no cache"] == able > 0.5
        for kind in ("reentrant", "non-reentrant"):
            assert (found[f"train, {kind}"] < 0.7 * able) == (era != "trl-0.14-tf-4.52"), (era, kind, found)
        even = found["equal lengths, train, checkpointing"] / found["equal lengths, eval"]
        assert (even < 0.7) == (era == "today"), (era, found)
    runs = {name: result.figures(case=f"notebook 02: {name}") for name in RUNS}
    for name, (sane, learns) in RUNS.items():
        run = runs[name]
        assert (run["first"] > run["able"] - 0.08) == sane, (name, run)
        assert (run["accuracy_after"] > run["able"] + 0.05) == learns, (name, run)


RUNS = {  # name: are its rollouts sane, does it learn
    "checkpointing off": (True, True),
    "broken": (False, False),
    "gradients repaired": (False, False),
    "rollouts repaired": (True, False),
    "both repaired": (True, True),
}
