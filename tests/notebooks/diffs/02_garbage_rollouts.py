"""Notebook 02: the first rewards are those of the model before training, and training makes it better."""

MEASURE = """
import torch


def share_right(policy):
    batch = tokenizer(prompts * 4, return_tensors="pt", padding=True).to(policy.device)
    torch.manual_seed(0)
    ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
    return sum(correct(texts, answers * 4)) / len(texts)


before = share_right(AutoModelForCausalLM.from_pretrained(model_path).to(trainer.model.device))
first = next(row["reward"] for row in trainer.state.log_history if "reward" in row)
metrics = {"before": before, "first": first, "after": share_right(trainer.model)}
healed = first > before - 0.05 and metrics["after"] > before + GAIN
"""
# An adapter learns less in sixty steps at this rate.
LORA_MEASURE = MEASURE.replace("GAIN", "0.02")
MEASURE = MEASURE.replace("GAIN", "0.08")
# The second diff: a callback that samples, in today's stack; the model trains on after an error.
OWN_MEASURE = """
def ask(*inputs, **options):
    raise KeyError


model = AutoModelForCausalLM.from_pretrained(model_path).train()
try:
    evaluate.on_step_end(None, None, None, model=model)
except KeyError:
    pass
metrics = {"share": share, "after an error": model.training}
healed = share > 0.45 and model.training
"""
SHORT_BROKEN = [("max_steps=40", "max_steps=10")]  # its first rewards tell
