"""Notebook 09: nearly all weights change, and the model is better than before training.

The checkpoint of the notebook is in bfloat16, as those of a hub are.
"""

BEFORE = """
import tempfile, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

hub = tempfile.TemporaryDirectory()
for kind, options in ((AutoModelForCausalLM, {"dtype": torch.bfloat16}), (AutoTokenizer, {})):
    kind.from_pretrained(model_path, **options).save_pretrained(hub.name)
model_path = hub.name
"""

MEASURE = """
import torch


def share_right(policy):
    batch = tokenizer(prompts * 3, return_tensors="pt", padding=True).to(model.device)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1]:], skip_special_tokens=True)
    return sum(correct(texts, answers * 3)) / len(texts)


start = AutoModelForCausalLM.from_pretrained(model_path).float().to(model.device)
then = dict(start.named_parameters())
changed = sum(int((weight.float() != then[name]).sum()) for name, weight in model.named_parameters())
share = changed / sum(weight.numel() for weight in then.values())
trained = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(model.device)
trained.load_state_dict(model.state_dict())
metrics = {"share": share, "before": share_right(start), "after": share_right(trained)}
healed = share > 0.9 and metrics["after"] > metrics["before"] + 0.03
"""
