"""Reports for issues: ids, the registry's words and versions, and nothing else that an answer holds."""

import dataclasses
import subprocess
import sys

import pytest

from failurelab import failures
from failurelab.preflight.answer import Answer, Effect, Finding, Location, Verdict
from failurelab.preflight.report import issue

PRIVATE = "hf_qWzLkJhGfDsA quill@ravenholm.example /srv/ravenholm/rows.jsonl 'ravenholm pays its debts' opal"


def private_answer():
    """Return an answer of preflight that has private words in everything that comes from outside."""
    texts = dict.fromkeys(("evidence", "part", "fault", "tried", "diff", "why", "control"), PRIVATE)
    named = Finding("F9", repair=f"Load {PRIVATE}", verdict=Verdict.NAMED, place=Location(PRIVATE, 1), **texts)
    answer = Answer(f"work/{PRIVATE}/train.py", {
        "torch": "2.5.1+ravenholm.internal", "trl": "0.14.0", "peft": "0.17.0+cpu", "ravenholm": "1.0",
    })  # fmt: skip
    others = [
        dataclasses.replace(named, failure="F14", hidden=True),
        dataclasses.replace(named, failure="rate", verdict=Verdict.SUSPECTED),
        Finding.held("F1", PRIVATE, PRIVATE),
        Finding.not_checked("F11", PRIVATE),
    ]
    answer.settle([named, *others])
    answer.cut, answer.error, answer.notes = [PRIVATE], PRIVATE, [PRIVATE]
    answer.patch, answer.patch_folder, answer.effects = PRIVATE.encode(), PRIVATE, [Effect("writes", PRIVATE)]
    return answer


def test_a_report_of_preflight_holds_the_listed_fields_alone():
    text = issue.markdown(private_answer())
    assert not [word for word in ("ravenholm", "hf_", "quill", "opal", "srv", "0.4 %") if word in text]
    fixes = [failure.fix for failure in failures.all() if failure.id in ("F9", "F14")]
    versions = ("| torch | 2.5.1 |", "| trl | 0.14.0 |", "| peft | 0.17.0+cpu |")
    assert all(
        part in text for part in (*fixes, *versions, "F1", "F11", "1 suspected (learning rate)", "ended in an error")
    )


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("2.6.0.dev20250101+cu118", "2.6.0.dev20250101+cu118"),
        ("0.15.0rc1", "0.15.0rc1"),
        ("1.0+cpu.ravenholm", "1.0"),
        ("opal", "unknown"),
    ],
)
def test_a_version_is_without_a_label_of_its_builder(version, shown):
    assert f"| trl | {shown} |" in issue.markdown(Answer("train.py", {"trl": version}))


def test_preflight_writes_a_new_file_and_no_other(tmp_path):
    """A script that is not there: the report says so, and not what the script is called."""
    command = [sys.executable, "-m", "failurelab.preflight", "--json", "out.json", "--report", "issue.md", "nowhere.py"]
    first, again = (subprocess.run(command, cwd=tmp_path, capture_output=True, text=True) for _ in range(2))
    text = (tmp_path / "issue.md").read_text()
    assert (first.returncode, again.returncode) == (3, 2) and "could not be judged" in text and "nowhere" not in text
    assert again.stderr.count("\n") == 1 and "issue.md is there already" in again.stderr
