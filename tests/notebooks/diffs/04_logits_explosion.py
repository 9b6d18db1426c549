"""Notebook 04: as released the head makes a row for each token, with the diff those that are asked for.

Generation still asks for one row, so that the signature is still read; and the reference model is not the policy.
"""

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
