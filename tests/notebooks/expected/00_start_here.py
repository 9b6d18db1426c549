"""Notebook 00: the check by the first rewards passes a healthy run and fires in a broken one; defaults have moved."""


def check(result):
    found = result.figures(case="notebook 00")
    # The step on one screen is trl's: in direction and size. Its loss is near 0, and it learns all the same.
    assert found["cosine"] > 0.9999 and abs(found["size"] - 1) < 1e-3 and abs(found["loss"]) < 0.05, found
    assert found["own"][0] > found["by_hand"] - 0.05 and found["own"][-1] > found["by_hand"] + 0.05, found
    assert found["first"] > found["by_hand"] - 0.05 and found["last"] > found["first"] + 0.1, found
    assert found["first_cut"] < found["by_hand"] - 0.2, found
    assert found["grad_norm_long"] == 0 and found["clipped"] > 0.99 and found["same"] == [], found
    assert 0.27 < found["spread"] < 0.37, found  # the page's bound rests on it
    assert abs(found["by_hand_long"] - found["by_hand"]) < 0.1, found
    # The exercise's share of silent groups is TRL's own, of the same completions.
    assert all(abs(own - trl) < 1e-3 for own, trl in zip(found["silent"], found["silent_trl"])), found
    script, cut, cut_two_digits = found["silent"]
    assert script < 0.5 < cut < 1 == cut_two_digits, found


# Wrong answers to the exercise: the share of groups whose rewards are all equal.

HEAD = "def silent_share(rewards, size):\n"
CUT = "    groups = [rewards[i:i + size] for i in range(0, len(rewards), size)]\n"
WRONG = [
    (HEAD + CUT + "    return sum(len(set(g)) == 1 for g in groups)", "Count the groups, and divide by their number."),
    (
        HEAD + "    return float(max(rewards) == min(rewards))",
        "At “a group of two that differs, and one that does not”",
    ),
    (
        HEAD + "    groups = [rewards[i::size] for i in range(size)]\n"
        "    return sum(len(set(g)) == 1 for g in groups) / len(groups)",
        "At “three groups of four” it returned 0.5, and 0.6667 is right",
    ),
    (HEAD + CUT + "    return sum(max(g) == 0 for g in groups) / len(groups)", "teach as little as eight wrong"),
    (HEAD + CUT + "    return sum(sum(g) in (0, size) for g in groups) / len(groups)", "with each other"),
    (HEAD + CUT + "    return sum(len(set(g)) == 1 for g in groups) / len(groups)", "allow for rounding"),
    (HEAD + CUT + "    return sum(max(g) - min(g) < 0.1 for g in groups) / len(groups)", "with each other"),
    *(
        (HEAD + CUT + f"    return sum({silent} for g in groups) / len(groups)", "A small difference teaches")
        for silent in (
            "max(g) - min(g) < 5e-3",
            "max(g) - min(g) < 1e-3",
            "len({round(reward, 2) for reward in g}) == 1",
            "sum((reward - sum(g) / size) ** 2 for reward in g) / size < 1e-5",
        )
    ),
    (
        HEAD + CUT + "    return sum(abs(g[0] - g[-1]) < 1e-6 for g in groups) / len(groups)",
        "not the first with the last",
    ),
    (HEAD + "    return rewards.reshape(-1, size)", "it raised AttributeError"),
    (HEAD + CUT + "    return [len(set(g)) == 1 for g in groups]", "and 0.5 is right"),
    (
        HEAD + "    count = len(rewards) // size\n    groups = [rewards[i::count] for i in range(count)]\n"
        "    return sum(len(set(g)) == 1 for g in groups) / len(groups)",
        "At “three groups of four”",
    ),
]
