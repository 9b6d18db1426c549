"""Notebook 03: it takes LoRA and reentrant checkpointing; every cure gives gradients, none gives sane rollouts."""

CHANGES = {  # what was changed in the script: how many tensors train, of how many
    "the script as it is": (0, 28),
    "all weights instead of LoRA": (26, 26),
    "no checkpointing": (28, 28),
    "Llama instead of Qwen2": (0, 28),
}
CURES = (
    "the hook, then the wrap",
    "the wrap, then the hook",
    "use_reentrant=False",
    "checkpointing off",
    "gradients.prepare_peft",
)
TODAY = {"as it is": 28, "reentrant": 28, "the hook taken away": 28, "reentrant, the hook taken away": 0}


def check(result):
    for name, (changed, trainable) in CHANGES.items():
        run = result.figures(case=f"notebook 03: {name}")
        assert (run["changed"], run["trainable"]) == (changed, trainable), (name, run)
    assert result.figures(case="notebook 03: checkpointing first")["changed"] == 28
    for name in CURES:
        assert result.figures(case=f"notebook 03: cure {name}")["changed"] == 28, name
    for name, healed in (("the hook", False), ("the hook, and use_cache=False", True)):
        run = result.figures(case=f"notebook 03: rewards, {name}")
        assert (run["rewards"][0] > run["able"] - 0.08) == healed, (name, run)
        assert (run["rewards"][-1] > run["able"] + 0.05) == healed, (name, run)
    memory = result.figures(case="notebook 03: peak MiB")
    assert memory["non-reentrant"] <= 1.05 * memory["reentrant"] < memory["off"] / 3
    silent = result.figures(case="notebook 03: silent")
    assert (silent["changed"], silent["trainable"]) == (1, 29)
    assert {name: result.figures(case=f"notebook 03: today, {name}")["reached"] for name in TODAY} == TODAY
