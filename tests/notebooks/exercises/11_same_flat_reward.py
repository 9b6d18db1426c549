"""Wrong answers to the exercise of notebook 11, and part of what its checker says of each."""


def _answer(body):
    return f"def paid(reward, rows):\n    {body}\n    return sum(given) / len(given)"


_BATCH = (
    "def paid(reward, rows):\n    batch = {}\n"
    "    given = reward(prompts=batch['prompt'], completions=batch['answer'], answer=batch['answer'])\n"
)
WRONG = [
    (
        _answer("given = reward(prompts=rows['prompt'], completions=rows['answer'], answer=rows['answer'])"),
        "A trainer shuffles the rows",
    ),
    (
        _answer("rows = rows.shuffle(seed=0); given = reward(completions=rows['answer'], answer=rows['answer'])"),
        "A trainer hands over `prompts` too",
    ),
    (
        _answer(
            "batch = rows.shuffle(seed=0); given = reward(prompts=rows['prompt'], completions=batch['answer'], "
            "answer=rows['answer'])"
        ),
        "Each completion stands beside its own answer",
    ),
    (
        _answer(
            "batch = rows.shuffle(seed=0); given = reward(prompts=batch['prompt'], completions=batch['answer'], "
            "answer=batch['answer'], solution=batch['answer'])"
        ),
        "Hand over the dataset's columns",
    ),
    (
        "def paid(reward, rows):\n    batch = rows.shuffle(seed=0)\n    return reward(prompts=batch['prompt'], "
        "completions=batch['answer'], answer=batch['answer'])",
        "the result is a mean",
    ),
    (_BATCH.format("rows.shuffle(seed=0)") + "    return max(given)", "not the largest"),
    (
        _BATCH.format("rows.shuffle(seed=0)") + "    return sum(g == 1 for g in given) / len(given)",
        "nor how many get 1",
    ),
    (_BATCH.format("rows.shuffle(seed=0)[:1]") + "    return sum(given) / len(given)", "in fewer, chance decides"),
    (_BATCH.format("rows[1:33]") + "    return sum(given) / len(given)", "wherever it begins"),
    (_BATCH.format("rows[28:]") + "    return sum(given) / len(given)", "wherever it begins"),
    (
        "def paid(reward, rows):\n    batch = rows.shuffle(seed=0)\n"
        "    given = reward(batch['prompt'], batch['answer'], batch['answer'])\n    return sum(given) / len(given)",
        "A trainer calls by name.",
    ),
    (
        "def paid(reward, rows):\n    given = [reward(prompts=[row['prompt']], completions=[row['answer']], "
        "answer=[row['answer']])[0] for row in rows.shuffle(seed=0)]\n    return sum(given) / len(given)",
        "Hand over 32 rows or more in ONE call",
    ),
]
