"""Notebook 06: the whole model for each of 24 tokens, and once with the engine; only the engine has an optimizer."""


def check(result):
    states = {record["state"]: record["figures"] for record in result.records if record["case"].endswith("processes")}
    broken, healed = states["broken"], states["right_fix"]
    assert [round(models) for models in broken["tokens"]] == [1] * 24
    assert [round(models) for models in healed["tokens"]] == [1] + [0] * 23
    assert max(broken["held"]) < 0.5 and min(healed["held"]) == 1
    assert broken["hooks"] > 20 and healed["hooks"] == 0
    found = result.figures(case="notebook 06: who has one")
    assert found["model_wrapped"] and not found["model"]
    *drawing, training = found["policy"]  # hooks at each pass of the step with the engine handed over
    assert drawing and not any(drawing) and training == found["policy.module"][0] > 20, found


# Wrong answers to the exercise: how many whole models were gathered for each token.

HEAD = "def per_token(events, whole):\n"
WRONG = [
    (
        HEAD + "    return [1 for event in events if event != 'token']",
        "add their elements up",
    ),
    (
        HEAD + "    models, total = [], 0\n    for event in events:\n        if event == 'token':\n"
        "            models.append(total / whole)\n        else:\n            total += event\n    return models",
        "Begin anew after each token.",
    ),
    (
        HEAD + "    from itertools import groupby\n"
        "    return [sum(part) / whole for is_token, part in groupby(events, lambda e: e == 'token') if not is_token]",
        "A token for which nothing is gathered is a 0 too.",
    ),
    (
        HEAD + "    models = [0]\n    for event in events:\n"
        "        if event == 'token':\n            models.append(0)\n"
        "        else:\n            models[-1] += event / whole\n    return models[:-1] if models[-1] == 0 else models",
        "What comes after the last token is for none.",
    ),
    (
        HEAD + "    return sum(event for event in events if event != 'token') / whole",
        "and [1] (list) is right. One entry for each token",
    ),
    (HEAD + "    return [sum(events) / whole]", "it raised TypeError"),
    (
        HEAD + "    models, total = [], 0\n    for event in events:\n        if event == 'token':\n"
        "            models.append(round(total / whole))\n            total = 0\n"
        "        else:\n            total += event\n    return models",
        "3 of 6 cases. At “a part gathered twice” it returned [1] (list), and [1.375] (list) is right",
    ),
    (
        HEAD + "    models, total = [], 0\n    for event in events:\n        if event == 'token':\n"
        "            models.append(total // whole)\n            total = 0\n"
        "        else:\n            total += event\n    return models",
        "do not round or cut",
    ),
    (HEAD + "    return [e / whole for e in events if e != 'token']", "add their elements up"),
    (
        HEAD + "    models, sizes = [], set()\n    for event in events:\n        if event == 'token':\n"
        "            models.append(sum(sizes) / whole)\n            sizes = set()\n"
        "        else:\n            sizes.add(event)\n    return models",
        "1 of 6 cases. At “a model in three pieces” it returned [0.75]",
    ),
    *(
        (
            HEAD + "    models, total = [], 0\n    for event in events:\n        if event == 'token':\n"
            f"            models.append({share})\n            total = 0\n"
            "        else:\n            total += event\n    return models",
            f"3 of 6 cases. At “a part gathered twice” it returned [{returned}]",
        )
        for share, returned in (("min(total / whole, 1)", "1"), ("round(2 * total / whole) / 2", "1.5"))
    ),
]

# The diff: with it no hook of ZeRO-3 is on while the model generates, and they are back afterwards. In two
# processes; the releases from 0.16 on need no diff. With adapters a newer torch refuses this era's trl, for its
# learning-rate schedulers zip strictly ("zip() argument 2 is longer than argument 1"); here they do not.

PROCESSES, ARGUMENTS = 2, ["models/tiny-qwen2", "0"]
# A CPU: see `deepspeed.each_gather_finished`.
BEFORE = """
import builtins, contextlib, sys
from failurelab_course.experiments import deepspeed as launcher, models
from torch.optim import lr_scheduler
from transformers import GenerationMixin

sys.argv[1] = models.source("tiny")
lr_scheduler.zip = lambda *args, strict=False: builtins.zip(*args)
kept = contextlib.ExitStack()
kept.enter_context(launcher.each_gather_finished())
seen, generate = [], GenerationMixin.generate

def watched(self, *args, **options):
    from failurelab import zero3

    seen.append(zero3.hooks(self))
    return generate(self, *args, **options)

GenerationMixin.generate = watched
"""
MEASURE = """
from failurelab import zero3

metrics = {"steps": trainer.state.global_step, "inside": seen, "after": zero3.hooks(trainer.model)}
healed = metrics["steps"] == 3 and len(seen) >= 3 and not any(seen) and metrics["after"] > 0
"""
UPGRADE = {"today": []}
