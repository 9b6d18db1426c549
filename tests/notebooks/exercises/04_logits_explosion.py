"""Plausible answers that miss something, and a part of what the checker says of each."""

_HEAD = "from failurelab_course.experiments.memory import peak_memory\n\ndef growth(step):\n    "

WRONG = [
    (_HEAD + "return ...", "not written yet"),
    (_HEAD + "return peak_memory(lambda: step(250)) / 250", "not all of a peak is the prompt's"),
    (_HEAD + "return peak_memory(lambda: step(250)) / peak_memory(lambda: step(125))", "0 of 3 cases"),
    (
        _HEAD + "return (peak_memory(lambda: step(250)) - peak_memory(lambda: step(125))) / 125 / 2**20",
        "Divide by the tokens that you added; in bytes",
    ),
    (
        _HEAD + "return peak_memory(lambda: step(250)) - peak_memory(lambda: step(125))",
        "1 of 3 cases. At “64 KiB, and 1 KiB for each token”",
    ),
    (
        _HEAD + "return (peak_memory(lambda: step(64)) - peak_memory(lambda: step(32))) / 32",
        "2 of 3 cases. At “the same, and at another time 100 KiB for the optimizer” it returned 0",
    ),
    (_HEAD + "return (peak_memory(step(250)) - peak_memory(step(125))) / 125", "as peak_memory(lambda: step(n))"),
    (_HEAD + "return (peak_memory(step, 250) - peak_memory(step, 125)) / 125", "as peak_memory(lambda: step(n))"),
]
