"""Notebook 13: which rows belong to a process. Five plausible wrong answers, and what each is told."""

WRONG = [
    (
        "def own_rows(values, rank, counts):\n    return values[:counts[0]] if rank == 0 else values[-counts[rank]:]",
        "rank 1 of three",
    ),
    ("def own_rows(values, rank, counts):\n    return values[:counts[rank]]", "rank 1 of two, three rows each"),
    ("def own_rows(values, rank, counts):\n    return values[rank::len(counts)]", "rank 0 of two, three rows each"),
    (
        "def own_rows(values, rank, counts):\n    return values[rank * counts[rank]:(rank + 1) * counts[rank]]",
        "with four rows and two",
    ),
    (
        "def own_rows(values, rank, counts):\n    start = counts[rank - 1] if rank else 0\n"
        "    return values[start:start + counts[rank]]",
        "rank 2 of three",
    ),
    ("def own_rows(values, rank, counts):\n    return values[sum(counts[:rank]):]", "and no others"),
    (
        "def own_rows(values, rank, counts):\n    start = sum(counts[:rank])\n"
        "    return list(values[start:start + counts[rank]])",
        "as a tensor",
    ),
]
RIGHT = [
    "def own_rows(values, rank, counts):\n    return values.split(counts)[rank]",
    "import torch\ndef own_rows(values, rank, counts):\n    return torch.split(values, counts)[rank]",
]
