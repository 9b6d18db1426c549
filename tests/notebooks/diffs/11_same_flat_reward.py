"""Notebook 11: the first reward is what the model can do, and the model is better after training."""

MEASURE = """
import torch


def share_right(policy):
    batch = tokenizer(prompts * 3, return_tensors="pt", padding=True).to(model.device)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1]:], skip_special_tokens=True)
    return sum(text.strip() == right for text, right in zip(texts, answers * 3)) / len(texts)


start = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32").to(model.device)
metrics = {"first": log[0]["reward"], "before": share_right(start), "after": share_right(model)}
healed = abs(metrics["first"] - metrics["before"]) < 0.15 and metrics["after"] > metrics["before"] + 0.03
"""
