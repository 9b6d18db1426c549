"""Plausible answers that miss something, and a part of what the checker says of each."""

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
