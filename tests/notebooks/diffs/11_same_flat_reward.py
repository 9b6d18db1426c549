"""Notebook 11: the first reward is what the untrained model does by hand, and training makes it better.

Adapters learn more slowly at the script's learning rate: with them the model is at least no worse.
"""

MEASURE = """
import torch


def by_hand(policy):
    batch = tokenizer(prompts * 3, return_tensors="pt", padding=True).to(policy.device)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1]:], skip_special_tokens=True)
    return sum(text.strip() == right for text, right in zip(texts, answers * 3)) / len(texts)


start = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32").to(trainer.model.device)
metrics = {"first": trainer.state.log_history[0]["reward"], "before": by_hand(start), "after": by_hand(trainer.model)}
least = -0.02 if hasattr(trainer.model, "peft_config") else 0.03
healed = abs(metrics["first"] - metrics["before"]) < 0.15 and metrics["after"] > metrics["before"] + least
"""
SHORT_BROKEN = [("max_steps=60", "max_steps=10")]
