"""Notebook 08: four repairs; the run has its gradients, its rollouts, its last rows of logits, and learns."""

RAISES = r"RuntimeError: element 0 of tensors does not require grad"
MEASURE = """
rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
rows = []
head = trainer.model.get_output_embeddings()  # PEFT calls the model below by its forward, past the hooks of the whole
hook = head.register_forward_hook(lambda module, args, logits: rows.append(logits.shape[1]))
ids = tokenizer(["12+13=25"], return_tensors="pt").input_ids
scores = trainer._get_per_token_logps(trainer.model, ids, torch.ones_like(ids), 2)
metrics = {"first": rewards[0], "last": rewards[-1], "rows": rows[-1], "map": str(device_map[""])}
placed = metrics["map"] in ("cpu", "cuda:0")
healed = metrics["last"] > 0.45 and metrics["rows"] == 3 and tuple(scores.shape) == (1, 2) and placed
"""
