"""Notebook 02: generation in training, by version and by cure; and the run that only both repairs heal."""


def check(result):
    matrix = {each["era"]: each["figures"] for each in result.records if each["case"] == "notebook 02: matrix"}
    assert set(matrix) == {"trl-0.14", "trl-0.14-tf-4.52", "today"}
    for era, found in matrix.items():
        able = found["eval mode"]
        assert found["train mode"] == found["train, checkpointing, no cache"] == able > 0.5
        assert found["eval mode, checkpointing on"] == able
        for kind in ("reentrant", "non-reentrant"):
            assert (found[f"train, {kind}"] < 0.7 * able) == (era != "trl-0.14-tf-4.52"), (era, kind, found)
        even = found["equal lengths, train, checkpointing"] / found["equal lengths, eval"]
        assert (even < 0.7) == (era == "today"), (era, found)
    right = result.figures(case="notebook 02: rollouts, no checkpointing")["reward"]
    for name, sane in CHANGES.items():
        reward = result.figures(case=f"notebook 02: rollouts, {name}")["reward"]
        assert (abs(reward - right) < 0.02) == sane and (sane or reward < right - 0.1), (name, reward, right)
    for name, (sane, learns) in RUNS.items():
        run = result.figures(case=f"notebook 02: {name}")
        assert (run["first"] > run["able"] - 0.07) == sane, (name, run)
        assert (run["accuracy_after"] > run["able"] + 0.05) == learns, (name, run)


CHANGES = {  # what was changed: are rollouts sane
    "nothing is changed": False,
    "model.config.use_cache = False": False,
    "model.generation_config.use_cache = False": False,
    "trainer.generation_config.use_cache = False": True,
    "eval mode around generate": True,
    "model.enable_input_require_grads()": False,
}
RUNS = {  # name: are its rollouts sane, does it learn
    "checkpointing off": (True, True),
    "broken": (False, False),
    "gradients repaired": (False, False),
    "rollouts repaired": (True, False),
    "both repaired": (True, True),
}
