"""Notebook 08: with the diff, or in a newer release, the gradient of the script's first step is the textbook's."""

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
