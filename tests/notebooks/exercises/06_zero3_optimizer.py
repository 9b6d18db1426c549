"""Wrong answers to notebook 06's exercise: how many whole models were gathered for each token."""

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
        "3 of 6 cases. At “half a model” it returned [0] (list), and [0.5] (list) is right",
    ),
    (
        HEAD + "    models, total = [], 0\n    for event in events:\n        if event == 'token':\n"
        "            models.append(total // whole)\n            total = 0\n"
        "        else:\n            total += event\n    return models",
        "Half a model is 0.5",
    ),
    (HEAD + "    return [e / whole for e in events if e != 'token']", "add their elements up"),
]
