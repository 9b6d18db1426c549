"""Notebook 12: long completions in 8 bits leave a few of 64; a cap hardly helps; a weight for each token is near 1."""


def check(result):
    broken, capped, repaired, lengths = (
        result.figures(case=f"notebook 12: {name}")
        for name in ("one weight a completion", "capped at 3", "one weight a token", "lengths")
    )
    assert abs(broken["mean_short"] - 1) < 0.1 and broken["mean_long"] < 0.75
    assert broken["size"] < 16 and max(broken["default"], capped["size"]) < 32  # of 64
    assert abs(repaired["mean"] - 1) < 0.05 and repaired["gap"] < 0.15
    assert lengths["bfloat16_256"] > 48 and lengths["sigma_8"] > 4 * lengths["sigma_16"] > 0
    masked, truncated, single = lengths["fixed"]
    assert max(masked, truncated) < 32 < 60 < single
