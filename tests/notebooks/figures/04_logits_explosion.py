"""Notebook 04: memory follows the prompt; what is alive at the peak; the right name, and chunks, make it small."""

ROW = 151_936 * 4 / 2**20  # MiB of one row of logits
EMBEDDING = 64 * ROW


def check(result):
    grown = [result.figures(case=f"notebook 04: prompts of {length}")["peak_mib"] for length in (32, 62, 122, 242)]
    assert grown == sorted(grown) and grown[-1] > 3 * grown[1]
    broken = result.figures(case="notebook 04: GRPO step")
    assert (broken["rows_made"], broken["rows_needed"]) == (250, 9)
    named = result.figures(case="notebook 04: GRPO step, name passed on")["peak_mib"]
    chunked = result.figures(case="notebook 04: GRPO step, completion_logps")["peak_mib"]
    assert max(chunked, named) < broken["peak_mib"] / 4
    sent, renamed = (result.figures(case=f"notebook 04: at the peak, {name}") for name in ("as sent", "renamed"))
    for run in (sent, renamed):
        assert abs(run["timeline_mib"] - run["profiler_mib"]) < 1, run
    assert [round(size / ROW / 4) for size in sent["sizes"]] == [249, 250]
    assert [round(size / EMBEDDING, 3) for size in renamed["sizes"]] == [1, 1, 1]
    for length, completion in ((32, 16), (128, 16), (256, 16), (256, 128)):
        lines = [each for each in result.records if each["case"] == f"notebook 04: {length}, {completion} tokens"]
        metrics = {each["state"]: each["figures"] for each in lines}
        assert set(metrics) == {"broken", "healthy"}
        for state, rows in (("broken", length), ("healthy", completion + 1)):
            assert abs(metrics[state]["forward_mib"] - 2 * rows * ROW) < 5, (length, state, metrics[state])
            expected = max(2 * (2 * rows - 1) * ROW, 2 * (rows + 2 * completion) * ROW, 3 * EMBEDDING)
            assert abs(metrics[state]["both_mib"] - expected) < 5, (length, state, metrics[state])
    ways = result.figures(case="notebook 04: ways")
    assert ways["logits.completion_logps"] < 2 * EMBEDDING < ways["in chunks of 8 positions"] < ways["renamed"]
    assert ways["renamed"] < ways["as sent"] * 2 / 3
    small, middle, full, beyond = (
        result.figures(case="notebook 04: today")[f"positions_{n}"] for n in (1024, 2048, 4096, 8192)
    )
    assert small < middle < full < beyond < full * 4 / 3
