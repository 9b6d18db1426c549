"""Notebook 01: with frozen embeddings one tensor of 25 is trained, with LoRA it is an error; with the diff all are."""

MEASURE = """
now = dict(trainer.model.named_parameters())
changed = sum(not now[name].equal(old) for name, old in started.items())
# A of an adapter has no gradient at its first step, for B is zero: after five steps all have moved
metrics = {"changed": changed, "trainable": len(started)}
healed = changed == len(started)
"""
LORA_RAISES = "element 0 of tensors does not require grad"
