"""Notebook 03: only LoRA with reentrant checkpointing fails; every cure gives gradients, none gives sane rollouts."""

CURES = (
    "enable_input_require_grads, then wrap",
    "wrap, then enable_input_require_grads",
    "forward hook written out",
    "checkpointing on before the wrap",
    "use_reentrant=False",
    "checkpointing off",
    "prepare_peft",
)


def check(result):
    for family in ("Qwen2", "Llama"):
        for dtype in ("float32", "bf16"):
            for kind in ("off", "reentrant", "non-reentrant"):
                for trained in ("full", "LoRA"):
                    found = result.figures(case=f"notebook 03: {family}, {dtype}, {kind}, {trained}")
                    assert found["reached"] == (0 if (kind, trained) == ("reentrant", "LoRA") else 1), found
    assert result.figures(case="notebook 03: cure nothing")["changed"] == 0
    for name in CURES:
        assert result.figures(case=f"notebook 03: cure {name}")["changed"] == 8, name
    for name, healed in (
        ("checkpointing off", True),
        ("gradients cured", False),
        ("gradients and rollouts", True),
    ):
        run = result.figures(case=f"notebook 03: {name}")
        assert (run["rewards"][0] > run["able"] - 0.08) == healed, (name, run)
        assert (run["rewards"][-1] > run["able"] + 0.05) == healed, (name, run)
    memory = result.figures(case="notebook 03: peak MiB")
    for reentrant, newer, off in zip(memory["reentrant"], memory["non-reentrant"], memory["off"]):
        assert newer <= 1.05 * reentrant < off
    assert memory["off"][-1] > 3 * memory["non-reentrant"][-1]
    silent, healed = (result.figures(case=f"notebook 03: silent{state}") for state in ("", ", healed"))
    assert (silent["changed"], healed["changed"], healed["trainable"]) == (1, 9, 9)
    today = {name: result.figures(case=f"notebook 03: today, {name}") for name in TODAY}
    assert {name: run["reached"] for name, run in today.items()} == TODAY
    normal = today["all protections"]["reward"]
    assert today["generation under checkpointing"]["reward"] < normal - 0.15 < today["no hooks"]["reward"]


TODAY = {  # what is switched off: how many of 8 tensors a gradient reaches
    "all protections": 8,
    "reentrant": 8,
    "no hooks": 8,
    "reentrant, no hooks": 0,
    "generation under checkpointing": 8,
}
