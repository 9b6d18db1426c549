"""Wrong answers to notebook 08's exercise: the cosine and the size of a gradient beside the textbook's."""

HEAD = "def compare(theirs, ours):\n    import torch\n    cosine_of = torch.cosine_similarity\n"
CAT = "    one, other = (torch.cat([g.flatten() for g in side.values()]) for side in (theirs, ours))\n"
BY_NAME = "    one, other = (torch.cat([side[n].flatten() for n in {}]) for side in (theirs, ours))\n"
RETURN = "    return cosine_of(one, other, 0), one.norm() / other.norm()"
WRONG = [
    (HEAD + CAT + "    return cosine_of(one, other, 0)", "a pair of numbers"),
    (
        HEAD + CAT + "    return abs(cosine_of(one, other, 0)), one.norm() / other.norm()",
        "and -1 and 3 is right. The sign is the cosine's",
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
    (HEAD + CAT + RETURN, "and 1 and 1 is right. Pair tensors by name, not by place."),
    (HEAD + BY_NAME.format("ours") + RETURN, "Leave out of `ours` what `theirs` lacks."),
    (HEAD + BY_NAME.format("sorted(ours)") + RETURN, "it raised KeyError"),
]
