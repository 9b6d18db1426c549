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
    (_answer("(-log_ratios).sum(-1).exp()"), "keep signs"),
    (_answer("log_ratios.abs().sum(-1).exp()"), "keep signs"),
    (_answer("log_ratios.clamp(min=0).sum(-1).exp()"), "keep signs"),
    (_answer("(log_ratios.mean(1) * len(log_ratios)).exp()"), "add the tokens of a row"),
    (_answer("log_ratios.double().sum(-1).clamp(-300, 300).exp()"), "exp(-1000) is 0"),
    (_answer("(log_ratios.double().sum(-1) - log_ratios.double().sum(-1).mean()).exp()"), "not the mean or the first"),
    (_answer("(log_ratios.double().sum(-1) - log_ratios[0].double().sum()).exp()"), "not the mean or the first"),
    (_answer("log_ratios.sum(-1)"), "A log-ratio of 0 is a weight of 1: exp."),
]
RIGHT = [
    "def effective_size(log_ratios):\n    import torch\n    sums = log_ratios.sum(1)\n"
    "    return torch.exp(2 * sums.logsumexp(0) - (2 * sums).logsumexp(0))",
    _answer("log_ratios.sum(-1).softmax(0)", "1 / w.square().sum()"),
]
