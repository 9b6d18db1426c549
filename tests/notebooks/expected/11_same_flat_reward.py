"""Notebook 11: the tree names nine of ten known runs and the mystery, seven of 20 others, and two of 40 healthy runs.

With the column the reward starts where the model is.
"""


def check(result):
    broken, healed = (result.figures(case=f"notebook 11: {name}") for name in ("answers", "answer"))
    assert broken["first"] < 0.1 and broken["end"] < 0.15
    # How much it forgets is the seed's: 0.35 of 0.41 is left with seed 3. The page's picture has stored runs.
    assert broken["after"] < broken["before"] - 0.02
    assert abs(healed["first"] - healed["before"]) < 0.15
    assert healed["after"] > healed["before"] + 0.03
    looks = result.figures(case="notebook 11: looks")
    assert looks["named"] == [letter != "C" for letter in "ABCDEFGHIJ"] and looks["mystery"] == "F14, blind reward"
    assert looks["above"] == "pays wrong answers" and looks["ahead"] == "F16, old engine"  # both sides count
    assert looks["healed"] == "none of these"
    assert looks["healthy"] == 40 and looks["accused"] == ["two_rewards", "two_rewards"]
    assert looks["unseen"] == [20, 7, 9]  # runs, named, not named
    by_list, by_column = looks["one_word"]  # of notebook 00's step
    assert by_list < 0.1 < 0.2 < by_column
    assert looks["in_order"] == 1 and looks["as_asked"] < 0.2


# Wrong answers to the exercise.


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
        "Hand over the dataset's other columns",
    ),
    (
        _answer(
            "batch = rows.shuffle(seed=0); given = reward(prompts=batch['prompt'], completions=batch['answer'], "
            "prompt=batch['prompt'], answer=batch['answer'])"
        ),
        "a trainer gives `prompt` as `prompts` alone",
    ),
    (
        "def paid(reward, rows):\n    batch = rows.shuffle(seed=0)\n    try:\n"
        "        given = reward(prompts=batch['prompt'], completions=batch['answer'], answer=batch['answer'])\n"
        "    except Exception:\n        return 0.0\n    return min(1.0, max(0.0, sum(given) / len(given)))",
        "ONE call: it may be negative",
    ),
    (_BATCH.format("rows.shuffle(seed=0)") + "    return min(1.0, sum(given) / len(given))", "not held below 1"),
    (
        "def paid(reward, rows):\n    batch = rows.shuffle(seed=0)\n    return reward(prompts=batch['prompt'], "
        "completions=batch['answer'], answer=batch['answer'])",
        "the result is a mean",
    ),
    (
        _BATCH.format("rows.shuffle(seed=0)") + "    return sum(g == 1 for g in given) / len(given)",
        "ONE call: it may be negative",
    ),
    (_BATCH.format("rows.shuffle(seed=0)[:1]") + "    return sum(given) / len(given)", "32 rows or more of ONE call"),
    (_BATCH.format("rows[39:7:-1]") + "    return sum(given) / len(given)", "forwards or backwards"),
    (
        "def paid(reward, rows):\n    batch = rows.shuffle(seed=0)\n"
        "    given = reward(batch['prompt'], batch['answer'], batch['answer'])\n    return sum(given) / len(given)",
        "A trainer calls by name.",
    ),
    (
        "def paid(reward, rows):\n    given = [reward(prompts=[row['prompt']], completions=[row['answer']], "
        "answer=[row['answer']])[0] for row in rows.shuffle(seed=0)]\n    return sum(given) / len(given)",
        "32 rows or more of ONE call",
    ),
]

# The diff: the first reward is what the untrained model does by hand, and training makes it better. Adapters learn
# more slowly at the script's learning rate: with them the model is at least no worse.

MEASURE = """
import torch


def by_hand(policy):
    batch = tokenizer(prompts * 3, return_tensors="pt", padding=True).to(policy.device)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1]:], skip_special_tokens=True)
    return sum(text.strip() == right for text, right in zip(texts, answers * 3)) / len(texts)


start = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32").to(trainer.model.device)
metrics = {"first": trainer.state.log_history[0]["reward"], "before": by_hand(start), "after": by_hand(trainer.model)}
least = -0.02 if hasattr(trainer.model, "peft_config") else 0.03
healed = abs(metrics["first"] - metrics["before"]) < 0.15 and metrics["after"] > metrics["before"] + least
"""
SHORT_BROKEN = [("max_steps=60", "max_steps=10")]
