"""Notebook 14: with the diff the loss is given the ids that were drawn, and a mask of who wrote each."""

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
