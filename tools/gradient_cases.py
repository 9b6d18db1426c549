"""Make the files of cases: `python -m tools.gradient_cases [--check]`.

Inputs are drawn by a seed and rounded; what is expected is made by `definition` and checked by `plain_loss`, by
finite differences. With `--check` nothing is written: it says whether the files are what they would be.
"""

import json
import math
import pathlib
import sys
from typing import Any

import torch
from tools import plain_loss
from torch import Tensor

from failurelab.known_gradients import cases, definition
from failurelab.known_gradients.definition import LossOptions

WHOLE = [[list(range(8))]]
TWO, FOUR = [[[0, 1, 2, 3], [4, 5, 6, 7]]], [[[0, 1], [2, 3], [4, 5], [6, 7]]]
UNEVEN = [[[0, 1, 2], [3, 4, 5, 6, 7]]]
RANKS, RANKS_OF_TWO = [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
MIXED = [[[0, 1, 4, 5]], [[2, 3, 6, 7]]]  # groups lie on both ranks
CUTS = {"2-micro": TWO, "4-micro": FOUR, "3-and-5-rows": UNEVEN, "2-ranks": RANKS, "2-ranks-of-2-micro": RANKS_OF_TWO}
CUTS |= {"2-ranks-groups-on-both": MIXED}
LENGTHS = [7, 1, 4, 2, 6, 3, 5, 7]
REWARDS = [1.0, 0.0, 0.0, 0.5, 2.0, 0.0, 1.0, 1.0]
TOLERANCE = 1e-7  # of central differences in float64


def draw(lengths: list[int], seed: int = 5) -> dict[str, Any]:
    """Return inputs with completions of these lengths; places behind them hold numbers too, as in real tensors."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn((len(lengths), max(lengths)), generator=generator, dtype=torch.float64)

    logps = -(3 * torch.rand((len(lengths), max(lengths)), generator=generator, dtype=torch.float64) + 0.05)
    old = (logps + noise(0.35)).clamp(max=-0.01)
    reference, engine = (logps + noise(0.3)).clamp(max=-0.01), (old + noise(0.2)).clamp(max=-0.01)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).double()
    drawn = {"logps": logps, "old": old, "reference": reference, "engine": engine}
    batch = {name: values.mul(1e4).round().div(1e4).tolist() for name, values in drawn.items()}
    batch |= {
        "mask": mask.tolist(),
        "rewards": REWARDS[: len(lengths)],
        "group": [0, 0, 0, 0, 1, 1, 1, 1][: len(lengths)],
    }
    return give_advantages(batch)


def give_advantages(batch: dict[str, Any]) -> dict[str, Any]:
    """Add the advantages of the rewards, rounded."""
    tensors = {name: cases.tensor(values) for name, values in batch.items()} | {"advantages": torch.ones(())}
    worth = definition.advantages(definition.Batch(**tensors, cut=WHOLE), LossOptions())
    return batch | {"advantages": [round(each, 4) for each in worth.tolist()]}


def make_batches() -> dict[str, dict[str, Any]]:
    """Return the inputs of all files, by name."""
    ragged = draw(LENGTHS)
    far = draw(LENGTHS, 6)  # ratios above 3 where the advantage is negative; a reference e^4 as likely
    for row, places in enumerate(far["old"]):
        if far["advantages"][row] < 0:
            far["old"][row] = [round(value - 1.6, 4) for value in places]
    for row in (0, 4):
        far["reference"][row] = [-0.02, *far["reference"][row][1:]]
        far["logps"][row] = [-4.02, *far["logps"][row][1:]]
        far["old"][row] = [-4.1, *far["old"][row][1:]]
    holes, empty = draw(LENGTHS, 7), draw(LENGTHS, 8)
    for row, place in ((0, 2), (0, 3), (4, 1), (6, 0), (7, 5)):
        holes["mask"][row][place] = 0.0
    empty["mask"][3] = [0.0] * 7
    logits = draw([4, 2, 3, 4], 9) | {"rewards": [1.0, 0.0, 0.0, 0.5]}
    logits = give_advantages(logits | {"group": [0, 0, 0, 0]})
    generator = torch.Generator().manual_seed(10)
    logits["logits"] = torch.randn((4, 4, 5), generator=generator).mul(1e4).round().div(1e4).double().tolist()
    logits["logits"] = [[[round(word, 4) for word in place] for place in row] for row in logits["logits"]]
    logits["ids"] = torch.randint(0, 5, (4, 4), generator=generator).tolist()
    uniform = [[-math.log(5)] * 4 for _ in range(4)]
    for name in ("logps", "old", "reference", "engine"):  # `logps` is not used; the ratio stays near 1
        logits[name] = [[round(value, 4) for value in row] for row in uniform]
    return {"ragged": ragged, "even": draw([5] * 8, 11), "far": far, "holes": holes, "empty": empty, "logits": logits}


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """Return the cases of each file, without what they expect."""
    files: dict[str, list[dict[str, Any]]] = {}

    def add(file: str, name: str, about: str, batch: str = "ragged", **more: Any) -> None:
        names = {"kind", "cut", "flags", "change"}
        row = {"id": f"{file}/{name}", "about": about, "kind": "gradient", "flags": [], "batch": batch}
        row |= {"cut": WHOLE, "options": {key: value for key, value in more.items() if key not in names}}
        files.setdefault(file, []).append(row | {key: value for key, value in more.items() if key in names})

    high: dict[str, Any] = {"epsilon_high": 0.28}
    add("clip", "token-mean", "clipping, divided by all tokens of the step (DAPO)", **high)
    add("clip", "sequence-mean", "clipping, the mean of each row's mean (GRPO)", reduce="sequence_mean", **high)
    add("clip", "constant", "clipping, divided by rows and a fixed length (Dr. GRPO)", reduce="constant", **high)
    add(
        "clip", "micro-token-mean", "clipping, the mean by micro-batch (BNPO), whole", reduce="micro_token_mean", **high
    )
    add("clip", "symmetric", "one epsilon for both bounds")
    add("clip", "narrow", "nearly all tokens are clipped", epsilon_low=0.02, epsilon_high=0.05)
    add("clip", "even", "rows of one length: all means agree", "even", **high)
    add("clip", "far", "ratios above 3 with a negative advantage, no dual clip", "far", **high)
    add("clip", "dual", "the same, dual clip at 3", "far", dual_clip=3.0, flags=["dual clip"], **high)
    add("clip", "likelihood", "and the likelihood of right answers (VAPO)", nll_weight=0.1, flags=["VAPO"])
    add("objectives", "gspo", "one ratio a row, mean of rows (GSPO)", ratio="sequence", reduce="sequence_mean", **high)
    add("objectives", "gspo-token-mean", "one ratio a row, mean over all tokens", ratio="sequence", **high)
    add("objectives", "gspo-narrow", "the same with the bounds of its paper", ratio="sequence", reduce="sequence_mean",
        epsilon_low=3e-4, epsilon_high=4e-4)  # fmt: skip
    add(
        "objectives", "luspo", "one ratio a row, rows by their lengths (LUSPO)", ratio="sequence", reduce="sequence_sum"
    )
    add("objectives", "luspo-token", "the same with a ratio a token", reduce="sequence_sum", flags=["padding"])
    add("objectives", "cispo", "a bounded weight without gradient, 1 + epsilon_high, no lower bound", objective="cispo",
        epsilon_low=1.0, **high)  # fmt: skip
    add("objectives", "cispo-low", "the same with a lower bound", objective="cispo", **high)
    add("objectives", "sapo", "a soft gate", objective="sapo", reduce="sequence_mean")
    add("objectives", "dppo", "tokens left out by how far their probability moved (DPPO)", objective="dppo")
    for kl in ("k1", "k2", "k3"):
        for way in ("pathwise", "total"):
            about = f"{kl}, {'the gradient of the estimator' if way == 'pathwise' else 'with the score term'}"
            add("kl", f"{kl}-{way}", about, beta=0.5, kl=kl, kl_gradient=way)
    add("kl", "sequence-mean", "k3 by rows", beta=0.5, reduce="sequence_mean")
    add("kl", "constant", "k3 beside Dr. GRPO", beta=0.5, reduce="constant")
    add("kl", "far", "k3 where log(reference / policy) is 4", "far", beta=0.1, dual_clip=3.0, flags=["large KL"])
    add("kl", "far-k2", "k2 there", "far", beta=0.1, kl="k2", dual_clip=3.0)
    add("kl", "times-ratio", "k3 times the ratio (DeepSeek-V3.2)", beta=0.5, kl_times_ratio=True)
    bounds = {"engine_low": 0.8, "engine_high": 1.2}
    add("engine", "token-truncate", "tokens by old / engine, at most 1.2", engine="token_truncate", engine_low=0.0,
        engine_high=1.2)  # fmt: skip
    add("engine", "token-mask", "tokens outside of 0.8 to 1.2 left out (IcePop)", engine="token_mask", **bounds)
    add("engine", "sequence-truncate", "rows by their product, at most 1.2", engine="sequence_truncate", engine_low=0.0,
        engine_high=1.2, reduce="sequence_mean")  # fmt: skip
    add("engine", "sequence-mask", "rows outside of 0.8 to 1.2 left out", engine="sequence_mask", **bounds)
    add("engine", "geometric-mask", "rows left out by their geometric mean, tokens weighed", engine="geometric_mask",
        engine_low=0.95, engine_high=1.05)  # fmt: skip
    add("engine", "with-kl", "the weight is the policy term's alone", engine="token_truncate", engine_low=0.0,
        engine_high=1.2, beta=0.5)  # fmt: skip
    for name, cut in CUTS.items():
        add("cut", f"token-mean-{name}", f"the mean over all tokens, {name}", cut=cut, **high)
        add("cut", f"sequence-mean-{name}", f"the mean of rows, {name}", cut=cut, reduce="sequence_mean", **high)
    add("cut", "constant-4-micro", "Dr. GRPO, 4-micro", cut=FOUR, reduce="constant")
    add("cut", "micro-token-mean-4-micro", "BNPO is the mean of means", cut=FOUR, reduce="micro_token_mean")
    add("cut", "gspo-4-micro", "GSPO, 4-micro", cut=FOUR, ratio="sequence", reduce="sequence_mean")
    add("cut", "kl-4-micro", "the KL term is cut too", cut=FOUR, beta=0.5)
    add("cut", "even-4-micro", "rows of one length: a mean of means is right here", "even", cut=FOUR)
    add("masks", "holes", "tokens of a tool within a completion", "holes", **high)
    add("masks", "holes-sequence-mean", "the same by rows", "holes", reduce="sequence_mean", beta=0.5)
    add(
        "masks", "holes-gspo", "the row's ratio is of its own tokens", "holes", ratio="sequence", reduce="sequence_mean"
    )
    add("masks", "empty-token-mean", "a completion that was cut, and is left out whole", "empty")
    add("masks", "empty-sequence-mean", "the same, where it still counts as a row", "empty", reduce="sequence_mean")
    logits: dict[str, Any] = {"batch": "logits", "kind": "logits", "cut": [[[0, 1, 2, 3]]]}
    add("logits", "temperature-1", "from logits", **logits)
    add("logits", "temperature-0.7", "logits divided by 0.7 before the softmax", temperature=0.7, **logits)
    add("logits", "entropy", "a bonus for entropy", entropy_coef=0.2, temperature=0.7, **logits)
    for scale in ("group", "batch", "none"):
        add("advantages", scale, f"rewards less the group's mean; divided by: {scale}", kind="advantages", scale=scale)
    abouts = {
        "one": "groups of one",
        "equal": "a group whose rewards are equal",
        "winner": "one right answer of four",
        "mixed": "groups whose rows do not stand together",
        "sizes": "groups of 2, 5 and 1",
    }
    for name, about in abouts.items():
        add("advantages", name, about, name, kind="advantages")
    other = [[-9.0 if not kept else value for value, kept in zip(*rows)] for rows in zip(*_padding())]
    for name, options in (("token-mean", {}), ("luspo", {"reduce": "sequence_sum"}), ("gspo", {"ratio": "sequence"})):
        about = f"what is masked counts for nothing, {name}"
        add("wiring", f"padding-{name}", about, kind="stays", change={"logps": other}, **options)
    other_worth = give_advantages(draw(LENGTHS) | {"rewards": [0.0, 1.0, 0.5, 0.0, 0.0, 1.0, 1.0, 3.0]})
    other_worth = {key: other_worth[key] for key in ("rewards", "advantages")}
    pairs: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "advantages": ("rewards, and the advantages that they give", other_worth, {}),
        "old": ("log-probabilities of the policy that drew", {"old": draw(LENGTHS, 12)["old"]}, {}),
        "reference": ("log-probabilities of the reference", {"reference": draw(LENGTHS, 13)["reference"]},
                      {"beta": 0.5}),
        "beta": ("the KL term's weight", {"beta": 0.5}, {}),
        "engine": ("weights by the engine", {"engine": None},
                   {"engine": "token_truncate", "engine_low": 0.0, "engine_high": 1.2}),
        "epsilon_high": ("the upper bound", {"epsilon_high": 0.28}, {"epsilon_high": 0.05}),
        "reduce": ("how tokens become one number", {"reduce": "sequence_mean"}, {}),
        "ratio": ("one ratio a row", {"ratio": "sequence"}, {"reduce": "sequence_mean"}),
        "likelihood": ("the likelihood of right answers", {"nll_weight": 0.1}, {}),
    }  # fmt: skip
    for name, (about, change, options) in pairs.items():
        add("wiring", name, f"{about}: has an effect", kind="moves", change=change, **options)
    add("wiring", "order", "in which order micro-batches come is all the same", kind="stays", cut=FOUR,
        change={"cut": [[[6, 7], [2, 3], [0, 1], [4, 5]]]})  # fmt: skip
    return files


def _padding() -> tuple[list[Any], list[Any]]:
    batch = draw(LENGTHS)
    return batch["logps"], batch["mask"]


REWARDED = {
    "one": {"group": list(range(8))},
    "equal": {"rewards": [1.0, 1.0, 1.0, 1.0, 2.0, 0.0, 1.0, 1.0]},
    "winner": {"rewards": [1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 1.0, 1.0]},
    "mixed": {"group": [0, 1, 0, 1, 1, 0, 0, 1]},
    "sizes": {"group": [0, 0, 1, 1, 1, 1, 1, 2]},
}


def expect(case: cases.LossCase) -> dict[str, Any]:
    """Return what a case expects, made twice.

    Raises:
        ValueError: the two ways do not agree.
    """
    if case.kind == "advantages":
        worth = definition.advantages(case.batch, case.options)
        _agree(case.id, worth, plain_loss.advantages_of(case.batch, case.options))
        return {"advantages": _rounded(worth)}
    value, gradient = definition.gradient(case.batch, case.options)
    number, quotients = plain_loss.difference_quotients(case.batch, case.options)
    _agree(case.id, torch.tensor(value), number)
    _agree(case.id, gradient, quotients)
    if case.kind in ("moves", "stays"):
        after = case.changed()
        moved = definition.gradient(after.batch, after.options)[1]
        share = ((moved - gradient).norm() / gradient.norm()).item()
        if (share > 0) != (case.kind == "moves"):
            raise ValueError(f"{case.id}: the gradient moves by {share}")
        return {"moves": round(share, 6)}
    return {"loss": _rounded(torch.tensor(value, dtype=torch.float64)), "gradient": _rounded(gradient)}


def _agree(name: str, first: Tensor, second: Any) -> None:
    apart = (first - torch.tensor(second, dtype=torch.float64)).norm() / first.norm().clamp(min=1e-3)
    if not apart < TOLERANCE:
        raise ValueError(f"{name}: two ways to the expected values are {apart.item():.1e} apart")


def _rounded(values: Tensor) -> Any:
    flat = [float(f"{value:.10g}") + 0.0 for value in values.flatten().tolist()]
    return torch.tensor(flat, dtype=torch.float64).view(values.shape).tolist()


def make_files() -> dict[str, dict[str, Any]]:
    """Return the content of each file, by its name."""
    batches = make_batches()
    batches |= {name: give_advantages(batches["ragged"] | change) for name, change in REWARDED.items()}
    files = {}
    for name, rows in make_rows().items():
        used = {row["batch"]: batches[row["batch"]] for row in rows}
        read = {key: {each: cases.tensor(values) for each, values in batch.items()} for key, batch in used.items()}
        rows = [row | {"expected": expect(cases.read_case(name, row, read))} for row in rows]
        about = f"Known gradients: {name}. The fields are explained in failurelab/known_gradients/cases.py"
        content: dict[str, Any] = {"about": about, "batches": used, "cases": rows}
        files[name] = content | {"sha256": cases.checksum(content)}
    return files


def to_text(content: dict[str, Any]) -> str:
    """Return a file's text: a line for each batch and each case."""
    lines = [f'{{"about": {json.dumps(content["about"])},', ' "batches": {']
    lines.append(",\n".join(f"  {json.dumps(name)}: {json.dumps(batch)}" for name, batch in content["batches"].items()))
    lines.append(' }, "cases": [')
    lines.append(",\n".join("  " + json.dumps(case) for case in content["cases"]))
    return "\n".join(lines) + f'\n ], "sha256": "{content["sha256"]}"}}\n'


def main(words: list[str], folder: pathlib.Path = cases.FOLDER) -> int:
    """Write the files, or check them; return the exit status."""
    stale = 0
    for name, content in make_files().items():
        path, text = folder / f"{name}.json", to_text(content)
        if "--check" not in words:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale += 1
            print(f"{path.name} is not what would be made")
        print(f"{path.name}: {len(content['cases'])} cases")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
