"""Plausible answers that miss something, and a part of what the checker says of each."""

_HEAD = """
def row_used(score, model, ids, n):
    rows, scores, end = model(ids).logits.log_softmax(-1), score(model, ids, n), ids.shape[1]
    def truth(back):
        return rows[:, end - n - back: end - back].gather(-1, ids[:, -n:, None])[..., 0]
    """

WRONG = [
    ("def row_used(score, model, ids, n):\n    return ...", "not written yet"),
    ("def row_used(score, model, ids, n):\n    return 1", "1 of 4 cases. At “`logits[:, -n:]`” it returned 1"),
    (
        "def row_used(score, model, ids, n):\n    return model(ids).logits.shape[1] - score(model, ids, n).shape[1]",
        "0 of 4 cases. At “the rows before the tokens” it returned 4, and 1 is right",
    ),
    (
        _HEAD + "return min(range(1, end - n + 1), key=lambda back: (truth(back) - scores).abs().sum())",
        "The row that has read the token itself counts too",
    ),
    (
        _HEAD + "return min(range(3), key=lambda back: (truth(back) - scores).abs().sum())",
        "2 of 4 cases. At “the first rows”",
    ),
    (
        _HEAD + "return next((back for back in range(end - n + 1) if truth(back).equal(scores)), None)",
        "3 of 4 cases. At “right rows, rounded to halves” it returned nothing. No row fits",
    ),
    *(
        (_HEAD + f"return min(range(end - n + 1), key=lambda back: {error})", "a part of them, or a sum with signs")
        for error in (
            *(f"(truth(back) - scores)[{row}, {token}].abs()" for row in range(2) for token in range(3)),
            *(f"(truth(back) - scores)[:, {token}].abs().sum()" for token in range(3)),
            *(f"(truth(back) - scores)[{row}].abs().sum()" for row in range(2)),
            "(truth(back) - scores).sum().abs()",
            "(truth(back) - scores).mean(1).abs().sum()",
            "(truth(back) - scores).sum(0).abs().sum()",
        )
    ),
]
RIGHT = [_HEAD + "return min(range(end - n + 1), key=lambda back: (truth(back) - scores).square().mean())"]
