"""Notebook 04: as released the head makes a row for each token, with the diff those that are needed."""

MEASURE = """
import torch

rows = []
hook = trainer.model.lm_head.register_forward_hook(
    lambda head, inputs, output: rows.append(output.shape[1]) if torch.is_grad_enabled() else None
)
trainer.train()
hook.remove()
metrics = {"made": max(rows), "needed": args.max_completion_length + 1}
healed = metrics["made"] == metrics["needed"]
"""
