"""Wrong answers to the exercise of notebook 10, and part of what its checker says of each."""


def _answer(line):
    return f"def score(logits, start, ids):\n    import torch\n    return {line}"


_RIGHT = "logits[start - 1:-1].float().log_softmax(-1).gather(1, ids[:, None])[:, 0]"
WRONG = [
    (_answer("logits[start:].log_softmax(-1).gather(1, ids[:, None])[:, 0]"), "The logits at a place are those"),
    (_answer("logits[start - 1:-1].softmax(-1).gather(1, ids[:, None])[:, 0]"), "The logits at a place are those"),
    (_answer("logits[start - 1:-1].gather(1, ids[:, None])[:, 0]"), "The logits at a place are those"),
    (_answer("logits[start - 1:-1].log_softmax(-1).gather(1, ids[:, None])[:, 0].mean(0, keepdim=True)"), "1 of 3"),
    (_answer("logits[start - 1:-1].log_softmax(0).gather(1, ids[:, None])[:, 0]"), "0 of 3"),
    (_answer("logits[start - 1:-1].log_softmax(-1).gather(1, ids[:, None])[:, 0]"), "log_softmax in bfloat16"),
    *[
        (_answer(f"{before}{_RIGHT}{after}"), "nats; shape (len(ids),)")
        for before, after in (("", "[None]"), ("", ".tolist()"), ("", ".sum()"), ("", ".mean()"), ("-", ""))
    ],
    (_answer(f"{_RIGHT} / torch.log(torch.tensor(2.0))"), "(Tensor) is right"),
    (_answer("logits[start - 1:-1].log_softmax(-1)[:, ids]"), "shape (len(ids),)"),
]
