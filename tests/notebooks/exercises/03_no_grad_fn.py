"""Wrong answers to notebook 03's exercise: where a training step loses its gradient."""

HEAD = "def where_lost(model, batch, training_loss):\n"
TRAIN = "    model.train()\n"
FROZEN = "    if not any(p.requires_grad for p in model.parameters()):\n        return 'frozen'\n"
MODEL = "    if not model(**batch).loss.requires_grad:\n        return 'model'\n"
AFTER = "    if not training_loss(model, batch).requires_grad:\n        return 'after'\n"
REST = "    return 'nowhere'\n"
WRONG = [
    (HEAD + "    return 'frozen'\n", "0 of 7 cases. At “a healthy model”"),
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
    (HEAD + TRAIN + FROZEN + MODEL + "    model.eval()\n" + AFTER + REST, "training_loss needs train mode too"),
    (HEAD + TRAIN + FROZEN.replace("any(", "all(") + MODEL + AFTER + REST, "one trainable parameter is enough"),
]
