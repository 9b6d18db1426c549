"""Notebook 14: the tool's words leave the loss by a mask; only ids that are joined as drawn keep the ends."""


def check(result):
    found, masked, by_ids = (
        result.figures(case=f"notebook 14: {name}") for name in ("as found", "masked by text", "by ids")
    )
    figures = result.figures(case="notebook 14: figures")
    assert 60 < figures["share"] < 95
    assert found["cosine"] < 0.9 and min(masked["cosine"], by_ids["cosine"]) > 0.999
    assert found["apart"] == masked["apart"] == 1 and by_ids["apart"] == 0  # the share of the draws
    assert figures["turned"] < 0.9  # the cosine of one changed line of notebook 00's step
    assert figures["grad_norm"] == 0 < figures["kept_norm"]  # every completion counts as cut


# Wrong answers to the exercise: where ids that were drawn and ids that are scored part.

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
    (
        HEAD + "    pairs = itertools.zip_longest(drawn, scored, fillvalue=0)\n"
        "    return next((place for place, (one, other) in enumerate(pairs) if one != other), -1)",
        "0 is an id like others",
    ),
    (
        HEAD + "    pairs = itertools.zip_longest(drawn, scored, fillvalue=2)\n"
        "    return next((place for place, (one, other) in enumerate(pairs) if one != other), -1)",
        "an end that was lost at the end",
    ),
    (HEAD + LOOP + "            return place", "At “the same ids” it returned nothing. Nothing differs: -1"),
]

# The diff: with it the loss is given the ids that were drawn, and a mask of who wrote each.

MEASURE = """
trainer.args.max_steps = 1
rows = [row for row in trainer.state.log_history if "reward" in row]
clipped = rows[-1]["completions/clipped_ratio"]
from failurelab import textbook

with textbook.compare(trainer, with_suspects=False) as comparison:
    trainer.train()
report = comparison.report
metrics = {"verdict": report.verdict, "clipped": clipped}
healed = report.verdict == "HELD" and clipped < 0.5


def all_right(asked, *_):
    assert asked, "a turn that nobody takes"
    return [tokenizer(sums[tokenizer.decode(ids)])["input_ids"] for ids in asked], None


trainer._generate_single_turn = all_right  # a good model needs no second turn
answer = rollout(list(sums)[:8], trainer)
said = tokenizer.batch_decode(answer["completion_ids"], skip_special_tokens=True)
assert said == list(sums.values())[:8], said
"""
SHORT = [("max_steps=40, logging_steps=10", "max_steps=1, logging_steps=1")]
