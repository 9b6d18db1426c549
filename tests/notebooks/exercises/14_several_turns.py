"""Notebook 14: where ids that were drawn and ids that are scored part. Wrong answers, and what each is told."""

HEAD = "import itertools\n\ndef first_apart(drawn, scored):\n"
LOOP = "    for place, (one, other) in enumerate(zip(drawn, scored)):\n        if one != other:\n"
WRONG = [
    (HEAD + LOOP + "            return place\n    return -1", "the length of the shorter"),
    (HEAD + "    return -1 if set(drawn) == set(scored) else 0", "another id in the middle"),
    (HEAD + "    return drawn != scored", "it returned True"),
    (
        HEAD + LOOP + "            return place or -1\n    return -1 if len(drawn) == len(scored) else len(scored)",
        "the first id",
    ),
    (
        HEAD + LOOP + "            return place\n    return len(scored) if len(scored) < len(drawn) else -1",
        "an id that was added at the end",
    ),
    (HEAD + LOOP + "            return place\n    return len(drawn)", "the same ids"),
    (
        HEAD + "    apart = set(drawn) ^ set(scored)\n"
        "    if not apart:\n        return -1\n"
        "    return min(ids.index(one) for one in apart for ids in (drawn, scored) if one in ids)",
        "a set knows neither places nor repeats",
    ),
    (
        HEAD + "    pairs = itertools.zip_longest(drawn, scored, fillvalue=0)\n"
        "    return next((place for place, (one, other) in enumerate(pairs) if one != other), -1)",
        "0 is an id like others",
    ),
    (HEAD + LOOP + "            return place", "At “the same ids” it returned nothing. Nothing differs: -1"),
]
