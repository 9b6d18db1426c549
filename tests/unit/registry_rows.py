"""Which statements of the registry a row of the atlas holds: failures with the number of an `affected` stack, from 0.

A row shows a failure where one of these stacks has the releases at hand, and nowhere else. What a row's set-up asks for
is the condition of its stacks (`use_reentrant=False`, a model that was wrapped by hand); rows about a person's own part
(a model in bfloat16) are held by none.
"""

Entry = tuple[str, int]

ENTRIES: dict[str, list[Entry]] = {
    "F1 frozen, default": [("F1", 0), ("F1", 2), ("F1", 3)],
    "F1 frozen, reentrant": [("F1", 0), ("F1", 2), ("F1", 3), ("F1", 5)],
    "F1 frozen, non-reentrant": [("F1", 2)],
    "F1 OnlineDPO frozen, default": [("F1", 1)],
    "F1 OnlineDPO frozen, non-reentrant": [("F1", 2), ("F1", 3)],
    "F2 peft_config, default": [("F2", 0)],
    "F2 peft_config, non-reentrant": [],
    "F2 wrapped, default": [("F2", 0)],
    "F2 wrapped, non-reentrant": [("F2", 1)],
    "F2 OnlineDPO, default": [("F2", 2)],
    "F3a long prompt": [("F3a", 0)],
    "F3a memory": [("F3a", 0), ("F3a", 2)],
    "F3b scores": [("F3b", 0)],
    "F4 ZeRO-3": [("F4", 0)],
    "F4 evaluate before train": [("F4", 2)],
    "F7 checkpointing": [("F7", 0), ("F7", 1)],
    "F7 non-reentrant": [("F7", 0), ("F7", 1)],
    "F8 loaded adapter": [("F8", 0)],
    "F9 name": [("F9", 2)],
    "F9 bfloat16, LoRA": [],
    "F9 QLoRA": [("F9", 1)],
    "F11 long prompts": [("F11", 1)],
    "F13 ends": [("F13", 0)],
    "F15 temperature": [("F15", 0)],
    "F16 rollout_func": [("F16", 0)],
    "F18 tools": [("F18", 0)],
    "F19 trained adapter": [("F19", 0)],
    "F19 merged adapter": [("F19", 1)],
    "F20 steps_per_generation": [("F20", 0), ("F20", 1), ("F21", 2)],
    "F22 refused batch": [("F22", 0)],
    "F22 one generation": [("F22", 0), ("F22", 1)],
    "F23 loaded adapter": [("F23", 0)],
    "F23 loaded adapter, beta": [("F23", 0)],
}


def entries(row: str) -> list[Entry] | None:
    """Return the entries that a row holds; None where it holds none of the registry's.

    Each step of GRPOTrainer beside its definition holds those of F15, F20 and F21 that its options ask for.
    """
    if not row.startswith("step ") or row in ("step OnlineDPO", "step RLOO"):
        return ENTRIES.get(row)
    asked = [("F21", 2)]
    asked += [("F15", 0)] * ("temperature=1.0" not in row)
    asked += [("F20", 1), ("F20", 2)] * ("gradient_accumulation_steps=2" in row)
    asked += [("F20", 0)] * ("steps_per_generation=2" in row)
    return asked
