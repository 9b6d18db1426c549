"""Wrong answers to notebook 07's exercise: which tensors of a model are not on this rank's device."""

HEAD = "def misplaced(model, device):\n"
ALL = "    tensors = [*model.named_parameters(), *model.named_buffers()]\n"
WRONG = [
    (HEAD + ALL + "    return [n for n, t in tensors if t.device.type != device.type]", "compare the number"),
    (HEAD + ALL + "    return [n for n, t in tensors] if tensors[0][1].device != device else []", "ask each"),
    (HEAD + "    return [n for n, p in model.named_parameters() if p.device != device]", "buffers, and no parameter"),
    (HEAD + ALL + "    return any(t.device != device for n, t in tensors)", "no such name"),
    (HEAD + ALL + "    return [n for n, t in tensors if t.device != str(device)]", "has no such name"),
    (HEAD + "    return [] if model.device == device else ['']", "it raised AttributeError"),
    (HEAD + "    return [n for n, t in model.state_dict().items() if t.device == device]", "has no such name"),
    (
        HEAD + "    return [n for n, t in model.state_dict().items() if t.device != device]",
        "not saved is in no `state_dict`",
    ),
    (HEAD + ALL + "    return [n for n, t in tensors if t.is_cuda and t.device != device]", "left on the CPU"),
    (
        HEAD
        + ALL
        + "    return [n for n, t in tensors if t.device.type == device.type and t.device.index != device.index]",
        "left on the CPU",
    ),
    (HEAD + ALL + "    return [n for n, t in tensors if t.device.index not in (None, 1)]", "left on the CPU"),
    (
        HEAD + "    tensors = [*model.named_buffers(), *model.named_parameters()]\n"
        "    return [n for n, t in tensors if t.device != device]",
        "parameters first, then buffers",
    ),
]
