"""Notebook 08: the step of trl 0.14 is not the textbook's where prompts are padded; one pair sees it, and others."""


def check(result):
    found, alone, newer = (
        result.figures(case=f"notebook 08: {name}", state=state)
        for name, state in (
            ("trl 0.14.0", "broken"),
            ("one prompt a batch", "right_fix"),
            ("trl 0.15.2", "right_fix"),
        )
    )
    assert found["cosine"] < 0.97
    for pair in (alone, newer):
        assert pair["cosine"] > 0.9999 and abs(pair["size"] - 1) < 0.001
    healthy, frozen, garbage, temperature = (
        result.figures(case=f"notebook 08: {name}")
        for name in ("healthy", "01, the frozen embeddings", "02, the garbage rollouts", "the temperature")
    )
    assert healthy["cosine"] > 0.9999 and frozen["cosine"] < 0.2
    assert garbage["cosine"] > 0.999 and temperature["cosine"] > 0.99 and 0.4 < temperature["size"] < 0.6
    adam, sgd = (result.figures(case=f"notebook 08: {name}") for name in ("AdamW, ten steps", "SGD, one step"))
    assert adam["cosine"] > 0.999 and 0.98 < adam["size"] < 1.02
    assert sgd["cosine"] > 0.9999 and abs(sgd["size"] - 0.49) < 0.001
    guards = result.figures(case="notebook 08: guards")
    assert len(guards["trl-0.14"]) == 1 and "no attention mask" in guards["trl-0.14"][0], guards
    assert guards["trl-0.15"] == []
    assert guards["unmasked"] < 0.97  # by one line of notebook 00's step


# Wrong answers to the exercise: the cosine and the size of a gradient beside the textbook's.

HEAD = "def compare(theirs, ours):\n    import torch\n    cosine_of = torch.cosine_similarity\n"
CAT = "    one, other = (torch.cat([g.flatten() for g in side.values()]) for side in (theirs, ours))\n"
BY_NAME = "    one, other = (torch.cat([side[n].flatten() for n in {}]) for side in (theirs, ours))\n"
RETURN = "    return cosine_of(one, other, 0), one.norm() / other.norm()"
WRONG = [
    (HEAD + CAT + "    return cosine_of(one, other, 0)", "a pair of numbers"),
    (
        HEAD + CAT + "    return abs(cosine_of(one, other, 0)), one.norm() / other.norm()",
        "and (-1, 3) (tuple) is right. The sign is the cosine's",
    ),
    (HEAD + CAT + "    return cosine_of(one, other, 0), other.norm() / one.norm()", "the factor is the size's"),
    (
        HEAD + "    pairs = [(theirs[n].flatten(), ours[n].flatten()) for n in theirs]\n"
        "    cosines = [cosine_of(a, b, 0) for a, b in pairs]\n"
        "    sizes = [a.norm() / b.norm() for a, b in pairs]\n"
        "    return sum(cosines) / len(pairs), sum(sizes) / len(pairs)",
        "not a mean over tensors",
    ),
    (
        HEAD + BY_NAME.format("theirs") + "    sizes = [theirs[n].norm() / ours[n].norm() for n in theirs]\n"
        "    return cosine_of(one, other, 0), sum(sizes) / len(sizes)",
        "not a mean over tensors",
    ),
    (HEAD + CAT + "    return cosine_of(one, other, 0), float('nan')", "Cosine 1, size 1"),
    (HEAD + CAT + RETURN, "and (1, 1) (tuple) is right. Pair tensors by name, not by place."),
    (HEAD + BY_NAME.format("ours") + RETURN, "Leave out of `ours` what `theirs` lacks."),
]

# The diff: with the diff, or in a newer release, the gradient of the script's first step is the textbook's.

MEASURE = """
from failurelab import textbook

watches = []


def watch(trainer):
    watches.append(textbook.compare(trainer, with_suspects=False).__enter__())


train(watch, max_steps=1)
report = watches[0].report
metrics = {"verdict": report.verdict, "cosine": report.apart.cosine, "size": report.apart.size}
healed = report.verdict == "HELD"
"""
UPGRADE = {
    "today": [
        ("per_device_train_batch_size=16", "per_device_train_batch_size=64"),
        ("report_to=[], seed=seed", "report_to=[], bf16=False, seed=seed"),
    ]
}
SHORT = [("max_steps=30", "max_steps=1")]
