"""What the CPU's evidence predicts of a card, beside what a card measured: held, refuted, or NOT RUN.

python -m tools.predictions evidence/h100
"""

import json
import pathlib
import sys
from typing import Any

import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks" / "predictions.toml"
HEAD = ["| prediction | band | | |", "| --- | --- | --- | --- |"]


def read_figures(file: pathlib.Path, case: str, figure: str) -> dict[tuple, float]:
    """Return a figure of each record of an evidence file whose case begins so, by era, case and seed."""
    if not file.exists():
        return {}
    found = {}
    for record in json.loads(file.read_text(encoding="utf-8"))["records"]:
        value = record["figures"].get(figure)
        if record["case"].startswith(case) and isinstance(value, int | float):
            found[record["era"], record["case"], record.get("seed")] = float(value)
    return found


def judge(prediction: dict[str, Any], out: pathlib.Path, cpu: pathlib.Path) -> tuple[str, str]:
    """Return what became of a prediction, and the figures in words.

    Args:
        prediction: one table of predictions.toml.
        out: the card's evidence.
        cpu: the CPU's.
    """
    name = f"{prediction['benchmark']}.json"
    here, there = (read_figures(folder / name, prediction["case"], prediction["figure"]) for folder in (out, cpu))
    compared = {"within", "within_share"} & prediction.keys()
    asked = {key: value for key, value in here.items() if not compared or key in there}
    if not asked:
        return "NOT RUN", f"`benchmarks/{prediction['benchmark']}.py --device cuda --out evidence/{out.name}`"
    outside = {}
    for key, value in asked.items():
        width = prediction.get("within", prediction.get("within_share", 0) * abs(there.get(key, 0)))
        if compared and not abs(value - there[key]) <= width:
            outside[key] = f"{there[key]:.4g} on the CPU, {value:.4g} here"
        elif not prediction.get("at_least", value) <= value <= prediction.get("at_most", value):
            outside[key] = f"{value:.4g}"
    if outside:
        (era, case, _), worst = next(iter(outside.items()))
        return "refuted", f"{len(outside)} of {len(asked)} outside; {era}, {case}: {worst}"
    return "held", f"{len(asked)} of {len(asked)}"


def describe(out: pathlib.Path, cpu: pathlib.Path = ROOT / "evidence" / "cpu") -> list[str]:
    """Return a table of all predictions, as lines of Markdown."""
    lines = list(HEAD)
    for prediction in tomllib.loads(FILE.read_text(encoding="utf-8"))["prediction"]:
        outcome, figures = judge(prediction, out, cpu)
        bands = {"within": "the CPU's ± {:g}", "within_share": "the CPU's ± {:.0%}"}
        bands |= {"at_least": "at least {:g}", "at_most": "at most {:g}"}
        (band,) = [text.format(prediction[key]) for key, text in bands.items() if key in prediction]
        lines.append(f"| {prediction['says']} | {band} | {outcome} | {figures} |")
    return lines


if __name__ == "__main__":
    print("\n".join(describe(pathlib.Path(sys.argv[1]))))
