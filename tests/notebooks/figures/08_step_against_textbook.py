"""Notebook 08: the step of trl 0.14 is not the textbook's where prompts are padded; one pair sees it, and others."""


def check(result):
    found, alone, newer = (
        result.figures(case=f"notebook 08: {name}", state=state)
        for name, state in (
            ("trl 0.14.0", "broken"),
            ("one prompt a batch", "right_fix"),
            ("trl 0.15.2", "right_fix"),
        )
    )
    assert found["cosine"] < 0.97
    for pair in (alone, newer):
        assert pair["cosine"] > 0.9999 and abs(pair["size"] - 1) < 0.001
    healthy, frozen, garbage, temperature = (
        result.figures(case=f"notebook 08: {name}")
        for name in ("healthy", "01, the frozen embeddings", "02, the garbage rollouts", "the temperature")
    )
    assert healthy["cosine"] > 0.9999 and frozen["cosine"] < 0.2
    assert garbage["cosine"] > 0.999 and temperature["cosine"] > 0.99 and 0.4 < temperature["size"] < 0.6
    hot = result.figures(case="notebook 08: the temperature, 2")
    assert hot["cosine"] < 0.985 and hot["size"] > 1.5
    adam, sgd = (result.figures(case=f"notebook 08: {name}") for name in ("AdamW", "SGD"))
    assert adam["cosine"] > 0.999 and 0.98 < adam["size"] < 1.02
    assert sgd["cosine"] > 0.9999 and abs(sgd["size"] - 0.49) < 0.001
    guards = result.figures(case="notebook 08: guards")
    assert guards["broken"] == ["StepGuard: found"] and guards["healed"] == []
    for run in ("healthy", "healthy, small"):
        assert not any("found" in line or "not checked" in line for line in guards[run]), run
