#!/usr/bin/env python3
"""Reward functions as people write them, graded: what preflight's judge says of each, beside its author's label.

    python benchmarks/reward_functions.py [--cases FILE] [--names NAME ...]

`corpus/reward_functions.tar.xz` has them, in `reward_functions/cases.py`: a list CASES of dicts with

    name       of the case
    label      dead (the same reward for all), blind (it cannot see what it should), inverted (less for what is better),
               or sound
    functions  the reward functions of one trainer
    guilty     the name of the one that the label is about; absent for sound ones
    rows       of the dataset: dicts with a prompt each
    what       in words, what is wrong, or why a sound one looks odd
    weights    reward_weights; absent: all 1
    template   the tokenizer's chat template; absent: that of the small model

A record for each: `named` (a finding about the guilty function, undone by the judge), `found` (one that was not
undone), `read` (NOT CHECKED, and the guilty function is in it), `wrong one` (a finding about another function alone),
`missed`; of sound ones `silent`, `read` or `accused`.

Eras: today.
"""

import contextlib
import copy
import importlib.util
import pathlib
import sys
import tempfile
import types
from collections.abc import Iterator

import archives
import frames
import recording

from failurelab_course.experiments import models, observe
from failurelab_preflight.answer import Verdict
from failurelab_preflight.judges.rewards import judge_rewards
from failurelab_preflight.training import Training

CASES = pathlib.Path(__file__).with_name("corpus") / "reward_functions.tar.xz"


def judge(case: dict, tokenizer: object) -> dict:
    """Return what is said of one case."""
    tokenizer = copy.deepcopy(tokenizer)
    if case.get("template"):
        tokenizer.chat_template = case["template"]
    trainer = types.SimpleNamespace(
        reward_funcs=list(case["functions"]), reward_weights=case.get("weights"), processing_class=tokenizer,
        args=types.SimpleNamespace(remove_unused_columns=False), chat_template_kwargs={}, state=None,
    )  # fmt: skip
    answers = list(judge_rewards(Training(trainer=trainer, arguments={}, dataset=case["rows"])))
    accusations = [answer for answer in answers if answer.verdict in (Verdict.FOUND, Verdict.SUSPECTED)]
    read = [answer for answer in answers if answer.verdict is Verdict.NOT_CHECKED]
    verdict = _grade(case, accusations, read)
    texts = [getattr(answer, "evidence", None) or answer.why for answer in (*accusations, *read)]
    failures = sorted({answer.failure for answer in accusations})
    return {"label": case["label"], "verdict": verdict, "failures": failures, "said": texts, "what": case["what"]}


def _grade(case: dict, accusations: list, read: list) -> str:
    if case["label"] == "sound":
        return "accused" if accusations else "read" if read else "silent"
    guilty = case["guilty"]
    about = [answer for answer in accusations if guilty in answer.evidence]
    if any(answer.verdict is Verdict.FOUND and answer.tried for answer in about):
        return "named"
    if about:
        return "found"
    if accusations:
        return "wrong one"
    return "read" if any(guilty in answer.why for answer in read) else "missed"


@contextlib.contextmanager
def cases_of(path: pathlib.Path) -> Iterator[list[dict]]:
    """Give the cases of a Python file, or of an archive that has one; the file is there as long as they are judged."""
    with tempfile.TemporaryDirectory(prefix="reward-functions-") as folder:
        if path.suffix != ".py":
            path = archives.unpack(path, pathlib.Path(folder)) / "cases.py"
        spec = importlib.util.spec_from_file_location("cases", path)
        module = sys.modules["cases"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.CASES


def table_reward_functions(folder: pathlib.Path) -> str:
    """Reward functions by somebody who had not read the judge: what is said of broken and of sound ones."""
    runs = frames.read_runs(folder, "reward_functions", r"(?P<part>\w+): (?P<name>.+)")
    states = {"named": "named, the cause undone", "found": "found", "read": "NOT CHECKED, with the cause",
              "wrong one": "another one accused", "missed": "missed"}  # fmt: skip
    broken, sound = runs[runs["part"] != "sound"], runs[runs["part"] == "sound"]
    said = "; ".join(f"{(broken['verdict'] == state).sum()} {text}" for state, text in states.items())
    accused = frames.count(sound["verdict"] == "accused")
    return f"{len(broken)} dead, blind or inverted reward functions: {said}. Sound, but odd: {accused} accused."


def main() -> None:
    """Grade and record."""
    options = recording.begin(
        __doc__,
        cases={"type": pathlib.Path, "default": CASES, "help": "a Python file with CASES, or the archive"},
        names={"nargs": "*", "help": "names of cases; all without"},
    )
    _, tokenizer = models.load("tiny")
    with cases_of(options.cases) as cases:
        for case in cases:
            if options.names and case["name"] not in options.names:
                continue
            figures = judge(case, tokenizer)
            print(f"{case['label']} {case['name']}: {figures['verdict']} {figures['said'][:1]}", flush=True)
            observe.record("F14", "measured", figures, case=f"{case['label']}: {case['name']}", device=options.device)


if __name__ == "__main__":
    main()
