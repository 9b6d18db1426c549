"""Notebook 04: the peak is batch x rows x vocabulary x bytes; the right name, and completion_logps, make it small."""


def check(result):
    broken = result.figures(case="notebook 04: GRPO step")
    assert (broken["rows_made"], broken["rows_needed"]) == (250, 9)
    named = result.figures(case="notebook 04: GRPO step, name passed on")["peak_mib"]
    chunked = result.figures(case="notebook 04: GRPO step, completion_logps")["peak_mib"]
    assert max(chunked, named) < broken["peak_mib"] / 3
    for length in (32, 64, 128, 256):
        lines = [each for each in result.records if each["case"] == f"notebook 04: {length} tokens"]
        found = {each["state"]: each["figures"] for each in lines}
        assert set(found) == {"broken", "healthy"}
        for state, rows in (("broken", length), ("healthy", 17)):
            predicted = 2 * rows * 151_936 * 4 / 2**20
            assert abs(found[state]["predicted_mib"] - predicted) < 0.01
            assert abs(found[state]["forward_mib"] - predicted) < 1, (length, state, found[state])
    ways = result.figures(case="notebook 04: ways")
    assert ways["completion_logps"] <= ways["kept_logits"] / 4 < ways["full_logits"] / 4
    card = next(each for each in result.records if each["case"] == "notebook 04: GiB at the head of Qwen2-0.5B")
    assert card["tier"] in ("simulated", "gpu")
    assert card["figures"]["completion_logps"] <= card["figures"]["kept_logits"] * 2 / 3 < card["figures"]["budget_gib"]
