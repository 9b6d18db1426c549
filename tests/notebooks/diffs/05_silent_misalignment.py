"""Notebook 05: the reward climbs instead of falling; with adapters, which learn at another rate, the guard sees why."""

MEASURE = """
log = trainer.state.log_history[:-1]
metrics = {"first": log[0]["reward"], "last": log[-1]["reward"], "kl": log[-1]["kl"]}
healed = metrics["last"] > metrics["first"] + 0.1
"""
LORA_MEASURE = """
from failurelab import guards

guard = guards.LogitsGuard(action="warn")
trainer.add_callback(guard)
trainer.train()
metrics = {"shift": guard.report.shift, "rows": guard.report.scored}
healed = metrics["shift"] == 0 and metrics["rows"] > 10
"""
UPGRADE = {
    "trl-0.22": [
        ("per_device_train_batch_size=16,", "per_device_train_batch_size=128,"),
        ("logging_steps=15,", "logging_steps=15, bf16=False,"),  # a CPU
    ]
}
STAYS = True
SHORT = [("max_steps=60", "max_steps=45")]
SHORT_LORA = [("max_steps=45", "max_steps=2")]  # a step's gradient tells
