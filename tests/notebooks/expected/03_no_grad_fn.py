"""Notebook 03: three things together, and three ways to one message; what is repaired trains every tensor."""

RUNS = {
    "the script": "element 0",
    "all weights": "26 of 26",
    "checkpointing off": "28 of 28",
    "non-reentrant": "28 of 28",
    "checkpointing first": "28 of 28",
    "cured": "28 of 28",
    "loaded": "element 0",
    "hooked": "0 of 28",
}
# The embeddings, two layers, the norm and the head: tensors with a gradient, of how many; has the output a graph?
TRACES = [
    [[0, 0, False], [0, 14, False], [0, 14, False], [0, 0, False], [0, 0, False]],
    [[0, 0, False], [14, 14, True], [14, 14, True], [0, 0, True], [0, 0, True]],
]
TODAY = [
    "is_trainable=False, checkpointing=False loss has a graph: False lost: frozen",
    "is_trainable=False, checkpointing=True loss has a graph: True lost: frozen",
    "is_trainable=True, checkpointing=False loss has a graph: True lost: nowhere",
    "is_trainable=True, checkpointing=True loss has a graph: True lost: nowhere",
]


def check(result):
    found = result.figures(case="notebook 03")
    assert {name: found[name] for name in RUNS} == RUNS
    assert [[part[1:] for part in trace] for trace in found["traces"]] == TRACES, found
    assert [" ".join(line.split()) for line in found["today"]] == TODAY, found


# Wrong answers to the exercise: where a training step loses its gradient.

HEAD = "def where_lost(model, batch, training_loss):\n"
TRAIN = "    model.train()\n"
FROZEN = "    if not any(p.requires_grad for p in model.parameters()):\n        return 'frozen'\n"
MODEL = "    if not model(**batch).loss.requires_grad:\n        return 'model'\n"
AFTER = "    if not training_loss(model, batch).requires_grad:\n        return 'after'\n"
REST = "    return 'nowhere'\n"
WRONG = [
    (HEAD + "    return 'frozen'\n", "0 of 6 cases. At “a healthy model”"),
    (HEAD + TRAIN + MODEL + AFTER + REST, "Ask each parameter's requires_grad"),
    (HEAD + TRAIN + FROZEN + AFTER + REST, "ask its loss before that of training"),
    (HEAD + TRAIN + FROZEN + AFTER + MODEL + REST, "ask its loss before that of training"),
    (HEAD + TRAIN + FROZEN + MODEL + REST, "Call training_loss too"),
    (HEAD + FROZEN + MODEL + AFTER + REST, "train mode only"),
    (
        HEAD + TRAIN + "    if not model(**batch).loss.requires_grad:\n"
        "        return 'model' if any(p.requires_grad for p in model.parameters()) else 'frozen'\n" + AFTER + REST,
        "ask the parameters first",
    ),
    (HEAD + "    return all(p.requires_grad for p in model.parameters())", "it returned False"),
    (HEAD + TRAIN + FROZEN.replace("any(", "all(") + MODEL + AFTER + REST, "one trainable parameter is enough"),
]

# The diff: the script ends in its error; with the diff every adapter trains, and on right rollouts. Its script has an
# adapter of its own.

RAISES = "element 0 of tensors does not require grad"
LORA = None
MEASURE = """
now = dict(trainer.model.named_parameters())
changed = sum(not now[name].equal(old) for name, old in started.items())
rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
metrics = {"changed": changed, "trainable": len(started), "reward": sum(rewards) / len(rewards)}
# garbage completions earn about 0.18 here, right ones 0.40
healed = changed == len(started) and metrics["reward"] > 0.3
"""
UPGRADE = {"trl-0.22": [], "today": []}
