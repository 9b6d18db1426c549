"""The three-state proof of labs, run for real: broken fails as declared, wrong fixes too, the solution heals.

Nightly for all, else for those that changed since `make verify`.
"""

import re
import shutil

import pytest

from failurelab_course import eras
from failurelab_course.labs import verify as labs
from failurelab_course.labs.verified import LabHashes


@pytest.fixture(scope="session")
def matrix():
    """All labs in all states: the long part, run once."""
    return labs.verify()


def check_rows(matrix, names):
    """Whatever is not a PASS is shown with its reason."""
    if broken := [f"{row.lab} {row.script}: {row.reason}" for row in matrix if row.result == "ENVIRONMENT"]:
        raise eras.EraError("; ".join(broken))
    assert [f"{row.lab} {row.script}: {row.result}: {row.reason}" for row in matrix if row.result != "PASS"] == []
    assert re.fullmatch(r"\d+ labs: (\d+) of \1 PASS", labs.summary(matrix))
    assert len({(row.lab, row.state) for row in matrix}) == 3 * len(names)


@pytest.mark.slow
def test_labs_that_changed_are_proved():
    """Every lab has the hashes of its last proof, or is proved here."""
    hashes = LabHashes()
    changed = hashes.changed(labs.find())
    assert set(hashes.read()) - set(labs.known()) == set(), "Next: make verify, which drops labs that are no more"
    if changed:
        check_rows(labs.verify(changed), changed)


# Of several stacks and kinds; the first is proved with nothing of failurelab's but what measures.
SOME = ["01_frozen_embeddings", "09_no_optimizer", "26_long_completions", "39_a_baseline_first"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what some labs are proved by, whose hashes are kept; and these labs."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("helpers", "eras", "models/tiny-qwen2", *(f"labs/{name}" for name in SOME)):
        shutil.copytree(eras.root() / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    found = labs.find(SOME, tree / "labs")
    hashes = LabHashes(tree)
    hashes.write({lab.name: hashes.of(lab) for lab in found}, [], SOME)
    assert LabHashes(tree).changed(found) == {}
    return tree, found


def changed_with(tree, file, change):
    """Return the labs that are to be proved again, and which part of each, with a change of one file's text."""
    path, healthy = tree[0] / file, (tree[0] / file).read_bytes()
    assert change(healthy) != healthy
    path.write_bytes(change(healthy))
    try:
        return LabHashes(tree[0]).changed(tree[1])
    finally:
        path.write_bytes(healthy)


@pytest.mark.parametrize(
    ("file", "part", "which"),
    [
        ("labs/01_frozen_embeddings/start.py", "scripts", SOME[:1]),
        ("eras/trl-0.14.txt", "stack", SOME[:2]),
        ("helpers/failurelab_course/labs/checker/server.py", "code", SOME),
        ("helpers/failurelab_course/labs/checker/kinds/weights.py", "code", SOME[2:3]),
        # Helpers that a kind imports, and what such a helper imports.
        ("helpers/failurelab/mismatch.py", "code", SOME[2:3]),
        ("helpers/failurelab/handles.py", "code", [SOME[0], *SOME[1::2]]),
        ("helpers/failurelab/textbook/weights.py", "code", []),
    ],
)
def test_a_change_of_what_decides_about_a_lab_is_noticed(tree, file, part, which):
    assert changed_with(tree, file, lambda text: text + b"\n") == {name: [part] for name in which}


def test_a_mechanism_of_the_registry_decides_and_its_text_does_not(tree):
    """A lab's verdict is the registry's too."""
    file = "helpers/failurelab/failures/F1.toml"
    assert changed_with(tree, file, lambda text: b"# a comment\n" + text) == {}
    changed = changed_with(tree, file, lambda text: text.replace(b"without_gradient > 0", b"without_gradient > 1"))
    assert changed == {lab.name: ["code"] for lab in tree[1] if "F1" in lab.failures} != {}


def test_what_did_not_pass_is_not_kept(tree):
    """One script of a lab that fails makes the lab one that must be proved; a lab that is gone is dropped."""
    hashes, found = LabHashes(tree[0]), tree[1]
    kept = hashes.file.read_text()
    now = {lab.name: hashes.of(lab) for lab in found}
    rows = [
        labs.ScriptOutcome(SOME[0], labs.BROKEN, "start", "PASS"),
        labs.ScriptOutcome(SOME[0], labs.RIGHT_FIX, "solution", "NOT RUN"),
        labs.ScriptOutcome(SOME[1], labs.RIGHT_FIX, "solution", "PASS"),
    ]
    hashes.write(now | {"00_gone": {}}, rows, SOME)
    assert sorted(hashes.read()) == SOME[1:]
    assert hashes.changed(found) == {SOME[0]: ["scripts", "stack", "code"]}
    hashes.file.write_text(kept)


@pytest.mark.nightly
def test_every_row_holds(matrix):
    check_rows(matrix, labs.known())


@pytest.mark.nightly
def test_a_false_alarm_is_healthy_all_the_time(matrix):
    """The run is the same in every state but the wrong fixes; what heals is a verdict with figures that hold."""
    names = [lab.name for lab in labs.find() if lab.false_alarm]
    assert len(names) >= 2
    for name in names:
        broken, solved = (
            next(r for r in matrix if (r.lab, r.state) == (name, state)) for state in (labs.BROKEN, labs.RIGHT_FIX)
        )
        for figure in ("accuracy_after", "tensors_changed", "warnings", "reward_last"):
            assert broken.metrics[figure] == pytest.approx(solved.metrics[figure], abs=1e-6)
        assert (broken.metrics["answer"], solved.metrics["answer"]) == ("", "harmless")
        assert solved.metrics["answer_claims"] >= 3 and solved.metrics["answer_wrong"] == 0
