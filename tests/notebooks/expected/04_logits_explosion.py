"""Notebook 04: memory follows the prompt; one renamed object breaks the KL; the class changed, the rows are gone."""


def check(result):
    found = result.figures(case="notebook 04")
    broken, cured = found["broken"], found["cured"]
    (same, swallowed), (right, kept) = found["sheets"]  # by notebook 00's step: values, and rows made
    assert min(same, right) > 0.9999 and (swallowed, kept) == (46, 5)
    assert broken == sorted(broken) and broken[-1] > 3 * broken[0]
    assert cured[-1] < 1.2 * cured[0] and cured[-1] < broken[-1] / 3
    assert found["logits_to_keep"] < 0.1  # MiB for a token today
    # a row, and its slice's gradient
    assert abs(found["num_logits_to_keep"] / (2 * 151_936 * 4 / 2**20) - 1) < 0.05
    assert abs(found["one_model"]) < 1e-9 < found["changed_class"], found


# Wrong answers to the exercise.

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

# The diff: as released the head makes a row for each token, with the diff those that are asked for. Generation still
# asks for one row, so that the signature is still read; and the reference model is not the policy.

MEASURE = """
import torch
import trl
from packaging.version import Version

rows, first = [], []
head = trainer.model.get_output_embeddings()
hook = head.register_forward_hook(
    lambda head, inputs, output: (rows if torch.is_grad_enabled() else first).append(output.shape[1])
)
trainer.train()
hook.remove()
metrics = {"made": max(rows), "asked": options["max_completion_length"] + 1, "generating": max(first)}
healed = metrics["made"] == metrics["asked"] and metrics["generating"] <= metrics["asked"]
if Version(trl.__version__) < Version("0.16"):  # later ones load the reference by the model's name, and this has none
    metrics["kl"] = train(max_steps=3, beta=0.1).state.log_history[-2]["kl"]
    healed = healed and metrics["kl"] > 0
"""
UPGRADE = {"trl-0.22": []}
STAYS = True
SHORT = [('"1+" * 120', '"1+" * 20')]
