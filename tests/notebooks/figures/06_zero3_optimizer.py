"""Notebook 06: the message, the hooks that a guard leaves on and what they cost, and the same training after repair."""


def check(result):
    broken = result.figures(case="notebook 06: the bare model")
    assert broken["message"] == "'Qwen2ForCausalLM' object has no attribute 'optimizer'"
    engine = result.figures(case="notebook 06: the engine")
    assert (engine["steps"], engine["hooks"]) == (2, 0)
    silent = result.figures(case="notebook 06: trl 0.15 as it is")
    repaired = result.figures(case="notebook 06: repaired")
    assert silent["hooks"] > 100 and repaired["hooks"] == 0
    assert silent["rewards"] == repaired["rewards"]
    # Times are told, not asserted: the ledger holds those of a run of their own.
    times = result.figures(case="notebook 06: times as long as with hooks off")
    assert times.keys() == {"no DeepSpeed", "engine: hooks off", "guard: hooks on", "bare generate"}
    assert min(times.values()) > 0
    parity = result.figures(case="notebook 06: parity on fixed completions")
    assert parity["apart"] <= 1e-5 < 5e-4 < parity["moved"]
