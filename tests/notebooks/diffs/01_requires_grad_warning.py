"""Notebook 01: with the embeddings frozen one tensor of 25 is trained; with the diff all are."""

MEASURE = """
import torch

disk = AutoModelForCausalLM.from_pretrained(model_path)
trainable = [pair for pair in zip(model.parameters(), disk.parameters()) if pair[0].requires_grad]
changed = sum(not torch.equal(parameter.cpu(), old) for parameter, old in trainable)
healed = changed == len(trainable)
metrics = {"changed": changed, "trainable": len(trainable)}
"""
