"""Notebook 02: it takes three switches; undoing the cause heals where it is; one place reaches the trainer."""


def check(result):
    grid = {name: result.figures(case=f"notebook 02: {name}") for name in MODES}
    able = grid["eval, cache on"]["off"]
    for name, row in grid.items():
        for kind, share in row.items():
            garbage = name == "train, cache on" and kind != "off"
            assert share < 0.7 * able if garbage else abs(share - able) < 0.01, (name, kind, share)
    found = result.figures(case="notebook 02")
    assert found["first"] < found["by_hand"] - 0.05, found
    with_it, without = found["one_line"]  # of notebook 00's step
    assert with_it < without - 0.05, found
    assert abs(found["undone"] - able) < 0.01
    assert found["callback"] < 0.3 * able and abs(found["callback_today"] - able) < 0.01
    for name in ("nowhere", "model.config", "model.generation_config", "trainer.generation_config"):
        assert (found[name] > found["by_hand"] - 0.05) == name.startswith("trainer"), (name, found)
    old, new, now = (result.figures(case=f"notebook 02: calls in {era}") for era in ("trl-0.14", "trl-0.22", "today"))
    for calls in (old["eval"], new["eval"], now["eval"], now["train"]):  # tokens handed in, tokens in the cache
        assert [call[:2] for call in calls] == [[6, 0], [1, 6], [1, 7]]
    assert old["train"] == [[6, 0, 6], [7, 0, 1], [8, 0, 1]]
    assert [call[:2] for call in new["train"]] == [[6, 0], [1, 0], [1, 0]]


MODES = ("train, cache on", "train, cache off", "eval, cache on", "eval, cache off")

# Wrong answers to the exercise.

_COMPARE = """
    both = min(first.shape[1], second.shape[1])
    return (first[:, :both] != second[:, :both]).any(-1).float().mean().item()"""
_DRAW = """
def rollout_gap(model, batch):
    import torch
    was = model.training
    first = model.train().generate({call}max_new_tokens=4, do_sample=False)
    second = model.eval().generate({call}max_new_tokens=4, do_sample=False)
    model.train(was)"""

WRONG = [
    ("def rollout_gap(model, batch):\n    return ...", "not written yet"),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=1, do_sample=False)
    second = model.eval().generate(**batch, max_new_tokens=1, do_sample=False)
    model.train(was)"""
        + _COMPARE,
        "1 of 7 cases. At “checkpointing on” it returned 0, and more than 0.9 is right. Compare the modes",
    ),
    (
        """
def rollout_gap(model, batch):
    first, second = [model.generate(**batch, max_new_tokens=4, do_sample=False) for _ in range(2)]"""
        + _COMPARE,
        "1 of 7 cases. At “checkpointing on” it returned 0",
    ),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=4)
    second = model.eval().generate(**batch, max_new_tokens=4)
    model.train(was)"""
        + _COMPARE,
        "Chance made the gap",
    ),
    (
        """
def rollout_gap(model, batch):
    import torch
    was, drawn = model.training, []
    for mode in (True, False):
        torch.manual_seed(0)
        drawn.append(model.train(mode).generate(**batch, max_new_tokens=4))
    model.train(was)
    first, second = drawn"""
        + _COMPARE,
        "2 of 7 cases. At “a healthy model whose config says do_sample” it returned 1",
    ),
    (
        """
def rollout_gap(model, batch):
    second = model.eval().generate(**batch, max_new_tokens=4, do_sample=False)
    first = model.train().generate(**batch, max_new_tokens=4, do_sample=False)"""
        + _COMPARE,
        "5 of 7 cases. At “the model afterwards”",
    ),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=4, do_sample=False)
    second = model.eval().generate(**batch, max_new_tokens=4, do_sample=False)
    model.train(was)
    return float(not torch.equal(first, second))""",
        "3 of 7 cases. At “one token of one prompt of 16” it returned 1, and 0.0625 is right",
    ),
    (
        """
def rollout_gap(model, batch):
    was = model.training
    first = model.train().generate(**batch, max_new_tokens=16, do_sample=False)
    second = model.eval().generate(**batch, max_new_tokens=16, do_sample=False)
    model.train(was)
    start = batch["input_ids"].shape[1] + 1
    return (first != second)[:, start:].float().mean().item()""",
        "Return a share of the prompts: not of the tokens",
    ),
    (
        """
def rollout_gap(model, batch):
    first = model.train().generate(**batch, max_new_tokens=4, do_sample=False)
    second = model.eval().generate(**batch, max_new_tokens=4, do_sample=False)"""
        + _COMPARE,
        "6 of 7 cases. At “a model that came in train mode”",
    ),
    (
        _DRAW.format(call="**batch, ").replace("model.train(was)", "model.training = was") + _COMPARE,
        "Put back each module",
    ),
    (
        _DRAW.format(call="**batch, ") + "\n    return (first != second).any(-1).float().mean().item()",
        "4 of 7 cases. At “all end in eval mode, one goes on in train mode” it raised",
    ),
    (_DRAW.format(call="**batch, min_new_tokens=4, ") + _COMPARE, "1, and 0.0625 is right. Completions can"),
    (_DRAW.format(call="input_ids=batch['input_ids'], ") + _COMPARE, "argument: 'attention_mask'"),
    (
        _DRAW.format(call="**batch, ") + "\n    return (first != second).float().mean().item()",
        "and more than 0.9 is right",
    ),
]
_PAD = """
    longest = max(first.shape[1], second.shape[1])
    first, second = [torch.nn.functional.pad(ids, (0, longest - ids.shape[1]), value={pad}) for ids in (first, second)]
    return (first != second).any(1).float().mean()"""
RIGHT = [
    _DRAW.format(call="**batch, ") + _PAD.format(pad="model.generation_config.pad_token_id"),
    _DRAW.format(call="**batch, ") + _PAD.format(pad="model.config.pad_token_id"),
    _DRAW.format(call="**{name: ids.to(model.device) for name, ids in batch.items()}, ") + _COMPARE,
    _DRAW.format(call="**batch, ")
    + """
    def text(ids):
        return " ".join(str(one) for one in ids.tolist() if one not in (0, 2))
    return sum(text(a) != text(b) for a, b in zip(first, second)) / len(first)""",
]

# The diff: the first rewards are those of the model before training, and training makes it better.

MEASURE = """
import torch


def share_right(policy):
    batch = tokenizer(prompts * 4, return_tensors="pt", padding=True).to(policy.device)
    torch.manual_seed(0)
    ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
    return sum(correct(texts, answers * 4)) / len(texts)


before = share_right(AutoModelForCausalLM.from_pretrained(model_path).to(trainer.model.device))
first = next(row["reward"] for row in trainer.state.log_history if "reward" in row)
metrics = {"before": before, "first": first, "after": share_right(trainer.model)}
healed = first > before - 0.05 and metrics["after"] > before + GAIN
"""
# An adapter learns less in sixty steps at this rate.
LORA_MEASURE = MEASURE.replace("GAIN", "0.02")
MEASURE = MEASURE.replace("GAIN", "0.08")
# The second diff: a callback that samples, in trl 0.22; the model trains on after an error.
OWN_MEASURE = """
def ask(*inputs, **options):
    raise KeyError


model = AutoModelForCausalLM.from_pretrained(model_path).train()
try:
    evaluate.on_step_end(None, None, None, model=model)
except KeyError:
    pass
metrics = {"share": share, "after an error": model.training}
healed = share > 0.45 and model.training
"""
SHORT_BROKEN = [("max_steps=40", "max_steps=10")]  # its first rewards tell
