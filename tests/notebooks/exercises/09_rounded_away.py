"""Wrong answers to the exercise of notebook 09, and part of what its checker says of each."""

WRONG = [
    ("def can_move(weights, step):\n    return weights + step != weights", "Below a power of two"),
    ("def can_move(weights, step):\n    return step > weights.abs() / 512", "The format is the tensor's own"),
    (
        "def can_move(weights, step):\n"
        "    import torch\n"
        "    return (weights.to(torch.bfloat16) + step != weights) | (weights.to(torch.bfloat16) - step != weights)",
        "The format is the tensor's own",
    ),
    (
        "def can_move(weights, step):\n"
        "    import torch\n"
        "    eps = torch.finfo(weights.dtype).eps\n"
        "    spacing = eps * 2.0 ** weights.double().abs().log2().floor()\n"
        "    below = eps * 2.0 ** ((weights.double().abs().log2() - 1e-9).floor())\n"
        "    return step >= below / 2",
        "A sum in the very middle",
    ),
    ("def can_move(weights, step):\n    return ((weights + step) != weights).float().mean()", "it returned"),
    (
        "def can_move(weights, step):\n    return (weights.double() + step != weights.double())",
        "The step is less than half of the spacing",
    ),
    ("def can_move(weights, step):\n    return (weights - step) != weights", "Of a negative weight"),
    (
        "def can_move(weights, step):\n    double = weights.double()\n"
        "    return [bool((w + s).to(weights.dtype) != w) for w, s in zip(double, [step] * len(double))]",
        "and tensor([False]), with `weights` as they came, is right",
    ),
    (
        "def can_move(weights, step):\n    return ((w.double() + step).to(weights.dtype) != w for w in weights)",
        "(generator), and tensor([False])",
    ),
    (
        "def can_move(weights, step):\n"
        "    old = weights.clone()\n"
        "    weights.copy_(old.double() + step)\n"
        "    up = weights != old\n"
        "    weights.copy_(old.double() - step)\n"
        "    return up | (weights != old)",
        "1 of 7 cases. At “0.05 and 0.001, and 3e-5” it returned",
    ),
    ("def can_move(weights, step):\n    return weights * (1 + step) != weights", "the step is added: it is no factor"),
]
RIGHT = [
    "def can_move(weights, step):\n"
    "    return ((weights.double() + step).to(weights.dtype) != weights) | "
    "((weights.double() - step).to(weights.dtype) != weights)"
]
