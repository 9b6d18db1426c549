"""Wrong answers to notebook 01's exercise: the trainable tensors that a backward pass leaves without a gradient."""

HEAD = "def no_gradient(model, batches):\n"
CLEAN = "    model.train()\n    model.zero_grad()\n"
PASSES = (
    "    for batch in batches:\n        loss = model(**batch).loss\n        if loss.requires_grad:\n"
    "            loss.backward()\n"
)
UNASKED = "    for batch in batches:\n        model(**batch).loss.backward()\n"
NAMES = "    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]"
WRONG = [
    (HEAD + CLEAN + NAMES, "after a backward pass of every batch"),
    (HEAD + CLEAN + PASSES + NAMES.replace("p.requires_grad and ", ""), "Take trainable tensors alone"),
    (HEAD + CLEAN + "    model(**batches[0]).loss.backward()\n" + NAMES, "every batch"),
    (
        HEAD + CLEAN + UNASKED.replace("        model(", "        model.zero_grad()\n        model(") + NAMES,
        "clear gradients before the first batch only",
    ),
    (HEAD + CLEAN + PASSES + "    return []", "['layer.bias', 'layer.weight'] (list) is right"),
    (HEAD + CLEAN + PASSES + NAMES.replace("[name for", "[p for"), "the NAMES of"),
    (HEAD + "    model.train()\n" + PASSES + NAMES, "Set every .grad to None before the first batch"),
    (HEAD + "    model.zero_grad()\n" + PASSES + NAMES, "train mode only"),
    (
        HEAD + CLEAN + PASSES + NAMES.replace("p.grad is None", "(p.grad is None or not p.grad.any())"),
        "Zeros are a grad",
    ),
    (HEAD + CLEAN + PASSES + NAMES.replace("named_parameters()", "named_parameters(remove_duplicate=False)"), "once"),
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
    (HEAD + CLEAN + "    model(batches[0]).loss.backward()\n" + NAMES, "it raised"),
    (HEAD + CLEAN + PASSES + "    return sum(p.grad is None for p in model.parameters())", "it returned 1"),
]
