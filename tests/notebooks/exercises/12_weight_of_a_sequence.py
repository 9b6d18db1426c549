"""Wrong answers to the exercise of notebook 12, and part of what its checker says of each."""


def _answer(weights, rest="float(w.sum() ** 2 / w.square().sum())"):
    return f"def effective_size(log_ratios):\n    w = {weights}\n    return {rest}"


WRONG = [
    (_answer("log_ratios.sum(-1).exp()", "float(w.sum() ** 2 / w.square().sum() / len(w))"), "neither as a share"),
    (_answer("log_ratios.mean(-1).exp()"), "are added up"),
    (_answer("log_ratios.exp()"), "neither as a share"),
    (_answer("log_ratios.exp().mean(-1)"), "are added up"),
    (_answer("log_ratios.sum(-1).exp()"), "exp(1000) is no float any more"),
    (_answer("log_ratios.double().sum(-1).clamp(max=100).exp()"), "exp(-1000) is 0"),
    (_answer("log_ratios.sum(-1).exp().clamp(max=3)"), "nothing is left out or capped"),
]
