#!/usr/bin/env python3
"""One step beside the textbook, graded: mistakes and healthy trainers by people who knew no rule, each part once.

    python benchmarks/textbook_fresh.py PART [--names NAME ...] [--rules COMMIT] [--out FOLDER]
    python benchmarks/textbook_fresh.py --out FOLDER

`first` are corpus/trainers.tar.xz, graded by the rules of commit 682e297, `second` corpus/trainers_second.tar.xz,
`third` corpus/trainers_third.tar.xz, all in trl's default precision, by the rules of commit fbaae22, and `fourth`
corpus/trainers_fourth.tar.xz, alike, by those of commit 3f020c0: each has a `cases.py` with `load`, `BUGS` and
`HEALTHY`. The file keeps the other parts' records. Whether a name is the author's mistake is decided by hand, in the
table `SAME`, after the grading: the command without a part applies it.

Eras: today.
"""

import argparse
import contextlib
import importlib.util
import io
import pathlib
import sys
import tempfile

import archives
import frames
import recording

from failurelab import textbook
from failurelab_course import eras
from failurelab_course.experiments import devices, observe

CORPUS = pathlib.Path(__file__).with_name("corpus")
ARCHIVES = {
    "first": "trainers",
    "second": "trainers_second",
    "third": "trainers_third",
    "fourth": "trainers_fourth",
}
# What may be named, by the author's own words; whatever else is named of a case is named wrongly.
SAME = {
    "logps_without_temperature": "temperature",
    "scoring_attends_to_padding": "no attention mask",
    "padding_in_the_loss": "padding is trained on",
    "entropy_quantile_not_complemented": "top_entropy_quantile",
    "leave_one_out_baseline": "constant factor",
    "deviation_smoothed_over_steps": "constant factor",
    "sorted_without_the_advantages": "other rows' advantages",
    "reward_cache_without_the_prompt": "other rows' advantages",
    "dapo_normalized_per_micro_batch": "loss_type",
    "last_window_of_the_epoch": "accumulation",
    "clip_without_the_minimum": "clipping",
    "logits_not_shifted": "scores shifted by one",
    "kl_ratio_upside_down": "KL divergence",
    "clip_bounds_exchanged": "clipping",
    "advantages_whitened_in_each_micro_batch": "advantages, each times another factor",
    "accumulation_divided_twice": "accumulation",
    "first_token_left_out": "first token left out",
    "rewards_one_batch_late": "other rows' advantages",
    "old_policy_taken_anew": "ratio",
    "gradients_zeroed_between_micro_batches": "accumulation",
    "entropy_bonus_with_the_wrong_sign": "entropy",
    "dr_grpo_divided_by_the_longest": "constant factor",
    "ratio_left_out_in_later_steps": "ratio",
    "old_logps_taken_anew_each_step": "ratio",
    "sequence_ratio_not_normalized": "importance_sampling_level",
    "minimum_left_out": "clipping",
    "advantages_negated": "opposite sign",
    "last_micro_batch_lost": "accumulation",
    "share_taken_for_quantile": "top_entropy_quantile",
    "temperature_left_out_in_scoring": "temperature",
    "kl_against_the_policy_itself": "KL divergence",
    "padding_trained_on": "padding is trained on",
    "mask_shifted_by_one": "last token left out",  # "and the last token is lost", says its author
    "divided_by_the_whole_generation": "divided by the tokens of the generation",
    "advantages_of_another_group": "other rows' advantages",
    "bounds_swapped": "clipping",
    "reference_is_the_old_policy": "KL divergence",  # which is 0 there, as if it were left out
    "kl_with_the_wrong_sign": "KL divergence",
    "sequence_ratio_over_the_width": "importance_sampling_level",
    "last_token_left_out": "last token left out",
    "tokens_of_a_micro_batch_as_divisor": "accumulation",
    "first_micro_batch_forgotten": "accumulation",
    "advantages_read_crosswise": "other rows' advantages",
    "every_place_trained": "padding is trained on",
    "advantages_not_centred": "no baseline",
    "divided_by_the_longest_completion": "constant factor",
}


def read_cases(part: str) -> list[dict]:
    """Return the cases of a part, each with `load`, and with `kind`: mistake or healthy."""
    sys.path.insert(0, str(eras.root() / "tests" / "unit"))  # `steps`, which the cases make their trainers with
    with tempfile.TemporaryDirectory(prefix="cases-") as folder, contextlib.chdir(eras.root()):
        path = archives.unpack(CORPUS / f"{ARCHIVES[part]}.tar.xz", pathlib.Path(folder)) / "cases.py"
        spec = importlib.util.spec_from_file_location("cases", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    kinds = (("mistake", module.BUGS), ("healthy", module.HEALTHY))
    return [case | {"kind": kind, "load": module.load} for kind, group in kinds for case in group]


def judge(case: dict) -> dict:
    """Return the figures of one case, in a trainer of its own."""
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = case["make"](*case["load"](), folder)
        with textbook.compare(trainer, case["steps"]) as comparison:
            trainer.train()
    reports = comparison.reports
    worst = min((report.apart for report in reports if report.apart), key=lambda apart: apart.cosine, default=None)
    return {
        "verdicts": [report.verdict for report in reports],
        "named": next((report.named for report in reports if report.named), None),
        "reasons": [report.reason for report in reports if report.verdict != "HELD"],
        "texts": any(report.texts for report in reports),
        "what": case["what"],
        "cosine": worst.cosine if worst else None,
        "size": worst.size if worst else None,
    }


def grade(name: str, figures: dict) -> str:
    """Return what became of a case: named, named wrongly, found, held, or not checked."""
    if figures["named"]:
        return "named" if figures["named"] == SAME.get(name) else "named wrongly"
    verdicts = set(figures["verdicts"])
    found = "FOUND" in verdicts or figures.get("texts")  # texts are a finding of the report's own
    return "found" if found else "held" if "HELD" in verdicts else "not checked"


def table_textbook_fresh(folder: pathlib.Path) -> str:
    """Mistakes and healthy trainers by people who had not read the rules: how many were found."""
    runs = frames.read_runs(folder, "textbook_fresh", r"(?P<kind>mistake|healthy): (?P<name>.+)")
    runs["missed"] = runs["verdict"].isin(["held", "not checked"])
    parts = list(dict.fromkeys(runs["part"]))
    mistakes, healthy = (
        [runs[(runs["kind"] == kind) & (runs["part"] == part)] for part in parts] for kind in ("mistake", "healthy")
    )
    body = [
        ["mistakes: found", *(frames.count(~part["missed"].astype(bool)) for part in mistakes)],
        ["of these, rightly named", *((part["verdict"] == "named").sum() for part in mistakes)],
        ["named wrongly", *((part["verdict"] == "named wrongly").sum() for part in mistakes)],
        ["healthy trainers: accused", *(frames.count(~part["missed"].astype(bool)) for part in healthy)],
    ]
    return frames.markdown(["", *(f"{part} part" for part in parts)], body)


def main() -> None:
    """Grade a part, and write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=ARCHIVES, help="to grade; none: only name anew")
    parser.add_argument("--names", nargs="*", help="names of cases; all without")
    parser.add_argument("--rules", default="", help="the commit of the rules, for the records")
    parser.add_argument("--device", type=devices.argument, default="cpu")
    parser.add_argument("--out", type=pathlib.Path, help="folder of textbook_fresh.json; other cases in it are kept")
    options = parser.parse_args()
    observe.quiet()
    records = []
    for case in read_cases(options.part) if options.part else []:
        if options.names and case["name"] not in options.names:
            continue
        figures = judge(case) | {"part": options.part, "rules": options.rules}
        print(f"{case['kind']} {case['name']}: {grade(case['name'], figures)} {figures['named'] or ''}", flush=True)
        named = f"{case['kind']}: {case['name']}"
        records.append(observe.record("F21", "measured", figures, case=named, device=options.device))
    if options.out:
        path, judged = options.out / "textbook_fresh.json", {record["case"] for record in records}
        before = recording.read_file(path) if path.exists() else []
        records = [record for record in before if record["case"] not in judged] + records
        for record in records:
            record["figures"]["verdict"] = grade(record["case"].partition(": ")[2], record["figures"])
        recording.write_file(path, records)


if __name__ == "__main__":
    main()
