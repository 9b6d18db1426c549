"""Notebook 12: long completions in 8 bits leave a few of 64; a cap hardly helps; a weight for each token is near 1."""


def check(result):
    masked, capped, single = (result.figures(state=state)["size"] for state in ("broken", "wrong_fix", "right_fix"))
    assert max(masked, capped) < 32 < 60 < single  # of 64
    lengths = result.figures(case="notebook 12: lengths")
    short, long, repaired = lengths["means"]
    assert abs(short - 1) < 0.1 and long < 0.75 and abs(repaired - 1) < 0.05 and lengths["gap"] < 0.15
    assert lengths["sizes"][6] < 24 < 48 < lengths["sizes"][3]  # 8 bits at 128 tokens, bfloat16 at 256
    few, more, many, *by_token = lengths["turned"]  # cosines of notebook 00's step with a weight, by tokens
    assert few > 0.75 and many < 0.7 and few > more > many < min(by_token) - 0.1
    sigma_16, sigma_8 = lengths["sigmas"]
    assert sigma_8 > 4 * sigma_16 > 0


# Wrong answers to the exercise.


def _answer(weights, rest="float(w.sum() ** 2 / w.square().sum())"):
    return f"def effective_size(log_ratios):\n    w = {weights}\n    return {rest}"


WRONG = [
    (_answer("log_ratios.sum(-1).exp()", "float(w.sum() ** 2 / w.square().sum() / len(w))"), "neither as a share"),
    (_answer("log_ratios.mean(-1).exp()"), "are added up"),
    (_answer("log_ratios.exp()"), "neither as a share"),
    (_answer("log_ratios.sum(-1).exp()"), "exp(1000) is no float any more"),
    (_answer("log_ratios.double().sum(-1).clamp(max=100).exp()"), "exp(-1000) is 0"),
    (_answer("log_ratios.sum(-1).exp().clamp(max=3)"), "nothing is left out or capped"),
    (_answer("(-log_ratios).sum(-1).exp()"), "keep signs"),
    (_answer("(log_ratios.double().sum(-1) - log_ratios[0].double().sum()).exp()"), "the LARGEST sum alone"),
    (_answer("log_ratios.sum(-1)"), "A log-ratio of 0 is a weight of 1: exp."),
]
RIGHT = [
    "def effective_size(log_ratios):\n    import torch\n    sums = log_ratios.sum(1)\n"
    "    return torch.exp(2 * sums.logsumexp(0) - (2 * sums).logsumexp(0))",
    _answer("log_ratios.sum(-1).softmax(0)", "1 / w.square().sum()"),
]

# The diff: the mean importance weight is near 1 at 128 tokens, as it is on average by definition.

BEFORE = """
from failurelab_course.experiments import vllm_stand_in

vllm_stand_in.install(eight_bits=True)
"""
MEASURE = """
rows = [row for row in trainer.state.log_history if "reward" in row]
weights = [row["sampling/importance_sampling_ratio/mean"] for row in rows]
gaps = [row["sampling/sampling_logp_difference/mean"] for row in rows]
metrics = {"weight": sum(weights) / len(weights), "gap": max(gaps)}
healed = abs(metrics["weight"] - 1) < 0.1 and metrics["gap"] < 0.15
"""
SHORT = [("max_steps=5", "max_steps=3")]
