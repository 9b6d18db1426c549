"""Notebook 08: the step of trl 0.14 is not the textbook's where prompts are padded; one pair sees it, and others."""


def check(result):
    found, alone, newer = (
        result.figures(case=f"notebook 08: {name}") for name in ("trl 0.14", "one prompt a batch", "trl 0.15")
    )
    assert found["cosine"] < 0.97
    for pair in (alone, newer):
        assert pair["cosine"] > 0.9999 and abs(pair["size"] - 1) < 0.001
    frozen, garbage, temperature, tokens = (
        result.figures(case=f"notebook 08: {name}")
        for name in ("01, the frozen embeddings", "02, the garbage rollouts", "the temperature", "05, the other tokens")
    )
    assert frozen["cosine"] < 0.2 and tokens["cosine"] < 0.5
    assert garbage["cosine"] > 0.999 and temperature["cosine"] > 0.99 and 0.4 < temperature["size"] < 0.6
    rounded = result.figures(case="notebook 08: weights in bfloat16")
    assert rounded["verdict"] == "HELD" and rounded["changed"] < 0.05
