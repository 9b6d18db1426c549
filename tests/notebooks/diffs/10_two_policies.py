"""Notebook 10: the engine has the weights that are trained, so that the reward climbs, and the model is better."""

BEFORE = """
import atexit
from failurelab_course.experiments import engine_process

engine = engine_process.running(model_path)
engine_url = engine.__enter__()
atexit.register(engine.__exit__, None, None, None)
"""
MEASURE = """
drawn = rollout(prompts[:32], trainer)
gaps = []
for prompt, ids, logps in zip(drawn["prompt_ids"], drawn["completion_ids"], drawn["logprobs"]):
    with torch.no_grad():
        rows = model.eval()(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    gaps += [abs(rows[place, token].item() - logp) for place, (token, logp) in enumerate(zip(ids, logps))]
metrics = {"first": rewards[0], "last": rewards[-1], "gap": sum(gaps) / len(gaps)}
healed = metrics["last"] > metrics["first"] + 0.08 and metrics["gap"] < 0.05
"""
