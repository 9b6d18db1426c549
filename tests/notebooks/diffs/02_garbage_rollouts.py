"""Notebook 02: the first rewards are those of the model before training, and training makes it better."""

MEASURE = """
import torch


def share_right(policy):
    batch = tokenizer(prompts * 4, return_tensors="pt", padding=True).to(model.device)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1]:], skip_special_tokens=True)
    return sum(correct(texts, answers * 4)) / len(texts)


before = share_right(AutoModelForCausalLM.from_pretrained(model_path).to(model.device))
metrics = {"before": before, "first_reward": rewards[0], "after": share_right(model)}
healed = rewards[0] > before - 0.06 and metrics["after"] > before + 0.08
"""
