"""Notebook 10: only old weights take the gap away; without the reload the reward climbs; the weights carry the run."""


def check(result):
    broken, healed = (result.figures(case=f"notebook 10: {name}") for name in ("as trl 1.9", "as trl 1.10"))
    assert broken["last"] < broken["first"] + 0.08 < healed["last"] and broken["gap"] > 0.1
    assert broken["after"] > broken["before"] + 0.05  # trl's importance weights
    assert healed["last"] > healed["first"] + 0.08 and healed["gap"] < 0.02
    assert healed["after"] > healed["before"] + 0.1
    found = result.figures(case="notebook 10: suspects")
    assert 0 < found["gap_first"] < 0.02
    assert found["old weights"] < found["nothing"] / 10
    for suspect in ("the format", "the temperature", "the neighbouring token"):
        assert found[suspect] > found["nothing"] / 3, suspect
    by_start, by_policy = found["one_word"]  # of notebook 00's step
    assert by_start < by_policy - 0.05
    assert found["apart"][0] > 0.1 > 0.02 > found["apart"][1]
    follows, stays = found["follows"]  # a weight changed on purpose, at trl's own rate
    assert follows < 0.02 and stays > 4 * follows, found["follows"]
    assert found["draws_then"] == ["first"] and found["draws_now"] == ["trained"]


# Wrong answers to the exercise.


def _answer(line):
    return f"def log_probs(logits, start, ids):\n    import torch\n    return {line}"


_RIGHT = "logits[start - 1:-1].float().log_softmax(-1).gather(1, ids[:, None])[:, 0]"
WRONG = [
    (_answer("logits[start:].log_softmax(-1).gather(1, ids[:, None])[:, 0]"), "The logits at a place are those"),
    (_answer("logits[start - 1:-1].gather(1, ids[:, None])[:, 0]"), "The logits at a place are those"),
    (_answer("logits[start - 1:-1].log_softmax(-1).gather(1, ids[:, None])[:, 0].mean(0, keepdim=True)"), "1 of 3"),
    (_answer("logits[start - 1:-1].log_softmax(0).gather(1, ids[:, None])[:, 0]"), "0 of 3"),
    (_answer("logits[start - 1:-1].log_softmax(-1).gather(1, ids[:, None])[:, 0]"), "log_softmax in bfloat16"),
    *[
        (_answer(f"{before}{_RIGHT}{after}"), "nats; shape (len(ids),)")
        for before, after in (("", "[None]"), ("", ".sum()"), ("-", ""))
    ],
    (_answer(f"{_RIGHT} / torch.log(torch.tensor(2.0))"), "(Tensor) is right"),
]

# The diff: the engine has the weights that are trained, so that the reward climbs. vLLM is a stand-in, and trl has
# the lines of 0.28 to 1.9 again, which read the checkpoint after a sleep.

BEFORE = """
from failurelab_course.experiments import vllm_stand_in

vllm_stand_in.install(reloads=True)
"""
MEASURE = """
rows = [row for row in trainer.state.log_history if "reward" in row]
metrics = {"first": rows[0]["reward"], "last": rows[-1]["reward"],
           "gap": rows[-1]["sampling/sampling_logp_difference/mean"]}
healed = metrics["last"] > metrics["first"] + 0.08 and metrics["gap"] < 0.02
"""
SHORT_LORA = [("learning_rate=4e-4", "learning_rate=3e-3")]
SHORT_BROKEN = [("max_steps=40", "max_steps=20")]
