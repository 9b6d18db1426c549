"""Notebook 08: four failures at once, each found before step one and healed in turn; a 4-bit run that learns."""


def check(result):
    states = {name: result.figures(case=f"notebook 08: {name}") for name in STATES}
    for name, wanted in STATES.items():
        found = states[name]
        placed, gradients, sane, rows = (
            found["refused"] == 0,
            found["without"] == 0,
            found["sane"],
            found["made"] <= found["needed"],
        )
        assert (placed, gradients, sane, rows) == wanted, (name, found)
        assert ("element 0 of tensors" in found["error"]) == (not gradients), (name, found)
    assert states["broken"]["without"] == states["broken"]["trainable"] == 28
    garbage, waste, healed = (states[name] for name in ("+ gradients", "+ rollouts", "+ logits"))
    assert garbage["first"] < garbage["able"] - 0.08 and garbage["last"] < garbage["able"]
    assert waste["after"] > waste["able"] + 0.05 and waste["last"] > waste["able"]
    assert waste["after"] > garbage["after"]
    # the last repair saves memory, and changes no number but by rounding
    assert abs(healed["after"] - waste["after"]) < 0.05 and abs(healed["last"] - waste["last"]) < 0.05
    found = result.figures(case="notebook 08: QLoRA")
    assert found["after"] > found["before"] + 0.05 and found["last"] > found["first"]
    assert found["unchanged"] == found["quantized"] == 14 and found["require_grad"] == found["with_grad"] == 0
    assert found["changed"] == found["adapters"] == 28
    assert found["to_dequantized"] < 1e-4 < 1e-2 < found["to_original"]


STATES = {  # name: placement, gradients, rollouts and logits are right
    "broken": (False, False, False, False),
    "+ placement": (True, False, False, False),
    "+ gradients": (True, True, False, False),
    "+ rollouts": (True, True, True, False),
    "+ logits": (True, True, True, True),
}
