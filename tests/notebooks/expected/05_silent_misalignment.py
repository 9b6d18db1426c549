"""Notebook 05: log-probabilities at prompt positions, a KL of 0, a reward that falls; a hook that LoRA passes by."""


def check(result):
    found = result.figures(case="notebook 05")
    assert found["old_rows"] == [3, 4] and found["new_rows"] == [0, 1]
    assert abs(found["untrained"] - found["old"][0]) < 0.1, found
    assert found["cosine"] < 0.6
    assert abs(found["kl"]) < 1e-6 and found["lora"].startswith("4 ahead")
    assert [found[name] for name in ("right_name", "old_name", "off_by_one")] == [1, 4, 0], found
    assert abs(found["again"] - found["old"][0]) < 0.02
    assert found["healed"][-1] > found["healed"][0] + 0.05


# Wrong answers to the exercise.

_HEAD = """
def row_used(log_probs, model, ids, n):
    rows, given, end = model(ids).logits.log_softmax(-1), log_probs(model, ids, n), ids.shape[1]
    def truth(back):
        return rows[:, end - n - back: end - back].gather(-1, ids[:, -n:, None])[..., 0]
    """

WRONG = [
    ("def row_used(log_probs, model, ids, n):\n    return ...", "not written yet"),
    ("def row_used(log_probs, model, ids, n):\n    return 1", "1 of 4 cases. At “`logits[:, -n:]`” it returned 1"),
    (
        "def row_used(log_probs, model, ids, n):\n"
        "    return model(ids).logits.shape[1] - log_probs(model, ids, n).shape[1]",
        "0 of 4 cases. At “the rows before the tokens” it returned 4, and 1 is right",
    ),
    (
        _HEAD + "return min(range(1, end - n + 1), key=lambda back: (truth(back) - given).abs().sum())",
        "The row that has read the token itself counts too",
    ),
    (
        _HEAD + "return min(range(3), key=lambda back: (truth(back) - given).abs().sum())",
        "2 of 4 cases. At “the first rows”",
    ),
    (
        _HEAD + "return next((back for back in range(end - n + 1) if truth(back).equal(given)), None)",
        "3 of 4 cases. At “right rows, rounded to halves” it returned nothing. No row fits",
    ),
    *(
        (_HEAD + f"return min(range(end - n + 1), key=lambda back: {error})", "a part of them, or a sum with signs")
        for error in (
            *(f"(truth(back) - given)[{row}, {token}].abs()" for row in range(2) for token in range(3)),
            *(f"(truth(back) - given)[:, {token}].abs().sum()" for token in range(3)),
            *(f"(truth(back) - given)[{row}].abs().sum()" for row in range(2)),
            "(truth(back) - given).sum().abs()",
            "(truth(back) - given).mean(1).abs().sum()",
            "(truth(back) - given).sum(0).abs().sum()",
        )
    ),
]
RIGHT = [_HEAD + "return min(range(end - n + 1), key=lambda back: (truth(back) - given).square().mean())"]

# The diff: the reward climbs instead of falling; with adapters, which learn at another rate, the guard sees why.

MEASURE = """
log = trainer.state.log_history[:-1]
metrics = {"first": log[0]["reward"], "last": log[-1]["reward"], "kl": log[-1]["kl"]}
healed = metrics["last"] > metrics["first"] + 0.1
"""
LORA_MEASURE = """
from failurelab import guards

guard = guards.LogitsGuard(action="warn")
trainer.add_callback(guard)
trainer.train()
metrics = {"shift": guard.report.shift, "rows": guard.report.scored}
healed = metrics["shift"] == 0 and metrics["rows"] > 10
"""
UPGRADE = {
    "trl-0.22": [
        ("per_device_train_batch_size=16,", "per_device_train_batch_size=128,"),
        ("logging_steps=15,", "logging_steps=15, bf16=False,"),  # a CPU
    ]
}
STAYS = True
SHORT = [("max_steps=60", "max_steps=45")]
SHORT_LORA = [("max_steps=45", "max_steps=2")]  # a step's gradient tells
