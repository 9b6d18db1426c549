"""Notebook 05: log-probabilities at prompt positions, a KL of 0, a reward that falls; a hook that LoRA passes by."""


def check(result):
    def figures(case):
        return result.figures(case=f"notebook 05: {case}")

    right, wrong = figures("trl-0.14"), figures("trl-0.14-tf-4.52")
    assert right["rows"] == [3, 4] and wrong["rows"] == [0, 1]
    tried = figures("tried")
    assert abs(tried["untrained"] - right["rewards"][0]) < 0.1, tried
    assert figures("one line of the step")["cosine"] < 0.6
    assert abs(tried["kl"]) < 1e-6 and tried["rows"].startswith("4 ahead")
    assert figures("rows that functions use today") == {"right_name": 1, "old_name": 4, "off_by_one": 0}
    healed = figures("forward")
    assert abs(healed["first"] - right["rewards"][0]) < 0.02
    assert healed["lora"][-1] > healed["lora"][0] + 0.05


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
