"""Notebook 15: a batch that is cut gets another gradient; the map, trl's adapters and the hunt name what does it."""


def check(result):
    broken, repaired = (
        result.figures(case=f"notebook 15: {name}")
        for name in ("the script, two micro-batches", "with micro_loss, four")
    )
    libraries = result.figures(case="notebook 15: libraries")
    assert broken["cosine"] < 0.99 and abs(broken["size"] - 1) > 0.05
    assert repaired["cosine"] > 0.9999 and abs(repaired["size"] - 1) < 1e-4
    assert abs(libraries["long_row"] - 2 / 3) < 1e-6  # 12 / (2 * 9)
    assert libraries["differ"] == ["trl's AsyncGRPOTrainer"]
    assert libraries["trl"] == [] and libraries["trl_async"] == ["mean of means, each over all ranks"]
    assert libraries["hunt"] == ["ratio is 1", "old has no effect", "epsilon_high has no effect"]


# Wrong answers to the exercise: what one micro-batch adds.


def _answer(value):
    return f"def micro_loss(terms, mask, step_tokens, ranks):\n    return {value}"


WRONG = [
    (_answer("(terms * mask).sum()"), "divided by their number"),
    (_answer("(terms * mask).sum() / mask.sum() * ranks"), "must not count for more"),
    (_answer("terms.sum() / step_tokens * ranks"), "What is masked adds nothing"),
    (_answer("(terms * mask).sum() / step_tokens"), "multiply by their number"),
    (_answer("(terms * mask).sum() / step_tokens / ranks"), "multiply by their number"),
    (_answer("(terms * mask).sum() / mask.sum() * mask.sum() / step_tokens * ranks"), "no 0 / 0"),
]
RIGHT = [
    _answer("ranks * (terms * mask / step_tokens).sum()"),
    _answer("float(terms[mask > 0].sum()) * ranks / step_tokens"),
]

# The diff: cut in two, the step is that of the whole batch. The script has no model, so it has no adapters.

LORA = None
MEASURE = """
metrics = {"cosine": float(cosine), "size": float(size)}
healed = metrics["cosine"] > 0.9999 and abs(metrics["size"] - 1) < 1e-4
"""
