"""Notebook 09: nearly all weights change, and the model is better than before training.

The checkpoint of the notebook is in bfloat16, as those of a hub are. With LoRA nothing is broken before: PEFT makes the
adapters in float32, which the notebook shows.
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

prompts, answers = map(list, zip(*sums))


def by_hand(policy):
    batch = tokenizer(prompts * 3, return_tensors="pt", padding=True).to(policy.device)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1]:], skip_special_tokens=True)
    return sum(correct(texts, answers * 3)) / len(texts)


start, trained = (AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32) for _ in range(2))
trained.load_state_dict(trainer.model.state_dict())
then = dict(start.named_parameters())
changed = sum(int((weight != then[name]).sum()) for name, weight in trained.named_parameters())
metrics = {"share": changed / start.num_parameters(), "before": by_hand(start), "after": by_hand(trained)}
healed = metrics["share"] > 0.9 and metrics["after"] > metrics["before"] + 0.03
"""
LORA = None
SHORT_BROKEN = [("max_steps=80", "max_steps=10")]
