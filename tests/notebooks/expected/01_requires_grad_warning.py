"""Notebook 01: the same warning with every gradient there and with nearly none; its pass tells them apart."""

REPAIRS = {  # what has a gradient, which passes warn
    "the method": ("25 of 25", {"generation"}),
    "the method, LoRA": ("28 of 28", {"generation", "pass without gradients"}),
    "use_reentrant=False": ("25 of 25", set()),
    "a filter": ("1 of 25", set()),
}
# The embeddings, two layers, the norm and the head (which is the embeddings' tensor): tensors with a gradient, of how
# many, and whether the output has a graph.
TRACES = [
    [[1, 1, True], [12, 12, True], [12, 12, True], [1, 1, True], [1, 1, True]],
    [[0, 0, False], [0, 12, False], [0, 12, False], [1, 1, True], [0, 0, True]],
]


def check(result):
    assert result.figures(case="notebook 01") == {"lost": 24, "trainable": 25}
    why = result.figures(case="notebook 01: why")
    assert [[part[1:] for part in trace] for trace in why["traces"]] == TRACES, why
    assert why["reached"] == [25, 1]  # by notebook 00's step, and with a line more
    # The story ends on the reward: with gradients alone it starts below what the model earns by hand, 0.40.
    assert why["first"] < 0.3, why
    for name, (gradients, passes) in REPAIRS.items():
        found = result.figures(case=f"notebook 01: {name}")
        assert found.pop("gradients") == gradients and found.keys() == passes, (name, found)


# Wrong answers to the exercise: the trainable tensors that a backward pass leaves without a gradient.

HEAD = "def no_gradient(model, batches):\n"
CLEAN = "    model.train()\n    model.zero_grad()\n"
PASSES = (
    "    for batch in batches:\n        loss = model(**batch).loss\n        if loss.requires_grad:\n"
    "            loss.backward()\n"
)
UNASKED = "    for batch in batches:\n        model(**batch).loss.backward()\n"
NAMES = "    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]"
WRONG = [
    (  # right where one batch at least has a graph
        HEAD + CLEAN + "    sum(model(**batch).loss for batch in batches).backward()\n" + NAMES,
        "At “no loss with a graph” it raised RuntimeError",
    ),
    (HEAD + CLEAN + NAMES, "after a backward pass of every batch"),
    (HEAD + CLEAN + PASSES + NAMES.replace("p.requires_grad and ", ""), "Take trainable tensors alone"),
    (HEAD + CLEAN + "    model(**batches[0]).loss.backward()\n" + NAMES, "every batch"),
    (
        HEAD + CLEAN + UNASKED.replace("        model(", "        model.zero_grad()\n        model(") + NAMES,
        "clear gradients before the first only",
    ),
    (HEAD + CLEAN + PASSES + "    return []", "['layer.bias', 'layer.weight'] (list) is right"),
    (HEAD + CLEAN + PASSES + NAMES.replace("[name for", "[p for"), "the NAMES of"),
    (HEAD + "    model.train()\n" + PASSES + NAMES, "Set every .grad to None before the first batch"),
    (HEAD + "    model.zero_grad()\n" + PASSES + NAMES, "train mode only"),
    (
        HEAD + CLEAN + PASSES + NAMES.replace("p.grad is None", "(p.grad is None or not p.grad.any())"),
        "Zeros are a grad",
    ),
    (HEAD + CLEAN + UNASKED + NAMES, "ask loss.requires_grad, and go on"),
    (
        HEAD + CLEAN + "    names = [name for name, p in model.named_parameters() if p.requires_grad]\n"
        "    for batch in batches:\n        loss = model(**batch).loss\n        if not loss.requires_grad:\n"
        "            return names\n        loss.backward()\n" + NAMES,
        "ask loss.requires_grad, and go on",
    ),
    (
        HEAD
        + CLEAN
        + PASSES.replace("            loss.backward()", "            loss.backward()\n        else:\n            break")
        + NAMES,
        "ask loss.requires_grad, and go on",
    ),
    (HEAD + CLEAN + PASSES + "    return sum(p.grad is None for p in model.parameters())", "it returned 1"),
]

# The diff: with frozen embeddings one tensor of 25 is trained, with LoRA it is an error, and completions are garbage;
# with the diff all are trained, on right completions.

MEASURE = """
now = dict(trainer.model.named_parameters())
changed = sum(not now[name].equal(old) for name, old in started.items())
trainer.args.max_steps, trainer.args.learning_rate = 20, 0.0  # garbage earns about 0.2 here, right completions 0.40
trainer.train()
rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row][-20:]
metrics = {"changed": changed, "trainable": len(started), "reward": sum(rewards) / len(rewards)}
# A of an adapter has no gradient at its first step, for B is zero: after five steps all have moved
healed = changed == len(started) and metrics["reward"] > 0.3
"""
LORA_RAISES = "element 0 of tensors does not require grad"
